"""The encode stage: SuperBatches are read one ahead in a thread of their own, and the pool always
has the next one.

While one SuperBatch is being encoded the next one waits in the pool, so that no worker idles where
one ends and the next begins.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from dataclasses import replace

from surge_dagster.engine.encoder.arena import ArenaClosed
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.speed import Speed
from surge_dagster.engine.errors import Cancelled, EncoderError
from surge_dagster.engine.run.events import EventStream
from surge_dagster.engine.run.meters import Pace
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.superbatch import EncodedSuperBatch, Segment, SuperBatch
from surge_dagster.engine.run.superbatch_call import SuperBatchCall
from surge_dagster.engine.support.timeline import Span
from surge_dagster.engine.support.waiting import in_background

_CONCURRENT_CALLS = 2
_POLL_SECONDS = 0.05
_ENCODE_SHARE = 0.5  # of the grace time, for SuperBatches that are being encoded; most take less


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
    batches: ReadAhead, pool: EncoderPool, memory: RunMemory, begun: float
) -> Iterator[EncodedSuperBatch]:
    """Encode SuperBatches in their order, two of them in the pool at a time.

    A run that ends early loses nothing that is encoded: partitions that are whole by then, or
    within half of the grace time, still come, before the error that ended it.

    Raises:
        EncoderError: the pool failed for good.
        BaseException: what ended the reader.
    """
    calls: deque[SuperBatchCall] = deque()
    measures = _Measures(begun, pool.speed)
    has_more = True
    encoded = 0
    error: Exception | None = None
    try:
        while (has_more or calls) and not memory.stop.stopping.is_set():
            wants_more = has_more and len(calls) < _CONCURRENT_CALLS
            if wants_more and batches.is_ready(wait=not calls):
                batch = batches.take()
                has_more = batch is not None
                if batch is not None:
                    calls.append(SuperBatchCall(pool, batch, memory))
            if calls and calls[0].result(_POLL_SECONDS) is not None:
                encoded += calls[0].batch.texts
                yield measures.of(calls.popleft())
            memory.in_flight.encoded = encoded + sum(call.finished_texts for call in calls)
    except Exception as caught:
        error = caught
    yield from _encoded_so_far(calls, memory)
    if error is not None:
        raise error


def _encoded_so_far(calls: deque[SuperBatchCall], memory: RunMemory) -> Iterator[EncodedSuperBatch]:
    """Yield the segments of unfinished calls that are encoded by now or soon; none if the store is
    down."""
    stop = memory.stop
    patience = stop.seconds_left(_ENCODE_SHARE)
    if patience is None:
        patience = stop.grace_seconds * _ENCODE_SHARE
    if stop.over.is_set():
        patience = 0.0
    deadline = time.monotonic() + patience
    for call in calls:
        # The call that failed first has raised its error; what the pool encoded before is valid.
        with contextlib.suppress(EncoderError):
            call.result(max(0.0, deadline - time.monotonic()))
        call.abandon()
        whole: list[Segment] = []
        if call.batch.texts and not stop.over.is_set():
            whole = [segment for segment in call.batch.segments if call.is_encoded(segment)]
        if whole:
            batch = replace(call.batch, segments=tuple(whole))
            yield EncodedSuperBatch(batch, call.metrics, deduplicated=call.deduplicated)
        else:
            memory.release(call.batch, call.batch.texts)


class _Measures:
    """Measures each encode call, and compares it with those before it."""

    def __init__(self, begun: float, speed: Speed) -> None:
        self._begun = self._last = begun
        self._speed = speed
        self._pace = Pace(speed.is_learned)

    def of(self, call: SuperBatchCall) -> EncodedSuperBatch:
        """Return a SuperBatch whose call ended now."""
        metrics = call.metrics
        costs = metrics.costs
        seconds = costs.encode_seconds
        now = time.perf_counter()
        since_last = now - self._last
        self._last = now
        pace = self._pace.ratio(seconds, self._expected_seconds(call))
        ended = now - self._begun
        span = Span(max(0.0, ended - seconds), ended)
        duty = min(1.0, seconds / max(since_last, 1e-9))
        return EncodedSuperBatch(call.batch, metrics, duty, pace, span, call.deduplicated)

    def _expected_seconds(self, call: SuperBatchCall) -> float:
        """Return what a call of this size usually takes; 0 if it computed nothing."""
        costs = call.metrics.costs
        return float(self._speed.seconds(costs.texts_computed, costs.tokens))
