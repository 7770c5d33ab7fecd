"""The loop that joins the stages: read and gather, encode, publish, each in its own thread, each a step ahead.

While SuperBatch j+1 is being encoded, j is being serialized and published and j+2 is being read. As soon as j+2 is
complete it waits in the pool, so that no worker is idle where one SuperBatch ends and the next begins. What moves from
stage to stage is a slot of shared memory; a run owns three, so a slow store holds up the encoder, which holds up the
reader, and nothing piles up in between. A partition that cannot be used is dropped where that is found and reported
once; the others go on.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import replace

import numpy as np

from surge_dagster.engine.encoder.arena import Arena, ArenaClosed, Slot
from surge_dagster.engine.encoder.calls import EncodeCall, EncodeMetrics
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import Cancelled, EncoderError
from surge_dagster.engine.memory import fit_memory, largest_pieces
from surge_dagster.engine.model.spec import FileFormat
from surge_dagster.engine.output.current_space import keep_current
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.orphan_files import sweep_left_overs
from surge_dagster.engine.output.publisher import EncodedSuperBatch, PublishedSuperBatch, Publisher
from surge_dagster.engine.output.space_target import SpaceTarget
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.output.staging import Staging
from surge_dagster.engine.reading import Admission
from surge_dagster.engine.report import (
    Failure,
    InFlight,
    Pace,
    Receipt,
    RunReport,
    SuperBatchReport,
    is_slow,
)
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.superbatch import Aggregator, SuperBatch
from surge_dagster.engine.support.ledger import Ledger
from surge_dagster.engine.support.process_memory import MemoryGauge, memory_bytes
from surge_dagster.engine.support.timeline import Span
from surge_dagster.engine.support.waiting import next_item
from surge_dagster.engine.thresholds import Thresholds

log = logging.getLogger(__name__)

Event = SuperBatchReport | Receipt | Failure

_TOLD_AT_ONCE = 256
_TELLINGS_WAITING = 64
_CALLS_AT_ONCE = 2
_POLL_SECONDS = 0.05
# Of the grace time, for the SuperBatches that are being encoded; most of one takes no longer.
_ENCODE_SHARE = 0.5


class EmbeddingRun:
    """Embeds every partition that is not fresh and publishes one file for each.

    Args:
        partitions: in the order they are to be read; a `Source` is one such iterable.
        store: the output; files go to the folder of the pool's space.
        pool: a started pool; it is used, not owned.
        thresholds: of the SuperBatches; what is left open follows from the pool's measured speed and from the memory
            that there is.
        force: encode what is fresh too.
        again: keys of partitions to encode though their files look fresh.
        include_text: write the text column.
        file_format: of the files; the one of the space, where the output has it.
        memory_limit: bytes of data that may be resident at any time; None is what three SuperBatches need, at most
            half of the memory that the process may use.
        grace_seconds: how long a run that is stopped may take to publish what is encoded.
        publish_threads: pieces serialized and published at a time; None is four per worker, at least eight.

    Attributes:
        report: the figures, live.
        published: keys of the partitions that were published, those too that nobody has taken the receipt of.

    Raises:
        ConfigError: the thresholds or the limit cannot work, or the output cannot be used.
    """

    def __init__(
        self,
        partitions: Iterable[Partition],
        store: Store,
        pool: EncoderPool,
        thresholds: Thresholds | None = None,
        *,
        force: bool = False,
        again: Collection[str] = (),
        include_text: bool = True,
        file_format: FileFormat = "parquet",
        memory_limit: int | None = None,
        grace_seconds: float = 20.0,
        publish_threads: int | None = None,
    ) -> None:
        self._threads = publish_threads or max(8, 4 * len(pool.worker_pids))
        self.bounds, self._memory = fit_memory(
            thresholds or Thresholds(),
            pool.texts_per_second,
            pool.space,
            self._threads,
            memory_limit,
            machine_bytes=memory_bytes(),
            upload_bytes=store.upload_bytes,
        )
        self._retries_before = dict(store.retries)
        keep_current(store, pool.space)
        self.space = claim_space(store, pool.space, file_format)
        sweep_left_overs(store, claimed=self.space.name)
        self.report = RunReport(
            space=self.space.name,
            dimension=self.space.dimension,
            device=pool.device,
            precision=pool.precision,
            encoder_notes=list(pool.notes),
            pool_start_seconds=pool.start_seconds,
            b_min=self.bounds.b_min,
            b_max=self.bounds.b_max,
            workers=len(pool.worker_pids),
        )
        self.published: set[str] = set()
        self._partitions = partitions
        # Set when nothing is waited for any more: the store is down, or the grace time over, at the latest.
        self._over = threading.Event()
        self._store = store.until(self._over)
        self._pool = pool
        self._force = force
        self._again = again
        self._include_text = include_text
        self._ledger = Ledger(self._memory.limit)
        self._stop = threading.Event()
        self._unheard = threading.Event()  # set when nobody takes events any more
        self._started = False
        self._begun = 0.0
        self._lock = threading.Lock()
        self._in_flight = InFlight()
        self._result_bytes: dict[int, int] = {}  # reserved for each SuperBatch that was handed over
        self._failed_keys: set[str] = set()
        self._events: queue.Queue[list[Event] | BaseException | None] = queue.Queue(_TELLINGS_WAITING)
        self._grace_seconds = grace_seconds
        self._stopped_at: float | None = None  # when somebody asked the run to end early
        self._encoded_at: float | None = None
        self._pace = Pace()
        self._idle_since: float | None = None  # when the encoder began to wait for a SuperBatch

    @property
    def failed(self) -> bool:
        """Whether a partition was refused or could not be published."""
        return bool(self.report.partitions_failed)

    def __iter__(self) -> Iterator[Receipt]:
        """Run, and yield a receipt for each partition as it is published."""
        with contextlib.closing(self.events()) as events:
            for event in events:
                if isinstance(event, Receipt) and event.action != "fresh":
                    yield event

    def events(self) -> Generator[Event]:
        """Run, and yield what happens in the order it was committed: each SuperBatch, then the partitions it completed.

        Closing the generator stops the run: what is encoded by then, or within half of the grace time, is
        published, the rest is left for the next run. It returns when the grace time is over at the latest.

        Raises:
            EncoderError: the pool failed for good.
            ConfigError: the source cannot be listed.
        """
        if self._started:
            raise RuntimeError("a run runs once; make another one")
        self._started = True
        arena = self._pool.arena(
            slots=self._memory.slots, max_texts=self.bounds.b_max, max_bytes=self.bounds.b_max_bytes
        )
        gauge = MemoryGauge()
        try:
            with gauge, arena:
                yield from self._commit(arena)
        finally:
            self.report.peak_rss_bytes = gauge.peak_bytes
            self._count_retries()

    def stop(self) -> None:
        """Ask the run to end early, from any thread: as if `events()` were closed, except that it yields the rest."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        self._stop.set()

    @property
    def stopped_at(self) -> float | None:
        """When the run was asked to end early and its grace time began, on the monotonic clock; None: it was not."""
        return self._stopped_at

    def _commit(self, arena: Arena) -> Generator[Event]:
        self._begun = time.perf_counter()
        target = SpaceTarget(self._store, self.space, self._pool.precision, self._include_text)
        staging = Staging(target)
        engine = threading.Thread(target=self._run, args=(arena, target, staging), name="surge-run", daemon=True)
        came_to_its_end = False
        try:
            engine.start()
            while (event := next_item(self._events)) is not None:
                if isinstance(event, BaseException):
                    came_to_its_end = True
                    raise event
                yield from event
            came_to_its_end = True
        finally:
            if not came_to_its_end:
                self.stop()
            self._wait_for_its_end(engine)

    def _wait_for_its_end(self, engine: threading.Thread) -> None:
        try:
            while engine.is_alive():  # its threads may be waiting to report to us
                with contextlib.suppress(queue.Empty):
                    self._events.get(timeout=_POLL_SECONDS)
        except BaseException:  # interrupted again: nobody listens any more, or waits for what is under way
            self._unheard.set()
            self._over.set()
            raise

    def _run(self, arena: Arena, target: SpaceTarget, staging: Staging) -> None:
        """Encode what the reader hands over until it has no more; always ends with None in the event queue."""
        publisher = Publisher(
            target,
            staging,
            b_min=self.bounds.b_min,
            begun=self._begun,
            threads=self._threads,
            ledger=self._ledger,
            assembly_bytes=self._memory.reader + self._store.upload_bytes,
            over=self._over,
            done=self._superbatch_done,
            report=self._report_event,
        )
        ready: queue.Queue[SuperBatch | BaseException | None] = queue.Queue(1)
        reader = threading.Thread(
            target=self._read, args=(arena, publisher, staging, ready), name="surge-read", daemon=True
        )
        error: BaseException | None = None
        try:
            reader.start()
            self._encode_all(ready, publisher)
        except BaseException as caught:
            error = caught
        self._stop.set()
        while reader.is_alive() and self._time_left() != 0:  # it may be waiting to hand over what is no longer wanted
            with contextlib.suppress(queue.Empty):
                ready.get(timeout=0.05)
        try:
            publisher.close(self._time_left)
        except BaseException as caught:
            error = error or caught
        self._over.set()
        if error is not None:
            self._tell(error)
        self._tell(None)

    def _encode_all(self, ready: queue.Queue[SuperBatch | BaseException | None], publisher: Publisher) -> None:
        """Keep up to two SuperBatches in the pool, and hand each to the publisher when it is encoded."""
        calls: deque[tuple[SuperBatch, EncodeCall | None]] = deque()
        more = True
        try:
            while (more or calls) and not self._stop.is_set():
                publisher.require_alive()  # else the reader would wait for a slot that never comes back
                if more and len(calls) < _CALLS_AT_ONCE:
                    with contextlib.suppress(queue.Empty):
                        batch = self._next(ready, wait=not calls)
                        if isinstance(batch, BaseException):
                            raise batch
                        more = batch is not None
                        if batch is not None:
                            calls.append((batch, self._submit(batch)))
                if calls:
                    batch, call = calls[0]
                    figures = call.result(_POLL_SECONDS) if call is not None else EncodeMetrics()
                    if figures is not None:
                        calls.popleft()
                        publisher.submit(batch, self._encoded(figures))
        finally:
            self._publish_what_is_encoded(calls, publisher)

    def _next(
        self, ready: queue.Queue[SuperBatch | BaseException | None], *, wait: bool
    ) -> SuperBatch | BaseException | None:
        """What the reader has handed over; raises `queue.Empty` when that is nothing."""
        if not wait:
            return ready.get_nowait()
        self._idle_since = time.perf_counter()
        try:
            return ready.get(timeout=_POLL_SECONDS)
        finally:
            self._idle_since = None

    def _submit(self, batch: SuperBatch) -> EncodeCall | None:
        if not batch.texts:
            return None
        return self._pool.submit(batch.slot, np.array([segment.start for segment in batch.segments]))

    def _encoded(self, figures: EncodeMetrics) -> EncodedSuperBatch:
        now = time.perf_counter()
        since_last, self._encoded_at = now - (self._encoded_at or self._begun), now
        pace = self._pace.ratio(figures.padded_tokens, figures.encode_seconds)
        if is_slow(pace, figures.encode_seconds):
            log.warning(
                "a SuperBatch of %d texts took %.1f s, %.1f times as long per token as those before it; look whether "
                "something else uses the device or slows it down",
                *(figures.texts, figures.encode_seconds, pace),
            )
        ended, seconds = now - self._begun, figures.encode_seconds
        span = Span(max(0.0, ended - seconds), ended, seconds)
        return EncodedSuperBatch(figures, min(1.0, seconds / max(since_last, 1e-9)), pace, span)

    def _publish_what_is_encoded(
        self, calls: Iterable[tuple[SuperBatch, EncodeCall | None]], publisher: Publisher
    ) -> None:
        """The run ends early: what is encoded by now, or shortly after, is not lost, unless the store is down."""
        patience = 0.0 if self._over.is_set() else _ENCODE_SHARE * self._grace_seconds
        deadline = (self._stopped_at or time.monotonic()) + patience
        for batch, call in calls:
            if call is None:
                continue
            # A pool that has failed says so in the call that failed first; what it encoded before is sound.
            with contextlib.suppress(EncoderError):
                if call.result(max(0.0, deadline - time.monotonic())) is None:
                    call.abandon()
            if self._over.is_set():
                continue
            encoded = call.encoded
            whole = tuple(part for part in batch.segments if _covers(encoded, part.start, part.stop))
            if whole:
                publisher.submit(replace(batch, segments=whole), EncodedSuperBatch(call.metrics))

    def _time_left(self) -> float | None:
        """Seconds until a run that was stopped has to end; None: it was not stopped from outside."""
        if self._unheard.is_set():
            return 0.0
        if self._stopped_at is None:
            return None
        return max(0.0, self._stopped_at + self._grace_seconds - time.monotonic())

    def _read(
        self,
        arena: Arena,
        publisher: Publisher,
        staging: Staging,
        ready: queue.Queue[SuperBatch | BaseException | None],
    ) -> None:
        def hand_over(batch: SuperBatch) -> None:
            pieces = largest_pieces(batch, self.space, self._threads)
            self._result_bytes[batch.index] = self._memory.result_bytes(batch.texts, pieces, batch.held_bytes)
            self._reserve(self._result_bytes[batch.index])
            self._put(ready, batch)

        try:
            outputs = OutputState(self._store, self.space.name, self.space.file_format)
            admission = Admission(
                aggregator=Aggregator(
                    self.bounds,
                    lambda: self._acquire(arena),
                    self._reserve,
                ),
                outputs=outputs,
                staging=staging,
                store=self._store,
                space=self.space,
                ledger=self._ledger,
                memory=self._memory,
                in_flight=self._in_flight,
                force=self._force,
                again=self._again,
                stopped=self._stop.is_set,
                hand_over=hand_over,
                report=self._report_event,
                abandon=publisher.abandon,
            )
            for partition in outputs.looked_at(self._partitions):
                if self._stop.is_set():
                    raise Cancelled
                admission.admit(partition)
            admission.finish()
            self._put(ready, None)
        except (Cancelled, ArenaClosed):
            pass
        except BaseException as error:
            with contextlib.suppress(Cancelled):
                self._put(ready, error)

    def _acquire(self, arena: Arena) -> Slot:
        with self._held_up_by_storage():
            return arena.acquire(self._stop.is_set)

    def _reserve(self, size: int) -> None:
        if not self._ledger.try_reserve(size):
            with self._held_up_by_storage():
                self._ledger.reserve(size, self._stop.is_set)

    @contextlib.contextmanager
    def _held_up_by_storage(self) -> Iterator[None]:
        """Counts the time that the encoder has nothing to do because storage still holds every slot, or the memory."""
        begun = time.perf_counter()
        yield
        idle_since = self._idle_since
        if idle_since is not None:
            self.report.exposed_io_seconds += time.perf_counter() - max(begun, idle_since)

    def _superbatch_done(self, batch: SuperBatch, published: PublishedSuperBatch) -> None:
        batch.slot.release(keep_pages=self._memory.keep_pages)
        self._ledger.release(batch.held_bytes + self._result_bytes.pop(batch.index))
        self._in_flight.remove(published.report.texts)
        with self._lock:
            self.report.count_superbatch(published.report)
        self._report_events((published.report, *published.receipts, *published.failures))

    def _report_event(self, event: Event) -> None:
        self._report_events((event,))

    def _report_events(self, events: tuple[Event, ...]) -> None:
        """Count events and tell of them, all at once: to wake who waits for each takes longer than to count it."""
        now = time.perf_counter() - self._begun
        with self._lock:
            told = [event for event in events if self._count(event, now)]
            self.report.max_in_flight_texts = self._in_flight.most
            self.report.peak_resident_bytes = self._ledger.peak
            self._count_retries()
        for start in range(0, len(told), _TOLD_AT_ONCE):
            self._tell(told[start : start + _TOLD_AT_ONCE])

    def _tell(self, what: list[Event] | BaseException | None) -> None:
        while not self._unheard.is_set():
            with contextlib.suppress(queue.Full):
                self._events.put(what, timeout=_POLL_SECONDS)
                return

    def _count(self, event: Event, now: float) -> bool:
        """Enter an event in the report; whether it is news."""
        report = self.report
        if isinstance(event, Failure):
            if event.key in self._failed_keys:  # found by two stages at once; what came first is reported
                return False
            self._failed_keys.add(event.key)
            report.partitions_failed.append(event)
        elif isinstance(event, Receipt) and event.action == "fresh":
            report.partitions_skipped += 1
        elif isinstance(event, Receipt):
            self.published.add(event.key)
            report.partitions_written += 1
            report.texts_reused += event.texts_reused
            report.partitions_republished += event.action == "republished"
            report.truncated += event.truncated if event.action == "encoded" else 0
            report.wall_seconds = now
            if report.time_to_first_output_seconds is None:
                report.time_to_first_output_seconds = now
        return True

    def _count_retries(self) -> None:
        before = self._retries_before
        now = {cause: count - before.get(cause, 0) for cause, count in self._store.retries.items()}
        self.report.storage_retries = {cause: count for cause, count in sorted(now.items()) if count}

    def _put(
        self, target: queue.Queue[SuperBatch | BaseException | None], item: SuperBatch | BaseException | None
    ) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                target.put(item, timeout=0.1)
                return
        raise Cancelled


def _covers(ranges: list[tuple[int, int]], start: int, stop: int) -> bool:
    """Whether ascending ranges hold all rows start..stop."""
    for first, end in ranges:
        if first <= start < end:
            start = end
    return start >= stop
