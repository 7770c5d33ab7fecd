"""Lane: one queue of texts for one encoder pool, which encodes them in passes of a bounded number
of tokens.

A pass takes texts, not requests, from the head of the queue: small requests share one, and a large
request is spread over several. Texts are tokenized once, when a request comes, and workers get the
token ids. Some cannot take them, such as those of a model without a fast tokenizer: they get the
texts, and a text counts as a token for every four bytes. A request that is cancelled gives up the
texts that no pass has taken.

A lane for queries promises the seconds within which an accepted request is answered. A request is
expected to take

    expected seconds = tokens of unanswered texts, its own included / tokens per second

It is accepted if one and a half times that is within the promise, and else refused with the time to
come back. The rate follows from the pool's `Speed`, and passes that are slower lower it. The margin
is for passes that take longer than usual, and for reading requests and writing answers. Late
answers are rare, but possible: the promise is measured, and not proved.

The pool replaces workers that are lost, and encodes their texts again. When it gives up, all
requests are answered with 503, and `ServedSpaces` replaces the lane.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.arena import Arena, Slot
from surge_dagster.engine.encoder.pool import EncoderPool, PoolFacts
from surge_dagster.engine.encoder.schedule import EncodeMetrics
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer, load_tokenizer
from surge_dagster.engine.errors import EncoderError
from surge_dagster.engine.files.rows import invalid_row
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support.waiting import wait_for_thread
from surge_dagster.service.errors import Refusal, too_long, unusable_text

log = logging.getLogger(__name__)

MARGIN = 1.5
# A request may come when a full pass has just begun: it waits for that one and for its own.
_LEAST_PASSES = 2
_DEFAULT_PASSES = 3
_LEAST_DEFAULT_SECONDS = 0.1
_NEWEST_PASSES = 5  # whose median lowers a promise that was raised
_NEWEST_SHARE = 0.2  # of the last pass in the measured rate
_BYTES_PER_TOKEN = 4
_LARGEST_TEXT_BYTES = 16 << 20
# Of a lane without a promise, that may wait when another request comes.
_MOST_WAITING_PASSES = 64
_ROOM_AGAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Promise:
    """What a query lane promises.

    Attributes:
        tokens_per_second: of full passes during bulk work, as expected at the start.
        pass_tokens: of a full pass.
        wanted_seconds: None: see `promise_of`.
        share: of the device, that bulk work leaves to queries.
        smallest_seconds: the smallest promise that can be kept.
        promised_seconds: from the arrival of a request to its answer.
        largest_tokens: of the largest request that is accepted.
    """

    tokens_per_second: float
    pass_tokens: int
    wanted_seconds: float | None
    share: float
    smallest_seconds: float
    promised_seconds: float
    largest_tokens: int

    @property
    def is_raised(self) -> bool:
        """Whether a faster machine would promise less."""
        return self.promised_seconds > (self.wanted_seconds or _LEAST_DEFAULT_SECONDS)

    def measured(self, rate: float) -> Promise:
        """Return the promise at the rate of newer full passes: a faster one lowers a promise that
        is raised, as when the machine was busy at the start."""
        if self.is_raised and rate > self.tokens_per_second:
            return promise_of(rate, self.pass_tokens, self.wanted_seconds, self.share)
        return self


def promise_of(
    tokens_per_second: float,
    pass_tokens: int,
    wanted_seconds: float | None = None,
    share: float = 1.0,
) -> Promise:
    """Return the wanted promise, or the smallest that can be kept; by default `MARGIN` times the
    time of three full passes, and at least 100 ms."""
    smallest = MARGIN * _LEAST_PASSES * pass_tokens / tokens_per_second
    wanted = wanted_seconds
    if wanted is None:
        wanted = max(_LEAST_DEFAULT_SECONDS, smallest * _DEFAULT_PASSES / _LEAST_PASSES)
    promised = max(wanted, smallest)
    largest = math.floor(promised / MARGIN * tokens_per_second + 1e-6)
    return Promise(
        tokens_per_second, pass_tokens, wanted_seconds, share, smallest, promised, largest
    )


@dataclass(frozen=True, slots=True)
class TokenizedTexts:
    """Texts as they wait for a pass.

    Attributes:
        contents: the ids (int32) of each text, or the text in UTF-8.
        tokens: of each, prompt and special tokens included, at least 1.
        truncated: whether the model does not read all of it; without a tokenizer only the workers
            know.
    """

    contents: list[bytes]
    tokens: np.ndarray
    truncated: np.ndarray


class TextTokens:
    """Tokenizes texts for the workers of a space.

    Args:
        facts: of a pool of the same model.

    Attributes:
        makes_ids: whether texts become token ids.
    """

    def __init__(self, space: Space, facts: PoolFacts) -> None:
        self._space = space
        self._prompt_bytes = len(space.prompt.encode())
        self._tokenizer: TextTokenizer | None = None
        if facts.tokenizer and facts.truncation_side:
            tokenizer = load_tokenizer(space, facts.truncation_side)
            if tokenizer and tokenizer.digest == facts.tokenizer.split()[0]:
                self._tokenizer = tokenizer
        self.makes_ids = self._tokenizer is not None

    def __call__(self, texts: list[str]) -> TokenizedTexts:
        if self._tokenizer is None:
            contents = [text.encode() for text in texts]
            lengths = np.array([self._prompt_bytes + len(content) for content in contents])
            tokens = 1 + lengths // _BYTES_PER_TOKEN
            truncated = self._space.is_hash & (tokens > self._space.max_length)
            return TokenizedTexts(contents, tokens, truncated)

        found = self._tokenizer.encode(texts)
        ids = found.ids.tobytes()
        borders = (found.ids.itemsize * found.offsets).tolist()
        contents = [ids[start:stop] for start, stop in pairwise(borders)]
        return TokenizedTexts(contents, np.maximum(found.lengths, 1), found.truncated)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The texts of a request as vectors.

    Attributes:
        vectors: float32 [texts, dimension of the lane's space].
        tokens: of all texts, as the model read them.
        truncated: whether a text was longer than the model reads, bool [texts].
    """

    vectors: np.ndarray
    tokens: int
    truncated: np.ndarray


@dataclass(slots=True, eq=False)
class _Request:
    """A request that is not answered; `missing` counts its texts without a vector."""

    encoded: Encoded
    truncate: bool
    future: Future[Encoded]
    missing: int

    def end(self, error: Refusal | None = None) -> None:
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return  # it was cancelled, or another of its texts has failed
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(self.encoded)


@dataclass(frozen=True, slots=True)
class _QueuedText:
    """A text that waits for a pass, or is in one."""

    request: _Request
    row: int
    content: bytes
    tokens: int


class Lane:
    """Encodes requests through one pool, in the order in which they come.

    Args:
        facts: of a pool of the same model.
        pass_tokens: of a pass at most, except for a single text with more.
        promise: None: requests wait as long as it takes, but are refused while 64 full passes
            wait.
        recorded: the space as the output has it, whose tokenizer the workers must have.

    Attributes:
        pool: closed with the lane; started by the first request, if nothing else has started it.
        waiting_tokens: of texts that no pass has taken.
        texts, tokens, passes: what was encoded so far.
    """

    def __init__(
        self,
        pool: EncoderPool,
        facts: PoolFacts,
        pass_tokens: int,
        promise: Promise | None = None,
        *,
        recorded: Space,
    ) -> None:
        self.pool = pool
        self.space = pool.space
        self.promise = promise
        self.waiting_tokens = 0
        self.texts = 0
        self.tokens = 0
        self.passes = 0
        self._tokenize = TextTokens(pool.space, facts)
        self._pass_tokens = pass_tokens
        self._recorded = recorded
        self._tokens_per_second = promise.tokens_per_second if promise else 1.0
        # A single pass that was lucky does not lower the promise.
        self._full_rates = deque([self._tokens_per_second] * _NEWEST_PASSES, _NEWEST_PASSES)
        self._changed = threading.Condition()
        self._queue = deque[_QueuedText]()
        self._pass: list[_QueuedText] = []  # under way
        self._tokens_under_way = 0
        self._arena: Arena | None = None
        self._is_closing = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="surge-lane", daemon=True)
        self._thread.start()

    @property
    def waiting_texts(self) -> int:
        return len(self._queue)

    @property
    def is_alive(self) -> bool:
        """Whether a worker is ready."""
        return not self._is_stopping and self.pool.ready_workers > 0

    def accept(
        self,
        texts: list[str],
        *,
        arrived_at: float | None = None,
        truncate: bool = False,
        future: Future[Encoded] | None = None,
    ) -> Future[Encoded]:
        """Put the texts of a request into the queue; does not wait for their vectors.

        Args:
            arrived_at: on the monotonic clock, from when on the promise counts; None: now.
            truncate: whether texts longer than the model reads are cut; else they are refused.
            future: is returned, and may be cancelled at any time; None: a new one.

        Raises:
            Refusal: the request cannot be answered, or not in time. The future may end with one,
                too.
        """
        if arrived_at is None:
            arrived_at = time.monotonic()
        # Before tokenizing, which takes long if there are many texts.
        self._require_in_time(1, arrived_at)
        found = self._tokenize(texts)
        if found.truncated.any() and not truncate:
            raise too_long(found.truncated, self.space.max_length)

        read = int(np.minimum(found.tokens, self.space.max_length).sum())
        vectors = np.empty((len(texts), self.space.dimension), np.float32)
        encoded = Encoded(vectors, read, found.truncated)
        request = _Request(encoded, truncate, future or Future(), len(texts))
        tokens = int(found.tokens.sum())
        rows = zip(found.contents, found.tokens.tolist(), strict=True)
        with self._changed:
            self._require_in_time(tokens, arrived_at)
            for row, (content, tokens_of_text) in enumerate(rows):
                self._queue.append(_QueuedText(request, row, content, tokens_of_text))
            self.waiting_tokens += tokens
            self._changed.notify_all()
        return request.future

    def measure_if_idle(self) -> None:
        """Encode a full pass if the promise is raised and no query waits, so that it can fall once
        the machine is faster."""
        if self.promise is None or not self.promise.is_raised or self._queue or self._pass:
            return
        text = "how long does a full pass take"
        count = self._pass_tokens // int(self._tokenize([text]).tokens[0])
        with suppress(Refusal):  # the lane is being closed
            self.accept([text] * max(1, count))

    def _require_in_time(self, tokens: int, arrived_at: float) -> None:
        """Refuse a request of so many tokens if it is expected to take longer than promised."""
        if self._is_closing:
            raise self._closed()
        if self.promise is None:
            self._require_room()
            return
        if tokens > self.promise.largest_tokens:
            message = (
                f"The request has {tokens:,} tokens. At most {self.promise.largest_tokens:,} can "
                f"be answered within {1000 * self.promise.promised_seconds:.0f} ms. Split it, or "
                "send its texts as documents."
            )
            raise Refusal(400, "request_too_large", message, "input")
        promised = self.promise.promised_seconds
        waited = time.monotonic() - arrived_at
        late = waited + MARGIN * self.expected_seconds(tokens) - promised
        # An idle lane tries if it can: else one that was slow would never be measured again.
        if late > 0 and (self._queue or self._pass or waited > promised):
            before = self.waiting_tokens + self._tokens_under_way
            message = (
                f"{before:,} tokens are unanswered, so the request is expected to take "
                f"{1000 * late:.0f} ms longer than promised. Send it again later."
            )
            raise Refusal(429, "rate_limit_exceeded", message, retry_after_seconds=late)

    def _require_room(self) -> None:
        """Refuse a request while too much waits; any size is accepted otherwise."""
        most = _MOST_WAITING_PASSES * self._pass_tokens
        if self.waiting_tokens > most:
            message = (
                f"{self.waiting_tokens:,} tokens of documents wait, which is more than {most:,}. "
                "Send the request again later, or make a batch."
            )
            raise Refusal(
                429, "rate_limit_exceeded", message, retry_after_seconds=_ROOM_AGAIN_SECONDS
            )

    def expected_seconds(self, tokens: int = 0) -> float:
        """Return the seconds until all unanswered texts, and so many tokens more, are answered."""
        unanswered = self.waiting_tokens + self._tokens_under_way
        return (unanswered + tokens) / self._tokens_per_second

    def start(self) -> None:
        """Start the pool, unless it has given up; requests do it otherwise."""
        if self.pool.has_failed:
            raise EncoderError("the pool has given up; the service starts another one")
        self._recorded.require_tokenizer(self.pool.start().tokenizer)
        if self._arena is None:
            # A single text without ids may have more bytes than a pass of tokens.
            max_bytes = _LARGEST_TEXT_BYTES + _BYTES_PER_TOKEN * self._pass_tokens
            self._arena = self.pool.arena(slots=1, max_texts=self._pass_tokens, max_bytes=max_bytes)

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, wait so long for the answers of the others, and end the pool."""
        with self._changed:
            self._is_closing = True
            self._changed.wait_for(lambda: not self._queue and not self._pass, drain_seconds)
            self._is_stopping = True
            self._changed.notify_all()
        self.pool.close()  # which ends a pass that is under way
        wait_for_thread(self._thread)
        self._answer_all(self._closed())
        if self._arena is not None:
            self._arena.close()

    def _closed(self) -> Refusal:
        message = f"The service no longer encodes for the space {self.space.name}. Send it again."
        return Refusal(503, "shutting_down", message)

    # Below runs in the lane's own thread.

    def _run(self) -> None:
        while self._next_pass():
            try:
                self.start()
                self._encode()
            except Exception as error:
                self._fail(error)

    def _next_pass(self) -> bool:
        """Take the texts of a pass as soon as there are some; returns False at the end."""
        with self._changed:
            self._pass = []
            self._tokens_under_way = 0
            while not self._pass and not self._is_stopping:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._is_stopping)
                self._take_texts()
            return not self._is_stopping

    def _take_texts(self) -> None:
        room = self._pass_tokens
        while self._queue:
            entry = self._queue[0]
            if not entry.request.future.done():
                if self._pass and entry.tokens > room:
                    return
                self._pass.append(entry)
                self._tokens_under_way += entry.tokens
                room -= entry.tokens
            self._queue.popleft()
            self.waiting_tokens -= entry.tokens

    def _fail(self, error: Exception) -> None:
        """Refuse all requests that came so far."""
        name = self.space.name
        message = (
            f"No worker encodes for the space {name}; the service's log says why. Send it again "
            "later."
        )
        refusal = Refusal(503, "encoder_down", message)
        if self._is_closing:
            refusal = self._closed()
        else:
            is_expected = isinstance(error, EncoderError)
            log.error("the workers of %s failed: %s", name, str(error), exc_info=not is_expected)
        self._answer_all(refusal)

    def _encode(self) -> None:
        assert self._arena is not None
        slot = self._arena.acquire(lambda: self._is_stopping)
        try:
            contents = [entry.content for entry in self._pass]
            slot.append(pa.array(contents, pa.large_binary()))
            begun = time.perf_counter()
            metrics = self.pool.submit(slot, holds_ids=self._tokenize.makes_ids).result()
            assert metrics is not None
            self._count(metrics, time.perf_counter() - begun)
            self._hand_out(slot, metrics)
        finally:
            slot.release()

    def _count(self, metrics: EncodeMetrics, seconds: float) -> None:
        self.passes += 1
        self.texts += metrics.costs.texts_computed
        self.tokens += metrics.costs.tokens
        if self.promise is None:
            return
        is_full = metrics.costs.tokens >= self.promise.pass_tokens / 2
        if is_full:
            self._full_rates.append(self.promise.share * metrics.costs.tokens / max(seconds, 1e-9))
            self.promise = self.promise.measured(median(self._full_rates))
        # The rate stays below the promise's, since bulk work may begin at any time.
        tokens = max(self._tokens_under_way, self.promise.pass_tokens)
        rate = min(tokens / max(seconds, 1e-9), self.promise.tokens_per_second)
        # A small pass that takes as long as a full one shows that the device is slow; a quick one
        # says nothing of full passes.
        if is_full or rate < self._tokens_per_second:
            self._tokens_per_second += _NEWEST_SHARE * (rate - self._tokens_per_second)

    def _hand_out(self, slot: Slot, metrics: EncodeMetrics) -> None:
        """Copy vectors to their requests, and answer those that have all of theirs."""
        failed = {each.row: each.finding for each in metrics.failed}
        vectors = slot.matrix(0, len(slot))
        truncated = slot.truncation(0, len(slot))
        for row, entry in enumerate(self._pass):
            request = entry.request
            if row in failed:
                log.warning("a text cannot be encoded: %s", failed[row])
                request.end(unusable_text(entry.row, "it ended every worker that tried it"))
                continue
            request.encoded.vectors[entry.row] = vectors[row]
            request.encoded.truncated[entry.row] |= truncated[row]
            request.missing -= 1
            if not request.missing:
                request.end(self._refusal_of(request))

    def _refusal_of(self, request: _Request) -> Refusal | None:
        """Return what is wrong with the vectors of a request.

        A blank text without tokens is refused: a query of zeros finds nothing.
        """
        encoded = request.encoded
        if encoded.truncated.any() and not request.truncate:
            return too_long(encoded.truncated, self.space.max_length)
        invalid = invalid_row(encoded.vectors, normalized=self.space.normalize)
        return unusable_text(*invalid) if invalid else None

    def _answer_all(self, error: Refusal) -> None:
        with self._changed:
            entries = [*self._pass, *self._queue]
            self._pass = []
            self._tokens_under_way = 0
            self._queue.clear()
            self.waiting_tokens = 0
        for entry in entries:
            entry.request.end(error)
