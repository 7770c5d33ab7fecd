"""The encode stage: SuperBatches are read one ahead in a thread of their own, and the pool always
has the next one.

While one SuperBatch is being encoded the next one waits in the pool, so that no worker idles where
one ends and the next begins.

Only rows without a vector are encoded, and of equal texts only the first. A second call encodes
rows whose equal text is in a partition that failed.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from dataclasses import replace
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.encoder.arena import ArenaClosed, Slot
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.quarantine import FailedRow
from surge_dagster.engine.encoder.schedule import EncodeCall, EncodeMetrics
from surge_dagster.engine.errors import Cancelled, ConfigError, EncoderError, MaxCostReached
from surge_dagster.engine.run.cost_limit import CostLimit
from surge_dagster.engine.run.events import EventStream
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.superbatch import EncodedSuperBatch, Segment, SuperBatch
from surge_dagster.engine.support.ledger import Ledger
from surge_dagster.engine.support.text_hash import hash_keys
from surge_dagster.engine.support.timeline import Span
from surge_dagster.engine.support.waiting import in_background

_ROWS_AT_A_TIME = 512
_NO_ROWS = np.empty(0, np.intp)
_CONCURRENT_CALLS = 2
_POLL_SECONDS = 0.05
_ENCODE_SHARE = 0.5  # of the grace time, for SuperBatches that are being encoded; most take less
_PACE_NEEDS = 3  # SuperBatches
_PACE_REMEMBERS = 64
_ALIKE = 4.0  # times the expected seconds of another one, or a quarter of them


class SuperBatchCall:
    """Submits the rows of a SuperBatch that have no vector, and completes the others from them.

    Args:
        batch: its slot belongs to this until the call has ended.
        limit: of what all rows of the run may cost; near it the rows are submitted in parts.

    Attributes:
        metrics: the costs so far, and the texts that cannot be encoded.
    """

    def __init__(
        self,
        pool: EncoderPool,
        batch: SuperBatch,
        memory: RunMemory,
        limit: CostLimit | None = None,
    ) -> None:
        self.batch = batch
        self._limit = limit
        self.metrics = EncodeMetrics()
        self._pool = pool
        self._slot = batch.slot
        self._borders = np.array([segment.start for segment in batch.segments])
        self._has_vector = self._slot.is_known(0, len(self._slot)).copy()
        missing = np.flatnonzero(~self._has_vector)
        assert batch.hashes is not None
        self._repeats, self._originals = _repeats(batch.hashes, missing, memory.ledger)
        self._call: EncodeCall | None = None
        self._submit(np.setdiff1d(missing, self._repeats, assume_unique=True))

    @property
    def deduplicated(self) -> int:
        """How many rows get the vector of an equal text."""
        return len(self._repeats)

    @property
    def finished_texts(self) -> int:
        """How many texts of the pool's call have their vectors by now."""
        return 0 if self._call is None else self._call.finished_rows

    def result(self, timeout_seconds: float | None = None) -> EncodeMetrics | None:
        """Wait until all rows have their vectors or have failed; return None after the timeout. Can
        be called again.

        Raises:
            EncoderError: the pool failed.
            MaxCostReached: the next row may cost more than is left.
        """
        while self._call is not None:
            if self._call.result(timeout_seconds) is None:
                return None
            self._take_vectors(self._call)
            if len(self._unsent):
                self._submit(self._unsent)
            else:
                self._submit(self._waiting_rows())
        return self.metrics

    def abandon(self) -> None:
        """End the call without encoding further rows; those that are encoded keep their vectors."""
        if self._call is not None:
            self._call.abandon()
            self._take_vectors(self._call)
            self._call = None

    def is_encoded(self, segment: Segment) -> bool:
        """Whether all rows of a segment have their vectors; final once the call has ended."""
        return bool(self._has_vector[segment.start : segment.stop].all())

    def encoded_rows(self, segment: Segment) -> int:
        """Return how many rows from a segment's first one on have their vectors; not all of them
        have."""
        return int(np.argmin(self._has_vector[segment.start : segment.stop]))

    def _submit(self, rows: np.ndarray) -> None:
        """Let the pool encode these rows of the slot, if there are any, or as many as may be."""
        self._call = None
        count = len(rows)
        if self._limit is not None and count:
            count = self._limit.reserve(self._sizes(rows))
            if not count:
                raise MaxCostReached(self._limit.message(self._key_of(rows[0])))
        self._unsent = rows[count:]
        rows = rows[:count]
        self._call_rows = rows
        if len(rows):
            has_all = len(rows) == len(self._slot)
            self._call = self._pool.submit(self._slot, self._borders, None if has_all else rows)

    def _sizes(self, rows: np.ndarray) -> np.ndarray:
        return text_sizes(self._slot)[rows]

    def _key_of(self, row: int) -> str:
        place = int(np.searchsorted(self._borders, row, side="right")) - 1
        return self.batch.segments[place].partition.key

    def _take_vectors(self, call: EncodeCall) -> None:
        """Count what a call has encoded, and give equal rows the same vectors."""
        for first, stop in call.encoded:
            self._has_vector[self._call_rows[first:stop]] = True
        self._copy_vectors()
        metrics = call.metrics
        if self._limit is not None:
            self._limit.settle(self._sizes(self._call_rows), metrics.costs.tokens)
        failed = (*metrics.failed, *self._failed_repeats(metrics.failed))
        self.metrics = self.metrics.plus(replace(metrics, failed=failed))

    def _copy_vectors(self) -> None:
        """Copy vectors to rows without one that have an equal text."""
        can_copy = self._has_vector[self._originals] & ~self._has_vector[self._repeats]
        originals = self._originals[can_copy]
        repeats = self._repeats[can_copy]
        for start in range(0, len(repeats), _ROWS_AT_A_TIME):
            part = slice(start, start + _ROWS_AT_A_TIME)
            self._slot.copy_vectors(originals[part], repeats[part])
        self._has_vector[repeats] = True

    def _failed_repeats(self, failed: Iterable[FailedRow]) -> list[FailedRow]:
        """Return the rows whose text equals one that cannot be encoded."""
        found: list[FailedRow] = []
        for original in failed:
            for row in self._repeats[self._originals == original.row].tolist():
                found.append(replace(original, row=row))
        return found

    def _waiting_rows(self) -> np.ndarray:
        """Return rows without a vector of partitions without a failed row: their equal text is in a
        partition that failed."""
        is_waiting = ~self._has_vector
        failed = [each.row for each in self.metrics.failed]
        for place in np.searchsorted(self._borders, failed, side="right") - 1:
            segment = self.batch.segments[place]
            is_waiting[segment.start : segment.stop] = False
        return np.flatnonzero(is_waiting)


def text_sizes(slot: Slot) -> np.ndarray:
    """Return the bytes of each text of a slot, int64."""
    return np.diff(slot.offsets[: len(slot) + 1])


def _repeats(
    hashes: pa.FixedSizeBinaryArray, rows: np.ndarray, ledger: Ledger
) -> tuple[np.ndarray, np.ndarray]:
    """Return which of these rows have the text of an earlier one, and for each the first row with
    it; none if the comparison has no memory."""
    size = 64 * len(rows)
    if len(rows) < 2 or not ledger.try_reserve(size):
        return _NO_ROWS, _NO_ROWS
    try:
        keys = hash_keys(hashes)[rows]
        ordered = np.sort(keys)  # takes a tenth of the time of finding equal hashes
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        rows = rows[np.isin(keys, twice)]
        codes = pc.dictionary_encode(hashes.take(pa.array(rows))).indices.to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
        first = np.unique(codes, return_index=True)[1]
        originals = rows[first[codes]]
        is_repeat = originals != rows
        return rows[is_repeat], originals[is_repeat]
    finally:
        ledger.release(size)


class Pace:
    """Compares the seconds of each encode call with those of earlier calls of about its size.

    A device that throttles, or that another process uses, shows here long before the run is late.
    What a call should take depends on the number and the length of its texts, so each is first
    divided by what the pool's costs expect.

    Args:
        is_learned: the expectation comes from earlier runs, and counts until three calls alike have
            been seen.
    """

    def __init__(self, is_learned: bool = False) -> None:
        self._is_learned = is_learned
        # expected seconds, taken / expected
        self._seen: deque[tuple[float, float]] = deque(maxlen=_PACE_REMEMBERS)

    def ratio(self, seconds: float, expected_seconds: float) -> float | None:
        """Return how many times longer than usual a call took; None if too little is known."""
        if expected_seconds <= 0:
            return None
        taken = seconds / expected_seconds
        alike = [
            before
            for expected, before in self._seen
            if expected / _ALIKE <= expected_seconds <= expected * _ALIKE
        ]
        self._seen.append((expected_seconds, taken))
        if len(alike) >= _PACE_NEEDS and median(alike) > 0:
            return taken / median(alike)
        return taken if self._is_learned else None


class ReadAhead:
    """Runs the reader in a thread, one SuperBatch ahead; its receipts and failures go to the run's
    events.

    Args:
        items: what the reader yields (`reading.superbatches`).
    """

    def __init__(
        self,
        items: Generator[SuperBatch | Receipt | Failure],
        memory: RunMemory,
        events: EventStream,
    ) -> None:
        self._items = items
        self._memory = memory
        self._events = events
        self._next = in_background(self._read, "surge-read")

    def is_ready(self, *, wait: bool) -> bool:
        """Return whether `take` need not wait.

        Args:
            wait: for a moment, if it would.
        """
        if wait and not self._next.done():
            with self._memory.exposed_io.waiting("encoder"):
                futures_wait([self._next], _POLL_SECONDS)
        return self._next.done()

    def take(self) -> SuperBatch | None:
        """Return the next SuperBatch, None after the last one; raises what ended the reader."""
        batch = self._next.result()
        if batch is not None:
            self._next = in_background(self._read, "surge-read")
        return batch

    def close(self) -> None:
        """End the reader, and wait for it until the grace time is over."""
        stop = self._memory.stop
        stop.stopping.set()
        self._next.add_done_callback(self._drop)
        while not self._next.done() and stop.seconds_left() != 0:
            futures_wait([self._next], _POLL_SECONDS)

    def _read(self) -> SuperBatch | None:
        begun = self._reading_seconds()
        try:
            for item in self._items:
                if isinstance(item, SuperBatch):
                    return replace(item, read_seconds=self._reading_seconds() - begun)
                self._events.emit(item)
        except (Cancelled, ArenaClosed):
            pass
        return None

    def _reading_seconds(self) -> float:
        """Return the time without the reader's waits for memory and slots."""
        return time.perf_counter() - self._memory.exposed_io.reader_seconds

    def _drop(self, ended: Future[SuperBatch | None]) -> None:
        """Give back what the reader holds once it has ended."""
        self._items.close()
        if ended.exception() is None and (batch := ended.result()) is not None:
            self._memory.release(batch, batch.texts)


def encoded_superbatches(
    batches: ReadAhead,
    pool: EncoderPool,
    memory: RunMemory,
    begun: float,
    limit: CostLimit | None = None,
) -> Iterator[EncodedSuperBatch]:
    """Encode SuperBatches in their order, two of them in the pool at a time.

    A run that ends early loses nothing that is encoded: partitions that are whole by then, or
    within half of the grace time, still come, before the error that ended it.

    Raises:
        EncoderError: the pool failed for good.
        MaxCostReached: the next SuperBatch may cost more than `limit` allows.
        BaseException: what ended the reader.
    """
    calls: deque[SuperBatchCall] = deque()
    measures = _Measures(begun, pool)
    has_more = True
    waiting: SuperBatch | None = None
    encoded = 0
    error: Exception | None = None
    try:
        while (has_more or waiting or calls) and not memory.stop.stopping.is_set():
            wants_more = has_more and waiting is None and len(calls) < _CONCURRENT_CALLS
            if wants_more and batches.is_ready(wait=not calls):
                waiting = batches.take()
                has_more = waiting is not None
            if waiting is not None and (not calls or _fits(limit, waiting)):
                calls.append(SuperBatchCall(pool, waiting, memory, limit))
                waiting = None
            if calls and calls[0].result(_POLL_SECONDS) is not None:
                encoded += calls[0].batch.texts
                yield measures.of(calls.popleft())
            memory.in_flight.encoded = encoded + sum(call.finished_texts for call in calls)
    except Exception as caught:
        error = caught
    if waiting is not None:
        memory.release(waiting, waiting.texts)
    yield from _encoded_so_far(calls, memory)
    if error is not None:
        raise error


def _fits(limit: CostLimit | None, batch: SuperBatch) -> bool:
    """Whether all texts of a SuperBatch may be sent while others are under way."""
    if limit is None:
        return True
    is_missing = ~batch.slot.is_known(0, len(batch.slot))
    return limit.fits(text_sizes(batch.slot)[is_missing])


def _encoded_so_far(calls: deque[SuperBatchCall], memory: RunMemory) -> Iterator[EncodedSuperBatch]:
    """Yield what is encoded of unfinished calls by now or soon; nothing if the store is down."""
    stop = memory.stop
    patience = stop.seconds_left(_ENCODE_SHARE)
    if patience is None:
        patience = stop.grace_seconds * _ENCODE_SHARE
    if stop.over.is_set():
        patience = 0.0
    deadline = time.monotonic() + patience
    for call in calls:
        # The call that failed first has raised its error; what the pool encoded before is valid.
        with contextlib.suppress(ConfigError, EncoderError, MaxCostReached):
            call.result(max(0.0, deadline - time.monotonic()))
        call.abandon()
        encoded: list[Segment] = []
        if call.batch.texts and not stop.over.is_set():
            encoded = _encoded_segments(call)
        if encoded:
            batch = replace(call.batch, segments=tuple(encoded))
            yield EncodedSuperBatch(batch, call.metrics, deduplicated=call.deduplicated)
        else:
            memory.release(call.batch, call.batch.texts)


def _encoded_segments(call: SuperBatchCall) -> list[Segment]:
    """Return the segments of an ended call that are encoded.

    Of the others, the one with the most encoded rows at its begin is cut to these rows, which are
    staged: a partition may have cost more than a run may cost.
    """
    whole: list[Segment] = []
    begun: list[Segment] = []
    for segment in call.batch.segments:
        if call.is_encoded(segment):
            whole.append(segment)
        else:
            begun.append(segment)
    longest = max(begun, key=call.encoded_rows, default=None)
    if longest is None or not call.encoded_rows(longest):
        return whole
    return [*whole, _first_rows(longest, call.encoded_rows(longest))]


def _first_rows(segment: Segment, rows: int) -> Segment:
    """Return the first rows of a segment, which do not end its partition."""
    ids: list[pa.Array] = []
    carried: list[pa.RecordBatch] = []
    remaining = rows
    for place, piece in enumerate(segment.ids):
        ids.append(piece.slice(0, remaining))
        if segment.carried:
            carried.append(segment.carried[place].slice(0, remaining))
        remaining -= len(ids[-1])
    stop = segment.start + rows
    return replace(segment, stop=stop, ids=tuple(ids), carried=tuple(carried), read=None)


class _Measures:
    """Measures each encode call, and compares it with those before it."""

    def __init__(self, begun: float, pool: EncoderPool) -> None:
        self._begun = self._last = begun
        self._last_processor = time.process_time()
        self._speed = pool.speed
        self._core_share = pool.core_share
        self._pace = Pace(self._speed.is_learned)

    def of(self, call: SuperBatchCall) -> EncodedSuperBatch:
        """Return a SuperBatch whose call ended now."""
        seconds = call.metrics.costs.encode_seconds
        now = time.perf_counter()
        since_last = now - self._last
        self._last = now
        ended = now - self._begun
        span = Span(max(0.0, ended - seconds), ended)
        duty = min(1.0, seconds / max(since_last, 1e-9))

        processor = time.process_time()
        host_seconds = duty * (processor - self._last_processor)
        self._last_processor = processor
        costs = replace(call.metrics.costs, host_seconds=host_seconds)
        metrics = replace(call.metrics, costs=costs)
        pace = self._pace.ratio(
            costs.undisturbed_seconds(self._core_share), self._expected_seconds(call)
        )
        return EncodedSuperBatch(call.batch, metrics, duty, pace, span, call.deduplicated)

    def _expected_seconds(self, call: SuperBatchCall) -> float:
        """Return what a call of this size usually takes; 0 if it computed nothing."""
        costs = call.metrics.costs
        return float(self._speed.seconds(costs.texts_computed, costs.tokens))
