"""A run: the loop that joins the stages, each in its own threads, each one step ahead of the next.

    decide  ──►  superbatches  ──►  encoded_superbatches  ──►  publisher  ──►  events

While SuperBatch j+1 is being encoded, j is being published and j+2 is being read. The stages pass
on slots of shared memory; a run owns three, so a slow store holds up the encoder, which holds up
the reader, and nothing piles up. A partition that cannot be used is dropped by the stage that finds
the error and reported once; the others go on.

A run starts its pool and writes to the output when the first partition comes that is not fresh. One
that has nothing to do starts none.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import Cancelled, ConfigError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.catalog_record import CatalogRecord
from surge_dagster.engine.output.current_space import keep_current
from surge_dagster.engine.output.freshness import Freshness, OutputState
from surge_dagster.engine.output.spaces import claim_space, recorded_catalog, space_of_spec
from surge_dagster.engine.run.change_feed import ChangeFeed
from surge_dagster.engine.run.cost_limit import CostLimit
from surge_dagster.engine.run.deciding import decide
from surge_dagster.engine.run.encoding import ReadAhead, encoded_superbatches
from surge_dagster.engine.run.events import EventStream
from surge_dagster.engine.run.memory import SLOTS, fit_memory
from surge_dagster.engine.run.old_rows import ReuseAnswer, ReuseCheck
from surge_dagster.engine.run.publisher import Publisher
from surge_dagster.engine.run.read_again import ReadAgain
from surge_dagster.engine.run.reading import superbatches
from surge_dagster.engine.run.report import (
    NO_PRICES,
    Event,
    Failure,
    Prices,
    Receipt,
    RunReport,
)
from surge_dagster.engine.run.run_memory import ExposedIo, InFlight, RunMemory
from surge_dagster.engine.run.staging import Staging, remove_staged, sweep_orphan_files
from surge_dagster.engine.run.superbatch import PartitionToRead, SpaceTarget
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition, PartitionRange
from surge_dagster.engine.sources.selection import BadRows
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.ledger import Ledger
from surge_dagster.engine.support.process_memory import MemoryGauge, memory_bytes
from surge_dagster.engine.support.waiting import StopSignal, in_background, result_of

_LOCAL_THREADS = 4
_Decision = Receipt | Failure | PartitionToRead


@dataclass(eq=False, repr=False)
class EmbeddingRun:
    """Embeds every partition that is not fresh and publishes one file for each. Iterating over it
    is the run.

    Args:
        partitions: in the order they are to be read; a `Source` is one such iterable.
        store: the output; files go to the folder of the pool's space.
        pool: started by the run when it is needed; the run does not own it.
        thresholds: of the SuperBatches; missing values follow from the pool's measured speed and
            the memory.
        catalog: what the partitions belong to, recorded in the space; a space of another catalog is
            refused, and so is an output inside it. None: it is neither compared nor recorded.
        force: encode fresh partitions too.
        ranges: rows of partitions that are read, encoded and staged; other runs do the other rows,
            at any time, anywhere. If all rows of a partition are staged then, the run publishes its
            file, else it reports nothing of it. Excludes `force`.
        outputs: the files of the pool's space, if the caller has listed them; None: the run lists
            them.
        freshness: of all partitions by key, if the caller has asked for it; the run does not ask
            again.
        reuse_answer: of runs that share the pool; the first one compares the sample for all.
        bad_rows: what to do with a row whose text ends workers: refuse its partition, or set it
            aside. The source decides about all other bad rows.
        include_text: write the text column.
        memory_limit_bytes: data that may be resident at any time; None is half of the memory that
            the process may use.
        grace_seconds: how long a run that is stopped may take to publish what is encoded.
        change_feed: records how rows of replaced files have changed; None does not.
        publish_threads: files of a SuperBatch that are serialized and published concurrently; None
            follows from the store (`publishing_threads`).
        task: "query" for a file of queries, whose pool encodes those.
        prices: what the run costs, and what it may cost.

    Attributes:
        report: the metrics, live.
        space: the vector space that the run writes; once the run has begun, as the output has it.
        space_is_known: whether the output had it when it was listed.
        preparing: what the run does before it has texts in flight, in words.
    """

    partitions: Iterable[Partition]
    store: Store
    pool: EncoderPool
    thresholds: Thresholds = field(default_factory=Thresholds)
    _: KW_ONLY
    catalog: CatalogRecord | None = None
    force: bool = False
    ranges: Sequence[PartitionRange] = ()
    outputs: OutputState | None = None
    freshness: Mapping[str, Freshness] | None = None
    reuse_answer: ReuseAnswer | None = None
    bad_rows: BadRows = "refuse"
    include_text: bool = True
    memory_limit_bytes: int | None = None
    grace_seconds: float = 20.0
    change_feed: ChangeFeed | None = None
    publish_threads: int | None = None
    task: Task = "document"
    prices: Prices = NO_PRICES

    def __post_init__(self) -> None:
        if self.task == "document":
            self.pool.require_documents()
        if self.force and self.ranges:
            raise ConfigError(
                "ranges are completed by rows that other runs staged, so force cannot be used with "
                "them."
            )
        if self.catalog is not None:
            self.catalog.require_apart(self.store)
        self.report = RunReport(prices=self.prices)
        self.space = self.pool.space
        self.space_is_known = False
        self.preparing = "the files of the output are being compared with the source"
        self._stop = StopSignal(self.grace_seconds)
        self.store = self.store.until(self._stop.over)
        self._memory: RunMemory | None = None
        self._events: EventStream | None = None
        self._started = False
        self._has_new_selection = False
        self._describe_space()

    @property
    def failed(self) -> bool:
        """Whether a partition was refused or could not be published."""
        return bool(self.report.partitions_failed)

    @property
    def memory(self) -> RunMemory:
        """Thresholds of the SuperBatches and what the run holds, once the encoder was needed."""
        if self._memory is None:
            raise RuntimeError("the run has not begun to encode")
        return self._memory

    @property
    def in_flight(self) -> InFlight | None:
        """Counts of texts, live; None before the encoder is ready."""
        return None if self._memory is None else self._memory.in_flight

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.requested_at is not None

    @property
    def published(self) -> set[str]:
        """Keys of the published partitions, also if their receipt was not taken yet."""
        return set() if self._events is None else self._events.published

    def __iter__(self) -> Iterator[Receipt]:
        """Run, and yield a receipt for each partition as it is published."""
        with contextlib.closing(self.events()) as events:
            for event in events:
                if isinstance(event, Receipt) and event.action != "fresh":
                    yield event

    def events(self) -> Generator[Event]:
        """Run, and yield what happens in the order of its commits: each SuperBatch, then its
        completed partitions.

        Closing the generator stops the run: what is encoded by then, or within half of the grace
        time, is published, the rest is left for the next run. It returns when the grace time is
        over at the latest.

        Raises:
            ConfigError: the source cannot be listed, the thresholds or the memory limit cannot
                work, or the output cannot be used.
            EncoderError: the pool does not start, or failed for good.
            MaxCostReached: what is left may cost more than the prices allow.
        """
        if self._started:
            raise RuntimeError("a run runs once; make another one")
        self._started = True
        begun = time.perf_counter()
        gauge = MemoryGauge()
        try:
            with gauge:
                yield from self._run()
        finally:
            self.report.peak_rss_bytes = gauge.peak_bytes
            self.report.run_seconds = time.perf_counter() - begun

    def _run(self) -> Generator[Event]:
        outputs = self.listed_outputs()
        decisions = decide(
            self.partitions,
            outputs,
            self._stop,
            force=self.force,
            ranges=self.ranges,
            freshness=self.freshness,
        )
        fresh_keys: set[str] = set()
        due = yield from self._first_due(decisions, fresh_keys)
        if due is not None:
            self.preparing = "the encoder is starting"
            self._start_pool()
        if self._stop.stopping.is_set():
            return
        if due is not None:
            yield from self._embed(due, fresh_keys, outputs)
        else:
            self.keep_tidy(fresh_keys)

    def stop(self) -> None:
        """Ask the run to end early, from any thread: like closing `events()`, except that it yields
        the rest."""
        self._stop.request()

    def _first_due(
        self, decisions: Iterator[_Decision], fresh_keys: set[str]
    ) -> Generator[Event, None, Iterable[_Decision] | None]:
        """Yield receipts of the first partitions, as long as they are fresh; return the others, or
        None if there are none.

        Args:
            fresh_keys: takes the keys of these partitions.
        """
        with contextlib.suppress(Cancelled):
            for decision in decisions:
                if not isinstance(decision, Receipt):
                    return itertools.chain((decision,), decisions)
                fresh_keys.add(decision.key)
                self.report.count(decision, 0.0)
                yield decision
        return None

    def keep_tidy(self, fresh_keys: set[str]) -> None:
        """Make a space that the output has the one of the settings, and remove what is staged of
        fresh partitions."""
        if self.space_is_known:
            self.begin_space()
            remove_staged(self.store, self.space.name, fresh_keys)

    def begin_space(self, space: Space | None = None) -> None:
        """Make a space the one of the settings, also if it answers another request, and remove what
        dead runs left.

        How the rows of a catalog are selected is recorded again once a file was published.
        """
        space = space or self.pool.space
        keep_current(self.store, space)
        catalog = self.catalog
        recorded = recorded_catalog(self.store, self.space)
        if catalog is not None and recorded is not None:
            catalog = catalog.selected_as(recorded)
        self._has_new_selection = catalog != self.catalog
        self.space = claim_space(self.store, space, catalog)
        sweep_orphan_files(self.store)
        self._describe_space()

    def listed_outputs(self) -> OutputState:
        """The files of the run's space."""
        known = space_of_spec(self.store, self.space.spec_sha256)
        if known is not None:
            self.space = known
            self.space_is_known = True
            self._describe_space()
        if self.outputs is not None and self.outputs.space == self.space.name:
            return self.outputs
        return OutputState(self.store, self.space.name)

    def _embed(
        self, due: Iterable[_Decision], fresh_keys: set[str], outputs: OutputState
    ) -> Generator[Event]:
        store = self.store
        memory = self._begin()
        self._memory = memory
        if fresh_keys:
            remove_staged(store, self.space.name, fresh_keys)
        with memory.arena:
            events = self._events = EventStream(self.report, memory)
            target = SpaceTarget(store, self.space, self.pool.precision, self.include_text)
            join = partial(self._join_stages, due, target, memory, events, outputs)
            stages = in_background(join, "surge-run")
            try:
                for event in events:
                    if isinstance(event, Receipt) and event.action != "fresh":
                        self._record_selection()
                    yield event
            finally:
                if not events.ended:
                    self.stop()
                try:
                    result_of(stages)
                except BaseException:  # interrupted again: the caller waits no longer
                    self._stop.abandon()
                    raise

    def _record_selection(self) -> None:
        """Record how the rows of published files were selected, once per run."""
        if self._has_new_selection:
            claim_space(self.store, self.space, self.catalog)
            self._has_new_selection = False

    def _start_pool(self) -> None:
        """Start the pool, which takes no time if another run or asset has started it."""
        begun = time.perf_counter()
        self.pool.start()
        self.report.pool_start_seconds = time.perf_counter() - begun

    def _begin(self) -> RunMemory:
        """Divide the memory, claim the space, and describe both in the report."""
        pool = self.pool
        store = self.store
        started = pool.start()
        self.preparing = "the output is being prepared"
        threads = self.publish_threads or publishing_threads(store, pool.workers)
        bounds, plan = fit_memory(
            self.thresholds,
            pool.speed.b_min,
            pool.space,
            threads,
            self.memory_limit_bytes,
            machine_bytes=memory_bytes(),
            upload_bytes=store.upload_bytes,
        )
        self.begin_space(replace(pool.space, tokenizer=started.tokenizer))
        report = self.report
        report.device = pool.device
        report.hardware = pool.hardware
        report.precision = pool.precision
        report.encoder_notes = list(started.notes)
        report.workers = pool.workers
        report.b_min = bounds.b_min
        report.b_max = bounds.b_max
        report.call_seconds = pool.speed.call_seconds
        arena = pool.arena(slots=SLOTS, max_texts=bounds.b_max, max_bytes=bounds.b_max_bytes)
        return RunMemory(
            bounds, plan, Ledger(plan.limit), arena, InFlight(), ExposedIo(), self._stop
        )

    def _cost_limit(self) -> CostLimit | None:
        price = self.prices.per_million_tokens
        if price is None or self.prices.max_cost is None:
            return None
        space = self.pool.space
        added = space.prompt + (space.carried_probe or "")  # a text may have a request of its own
        return CostLimit(price, self.prices.max_cost, len(added.encode()))

    def _describe_space(self) -> None:
        self.report.space = self.space.name
        self.report.space_title = self.space.title
        self.report.dimension = self.space.dimension

    def _join_stages(
        self,
        due: Iterable[_Decision],
        target: SpaceTarget,
        memory: RunMemory,
        events: EventStream,
        outputs: OutputState,
    ) -> None:
        """Read, encode and publish until the reader has no more; ends the events in every case."""
        error: BaseException | None = None
        dropped: set[PartitionToRead] = set()
        try:
            feed = self.change_feed
            records = feed is not None and feed.begin(target.store, target.space.name)
            staging = Staging(target)
            answer = self.reuse_answer or ReuseAnswer()
            check = ReuseCheck(outputs.names(), target, self.pool, memory, events.emit, answer)
            read_again = ReadAgain(target) if self.bad_rows == "set_aside" else None
            items = superbatches(
                due, target, staging, memory, dropped, check, read_again, records_changes=records
            )
            publisher = Publisher(target, staging, memory, events, dropped, read_again)
            try:
                with contextlib.closing(ReadAhead(items, memory, events)) as batches:
                    limit = self._cost_limit()
                    for encoded in encoded_superbatches(
                        batches, self.pool, memory, events.begun, limit
                    ):
                        publisher.submit(encoded)
            except BaseException as caught:
                error = caught
            publisher.close()
            if feed is not None and error is None and not self.stopped:
                feed.end(target.store, target.space.name)
        except BaseException as caught:
            error = error or caught
        finally:
            self._stop.over.set()
            events.end(error)


def publishing_threads(store: Store, workers: int) -> int:
    """Return how many files a run publishes concurrently.

    A bucket answers each request after a while, so many requests are sent concurrently: four per
    worker, at least eight. On a local disk most of the time goes into serializing, which needs the
    GIL; a few threads hide the flushes.
    """
    return max(8, 4 * workers) if store.is_remote else _LOCAL_THREADS
