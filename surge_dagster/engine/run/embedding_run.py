"""A run: the loop that joins the stages, each in its own threads, each one step ahead of the next.

    reading.superbatches  ──►  encoding.encoded_superbatches  ──►  publisher  ──►  events

While SuperBatch j+1 is being encoded, j is being published and j+2 is being read. The stages pass on slots of shared
memory; a run owns three, so a slow store holds up the encoder, which holds up the reader, and nothing piles up. A
partition that cannot be used is dropped by the stage that finds the error and reported once; the others go on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterable, Iterator

from surge_dagster.engine.encoder.arena import Arena
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.feed.change_files import DEFAULT_KEEP_DAYS, ChangeFeed, wanted_feed
from surge_dagster.engine.model.spec import FileFormat
from surge_dagster.engine.output.catalog_record import CatalogRecord
from surge_dagster.engine.output.current_space import keep_current
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.run.encoding import ReadAhead, encoded_superbatches
from surge_dagster.engine.run.events import EventStream
from surge_dagster.engine.run.memory import SLOTS, fit_memory
from surge_dagster.engine.run.meters import ExposedIo, InFlight
from surge_dagster.engine.run.publisher import Publisher
from surge_dagster.engine.run.reading import superbatches
from surge_dagster.engine.run.report import Event, Receipt, RunReport
from surge_dagster.engine.run.run_context import EncodingSpeed, RunContext
from surge_dagster.engine.run.space_target import SpaceTarget
from surge_dagster.engine.run.staging import Staging, sweep_orphan_files
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.ledger import Ledger
from surge_dagster.engine.support.process_memory import MemoryGauge, memory_bytes
from surge_dagster.engine.support.waiting import StopSignal

_LOCAL_THREADS = 4


class EmbeddingRun:
    """Embeds every partition that is not fresh and publishes one file for each.

    Args:
        partitions: in the order they are to be read; a `Source` is one such iterable.
        store: the output; files go to the folder of the pool's space.
        pool: the run uses it and does not own it; one that was not started is started now.
        thresholds: of the SuperBatches; missing values follow from the pool's measured speed and the memory.
        catalog: what the partitions belong to, recorded in the space; a space of another catalog is refused, and so is
            an output inside it. None: it is neither compared nor recorded.
        force: encode fresh partitions too.
        outputs: the files of the pool's space, where the caller has listed them; None: the run lists them.
        include_text: write the text column.
        file_format: of the files; the space's own, where the output has it.
        memory_limit: bytes of data that may be resident at any time; None is half of the memory that the process may
            use, of which three SuperBatches take what they need.
        grace_seconds: how long a run that is stopped may take to publish what is encoded.
        changes: write which rows of each partition change, even if no consumer is registered in the output.
        keep_changes_days: how long change files are kept for consumers that do not come.
        publish_threads: files serialized and published concurrently; None follows from the store
            (`publishing_threads`).

    Attributes:
        report: the metrics, live.
        space: the vector space that the run writes.
        bounds: the thresholds of the SuperBatches.

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
        catalog: CatalogRecord | None = None,
        force: bool = False,
        outputs: OutputState | None = None,
        include_text: bool = True,
        file_format: FileFormat = "parquet",
        memory_limit: int | None = None,
        grace_seconds: float = 20.0,
        changes: bool = False,
        keep_changes_days: float = DEFAULT_KEEP_DAYS,
        publish_threads: int | None = None,
    ) -> None:
        pool.require_documents()
        self.bounds, self.memory = fit_memory(
            thresholds or Thresholds(),
            pool.costs.efficient_texts,
            pool.space,
            publish_threads or publishing_threads(store, pool.workers),
            memory_limit,
            machine_bytes=memory_bytes(),
            upload_bytes=store.upload_bytes,
        )
        if catalog is not None:
            catalog.require_apart(store)
        keep_current(store, pool.space)
        self.space = claim_space(store, pool.space, file_format, catalog)
        sweep_orphan_files(store, claimed=self.space.name)
        self.report = RunReport(
            space=self.space.name,
            space_title=self.space.title,
            dimension=self.space.dimension,
            device=pool.device,
            hardware=pool.hardware,
            precision=pool.precision,
            encoder_notes=list(pool.start().notes),
            pool_start_seconds=pool.start_seconds,
            b_min=self.bounds.b_min,
            b_max=self.bounds.b_max,
            workers=pool.workers,
            call_seconds=pool.costs.call_seconds,
        )
        self.ledger = Ledger(self.memory.limit)
        self.in_flight = InFlight()
        self._partitions = partitions
        self._pool = pool
        self._force = force
        self._outputs = outputs
        self._include_text = include_text
        self._changes = changes
        self._keep_changes_days = keep_changes_days
        self._stop = StopSignal(grace_seconds)
        self._store = store.until(self._stop.over)
        self._exposed_io = ExposedIo()
        self._events = EventStream(self.report, self.ledger, self.in_flight, self._exposed_io, store, self._stop)
        self._started = False

    @property
    def failed(self) -> bool:
        """Whether a partition was refused or could not be published."""
        return bool(self.report.partitions_failed)

    @property
    def stopped(self) -> bool:
        """Whether the run was asked to end early."""
        return self._stop.requested_at is not None

    @property
    def published(self) -> set[str]:
        """Keys of the partitions that were published, also those whose receipt was not taken yet."""
        return self._events.published

    def __iter__(self) -> Iterator[Receipt]:
        """Run, and yield a receipt for each partition as it is published."""
        with contextlib.closing(self.events()) as events:
            for event in events:
                if isinstance(event, Receipt) and event.action != "fresh":
                    yield event

    def events(self) -> Generator[Event]:
        """Run, and yield what happens in the order of its commits: each SuperBatch, then its completed partitions.

        Closing the generator stops the run: what is encoded by then, or within half of the grace time, is published,
        the rest is left for the next run. It returns when the grace time is over at the latest.

        Raises:
            EncoderError: the pool failed for good.
            ConfigError: the source cannot be listed.
        """
        if self._started:
            raise RuntimeError("a run runs once; make another one")
        self._started = True
        arena = self._pool.arena(slots=SLOTS, max_texts=self.bounds.b_max, max_bytes=self.bounds.b_max_bytes)
        gauge = MemoryGauge()
        try:
            with gauge, arena, contextlib.closing(self._run(arena)) as events:
                yield from events
        finally:
            self.report.peak_rss_bytes = gauge.peak_bytes

    def stop(self) -> None:
        """Ask the run to end early, from any thread: like closing `events()`, except that it yields the rest."""
        self._stop.request()

    def _run(self, arena: Arena) -> Generator[Event]:
        context = self._context(arena)
        engine = threading.Thread(target=self._join_stages, args=(context,), name="surge-run", daemon=True)
        try:
            engine.start()
            yield from self._events
        finally:
            if not self._events.ended:
                self.stop()
            try:
                while engine.is_alive():
                    self._events.drop_next()
            except BaseException:  # interrupted again: the caller does not wait for what is under way
                self._stop.abandon()
                raise

    def _context(self, arena: Arena) -> RunContext:
        target = SpaceTarget(self._store, self.space, self._pool.precision, self._include_text)
        begun = time.perf_counter()
        self._events.begin(begun)
        return RunContext(
            target=target,
            staging=Staging(target),
            bounds=self.bounds,
            memory=self.memory,
            ledger=self.ledger,
            arena=arena,
            in_flight=self.in_flight,
            exposed_io=self._exposed_io,
            stop=self._stop,
            events=self._events,
            begun=begun,
            speed=EncodingSpeed(self._pool.costs.texts_per_second),
            feed=wanted_feed(self._store, self.space.name, always=self._changes),
        )

    def _join_stages(self, context: RunContext) -> None:
        """Read, encode and publish until the reader has no more; ends the events in every case."""
        error: BaseException | None = None
        try:
            outputs = self._outputs
            if outputs is None or outputs.space != self.space.name:
                outputs = OutputState(self._store, self.space.name, self.space.file_format)
            items = superbatches(self._partitions, outputs, context, force=self._force)
            publisher = Publisher(context)
            try:
                with contextlib.closing(ReadAhead(items, context)) as batches:
                    for encoded in encoded_superbatches(batches, self._pool, context):
                        publisher.submit(encoded)
            except BaseException as caught:
                error = caught
            publisher.close()
            if error is None and self._stop.requested_at is None:
                feed = context.feed or ChangeFeed(self._store, self.space.name)  # of consumers that are forgotten
                feed.remove_passed(keep_days=self._keep_changes_days, keep_all=self._changes or context.feed is None)
        except BaseException as caught:
            error = error or caught
        finally:
            self._stop.over.set()
            self._events.end(error)


def publishing_threads(store: Store, workers: int) -> int:
    """How many files a run publishes concurrently.

    A bucket answers each request after a while, so many requests are sent concurrently: four per worker, at least
    eight. On a local disk most of the time goes into serializing, which needs the GIL; a few threads hide the flushes.
    """
    return max(8, 4 * workers) if store.is_remote else _LOCAL_THREADS
