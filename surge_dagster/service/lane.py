"""Lane: one queue of texts before one encoder pool, which encodes them in passes of a bounded
number of tokens.

A pass takes texts, not requests, from the head of the queue: small requests share one, and a large
request is spread over several. Tokens are counted when a request comes, so that a lane with a
promise can refuse at once what it could not answer in time. A request that is cancelled leaves the
queue with the texts that no pass has taken yet.

The pool replaces workers that are lost, and encodes their texts again. When it cannot go on, every
request that waits, and each one that comes later, gets `LaneDown`. An idle lane with a promise
encodes a text for nobody twice a second: so a worker that hangs is known, and replaced, before a
request comes.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.arena import Arena, Slot
from surge_dagster.engine.encoder.calls import EncodeMetrics
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import EncoderError, SurgeError
from surge_dagster.engine.files.validation import invalid_row
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support.columns import value_lengths
from surge_dagster.engine.support.waiting import wait_for_thread
from surge_dagster.service.errors import (
    LaneClosed,
    LaneDown,
    Overloaded,
    RequestTooLarge,
    TooLong,
    UnusableText,
)
from surge_dagster.service.promise import MARGIN, Promise
from surge_dagster.service.text_queue import Encoded, Part, Request, TextQueue
from surge_dagster.service.tokens import TokenCounter

log = logging.getLogger(__name__)

MOST_TEXT_BYTES = 16 << 20
# Bytes of a text that the model does not read take time too: a text counts as at least a token for
# so many bytes.
_BYTES_PER_TOKEN = 16
_NEWEST_SHARE = 0.2  # of the last pass in the measured rate
_LOOK_SECONDS = 0.5  # between two looks of an idle lane at its pool
_NOBODYS_TEXT = pa.array(["a"], pa.large_string())
_STUCK_SECONDS = 0.3  # by which a pass is late when its worker no longer counts as alive


@dataclass(slots=True)
class LaneCounts:
    """What lanes of a space and a side have encoded, one after the other."""

    texts: int = 0
    tokens: int = 0
    passes: int = 0


class Lane:
    """Encodes requests through one pool, in the order in which they come.

    Args:
        pool: closed with the lane; started by the first request where it was not before.
        recorded: the space as the output has it, whose tokenizer the pool must have.
        counter: counts tokens as the pool does.
        pass_tokens: of a pass at most, but for a single text of more.
        promise: None: requests wait as long as it takes.
        counts: what is encoded is added to these.
        clock: monotonic seconds.

    Attributes:
        pool, space: what encodes, and into which space.
        last_accepted_at: on the clock; when the lane was made, before the first request.
        failed_at: on the clock; None while the pool can go on.
    """

    def __init__(
        self,
        pool: EncoderPool,
        recorded: Space,
        counter: TokenCounter,
        pass_tokens: int,
        promise: Promise | None = None,
        *,
        counts: LaneCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.space, self.promise = pool.space, promise
        self.pool, self._recorded, self._counter, self._pass_tokens = (
            pool,
            recorded,
            counter,
            pass_tokens,
        )
        self.counts = counts or LaneCounts()
        self._clock = clock
        self._changed = threading.Condition()
        self._queue = TextQueue()
        self._pass: list[Part] = []  # under way
        self._computing_since: float | None = None
        self._tokens_per_second: float | None = None  # None until a pass was timed
        self._thread: threading.Thread | None = None
        self._arena: Arena | None = None
        self._closing = self._stopping = False
        self.failed_at: float | None = None
        self.last_accepted_at = clock()

    @property
    def waiting_tokens(self) -> int:
        """Of texts that no pass has taken; a text of many bytes counts as more than it has."""
        return self._queue.tokens

    @property
    def waiting_requests(self) -> int:
        """Those with texts that no pass has taken."""
        return len(self._queue)

    @property
    def is_alive(self) -> bool:
        """Whether a worker is ready, or needed only by a first request, and no pass hangs as far as
        one is promised."""
        is_open = not self._stopping and self.failed_at is None
        return is_open and (
            self._arena is None or (self.pool.ready_workers > 0 and not self._is_stuck())
        )

    @property
    def _down(self) -> LaneDown:
        return LaneDown(
            f"no worker encodes texts of space {self.space.name} any more; the service's log says why"
        )

    def accept(
        self,
        texts: Sequence[str],
        *,
        truncate: bool = False,
        answer: Future[Encoded] | None = None,
    ) -> Future[Encoded]:
        """Put the texts of a request into the queue; does not wait for their vectors.

        Cancelling the answer drops the texts that no pass has taken. Its errors are `LaneDown`,
        `LaneClosed`, `UnusableText`, and `TooLong` where tokens cannot be counted before.

        Args:
            truncate: whether texts longer than the model reads are cut; else they are refused.
            answer: is returned, and may be cancelled at any time; None: a new one.

        Raises:
            TooLong, RequestTooLarge, UnusableText: this request can never be answered.
            Overloaded: it could not be answered in time.
            LaneDown, LaneClosed: none can.
        """
        answer, texts = answer or Future(), list(texts)
        column, text_bytes = measured(texts)
        floors = np.maximum(1, -(-text_bytes // _BYTES_PER_TOKEN))
        with self._changed:  # before tokens are counted, which takes long where there are many
            self._require_room(int(floors.sum()))
            if len(texts) == 1:  # which an idle lane would take, whatever its tokens
                self._require_in_time(int(floors[0]))
        try:
            tokens, is_too_long = self._counter.count(texts, text_bytes, answer.cancelled)
        except CancelledError:
            return answer
        if is_too_long.any() and not truncate:
            raise self._too_long(is_too_long)
        ends = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(np.maximum(tokens, floors), out=ends[1:])
        vectors = np.empty((len(texts), self.space.dimension), np.float32)
        encoded = Encoded(vectors, tokens, np.zeros(len(texts), np.bool_))
        request = Request(column, ends, truncate, encoded, answer)
        with self._changed:
            if answer.cancelled():
                return answer
            self._require_room(request.size)
            self._require_in_time(request.size)
            self._queue.append(request)
            self.last_accepted_at = self._clock()
            self._start_thread()
            self._changed.notify_all()
        # Not the request itself, which holds the answer: both, and the vectors, would wait for the
        # garbage collector.
        answer.add_done_callback(partial(self._drop_cancelled, weakref.ref(request)))
        return answer

    def start(self) -> None:
        """Start the pool, and the lane's thread. The first request does so too, where nothing else
        did."""
        self._recorded.require_tokenizer(self.pool.start().tokenizer)
        if self._arena is None:
            most_bytes = max(MOST_TEXT_BYTES, _BYTES_PER_TOKEN * self._pass_tokens)
            self._arena = self.pool.arena(
                slots=1, max_texts=self._pass_tokens, max_bytes=most_bytes
            )
        self._start_thread()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"surge-lane-{self.space.task}", daemon=True
            )
            self._thread.start()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, wait for the answers of the others for so long, and end the pool."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._queue and not self._pass, drain_seconds)
            self._stopping = True
            self._changed.notify_all()
        self.pool.close()  # which ends a pass that is under way
        if self._thread is not None:
            wait_for_thread(self._thread)
        self._answer_all(
            LaneClosed(f"the lane of {self.space.name} ended before this request was answered")
        )
        if self._arena is not None:
            self._arena.close()

    def _too_long(self, is_too_long: np.ndarray) -> TooLong:
        return TooLong(np.flatnonzero(is_too_long).tolist(), self.space.max_length)

    def _require_room(self, size: int) -> None:
        """Raise where no request is answered, or none of at least so many tokens."""
        if self._closing:
            raise LaneClosed(f"the lane of {self.space.name} takes no more requests")
        if self.failed_at is not None:
            raise self._down
        if self.promise is not None and size > self.promise.largest_tokens:
            raise RequestTooLarge(
                f"the request has {size:,} tokens or more, and at most {self.promise.largest_tokens:,} can be answered "
                f"within {self.promise}; split it, or send its texts as documents"
            )

    def _require_in_time(self, size: int) -> None:
        """Raise if a request of so many tokens is expected to take longer than promised."""
        if self.promise is None:
            return
        over = MARGIN * self.expected_seconds(size) - self.promise.promised_seconds
        if over > 0:
            raise Overloaded(
                f"{self.waiting_tokens:,} tokens wait: the request could take {1000 * over:.0f} ms longer than "
                f"{self.promise}",
                over,
            )

    def expected_seconds(self, size: int = 0) -> float:
        """Return the seconds until what waits, and a request of so many tokens, is answered; 0
        without a promise."""
        if self.promise is None:
            return 0.0
        waiting = self.waiting_tokens + size
        if self._computing_since is None and not self._queue:
            # else a slow lane would never be tried again
            return self.promise.expected_seconds(waiting)
        return self.promise.expected_seconds(
            waiting, self._tokens_per_second, self._under_way_seconds()
        )

    def _under_way_seconds(self) -> float:
        begun = self._computing_since  # which another thread may unset
        return 0.0 if begun is None else self._clock() - begun

    def _is_stuck(self) -> bool:
        if self.promise is None:
            return False
        tokens = max(self.promise.pass_tokens, sum(part.size for part in self._pass))
        longest = MARGIN * tokens / self.promise.tokens_per_second
        return self._under_way_seconds() > longest + _STUCK_SECONDS

    def _drop_cancelled(self, waiting: weakref.ref[Request], answer: Future[Encoded]) -> None:
        """Forget the request of an answer, if it was cancelled."""
        if answer.cancelled() and (request := waiting()) is not None:
            with self._changed:
                self._queue.remove(request)
                self._changed.notify_all()

    # Below runs in the lane's own thread.

    def _run(self) -> None:
        try:
            self.start()
            while self._next_pass():
                self._encode()
        except BaseException as error:
            with self._changed:
                self.failed_at = self._clock()
            self._answer_all(self._ended_by(error))

    def _next_pass(self) -> bool:
        """Takes the texts of a pass as soon as there are some, or none for one of nobody's text;
        False at the end."""
        with self._changed:
            self._pass = []
            self._changed.notify_all()
            while not self._changed.wait_for(lambda: self._queue or self._stopping, _LOOK_SECONDS):
                self.pool.dispatcher()  # raises where the pool has failed
                if self.promise is not None:
                    break
            if self._stopping:
                return False
            self._pass = self._queue.take(self._pass_tokens)
            self._computing_since = self._clock()
            return True

    def _encode(self) -> None:
        assert self._arena is not None and self._computing_since is not None
        slot = self._arena.acquire(lambda: self._stopping)
        try:
            sizes = [part.stop - part.start for part in self._pass]
            for part, size in zip(self._pass, sizes, strict=True):
                slot.append(part.request.texts.slice(part.start, size))
            if not self._pass:
                slot.append(_NOBODYS_TEXT)
            borders = np.cumsum([0, *sizes[:-1]])
            call = self.pool.submit(slot, borders)
            try:
                metrics = call.result()
            except (
                EncoderError
            ) as error:  # of these texts; where it is of the pool, the next call has it too
                why = self._ended_by(error)
                for part in self._pass:
                    self._answer(part.request, why)
                return
            finally:
                seconds, self._computing_since = self._clock() - self._computing_since, None
            assert metrics is not None
            if self._pass:
                self._count(metrics, seconds)
            self._hand_out(slot, borders, metrics)
        finally:
            slot.release()

    def _ended_by(self, error: BaseException) -> SurgeError:
        """What clients hear of it; the rest is of the workers, and for the log alone."""
        if self._closing:
            return LaneClosed("the lane was closed")
        log.error("the lane of %s (%s) failed: %s", self.space.name, self.space.task, str(error))
        return self._down

    def _hand_out(self, slot: Slot, borders: np.ndarray, metrics: EncodeMetrics) -> None:
        """Copies vectors to their requests, and answers those that have all of theirs."""
        failed = {
            int(np.searchsorted(borders, row.row, side="right")) - 1: row for row in metrics.failed
        }
        for place, part in enumerate(self._pass):
            request, encoded, first = part.request, part.request.encoded, int(borders[place])
            if (row := failed.get(place)) is not None:
                log.warning("a text for %s cannot be encoded: %s", self.space.name, row.reason)
                reason = "the text ended every worker that tried it"
                self._answer(request, UnusableText(part.start + row.row - first, reason))
                continue
            end = first + part.stop - part.start
            encoded.vectors[part.start : part.stop] = slot.matrix(first, end)
            encoded.truncated[part.start : part.stop] = slot.truncation(first, end)
            request.missing -= part.stop - part.start
            if not request.missing:
                if encoded.truncated.any() and not request.truncate:
                    self._answer(request, self._too_long(encoded.truncated))
                else:  # files have no such vector either, as of a text without tokens
                    invalid = invalid_row(encoded.vectors, normalized=self.space.normalize)
                    self._answer(request, UnusableText(*invalid) if invalid else None)

    def _count(self, metrics: EncodeMetrics, seconds: float) -> None:
        self.counts.passes += 1
        self.counts.texts += metrics.costs.texts_computed
        self.counts.tokens += metrics.costs.tokens
        size = sum(part.size for part in self._pass)
        if self.promise is not None:
            # A small pass says only whether the device is slower than a full one takes.
            counted = max(size, self.promise.pass_tokens)
            self._measure(counted / max(seconds, 1e-9), self.promise.tokens_per_second)

    def _measure(self, rate: float, most: float) -> None:
        """Let the rate follow the last passes, but not above that of the start, which is during
        bulk work."""
        before = self._tokens_per_second or most
        self._tokens_per_second = before + _NEWEST_SHARE * (min(rate, most) - before)

    def _answer(self, request: Request, error: SurgeError | None = None) -> None:
        with self._changed:
            self._queue.remove(request)
        if request.answer.done() or not request.answer.set_running_or_notify_cancel():
            return  # it was cancelled, or another of its texts has failed
        if error is not None:
            request.answer.set_exception(error)
        else:
            request.answer.set_result(request.encoded)

    def _answer_all(self, error: SurgeError) -> None:
        with self._changed:
            requests = dict.fromkeys([*(part.request for part in self._pass), *self._queue])
        for request in requests:
            self._answer(request, error)


def measured(texts: list[str]) -> tuple[pa.LargeStringArray, np.ndarray]:
    """At least one text as a column, and the bytes of each, int64; texts that no lane takes are
    refused."""
    if not texts:
        raise ValueError("a request has at least one text")
    try:
        column: pa.LargeStringArray = pa.array(texts, pa.large_string())  # pyright: ignore[reportAssignmentType]
    except UnicodeEncodeError as error:
        row = texts.index(error.object)
        raise UnusableText(
            row, "it holds half of a surrogate pair, which is no character"
        ) from None
    text_bytes = value_lengths(column)
    if (longest := int(text_bytes.max())) > MOST_TEXT_BYTES:
        row = int(text_bytes.argmax())
        raise RequestTooLarge(
            f"row {row} of the request has {longest:,} bytes; a text has at most {MOST_TEXT_BYTES:,}: shorten it"
        )
    return column, text_bytes
