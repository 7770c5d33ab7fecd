"""Storing events in Dagster's event log: `report_events` while the caller waits, `EventWriter` in
the background, and `RunEvents`, which writes what a run found in the source, published, adopted and
could not embed.

Dagster stores a single event in about 10 ms on SQLite and 25 ms on Postgres, and a batch of them in
a twentieth of that per event. A run that waited for each event would embed at the speed of a
database, so its events are stored in batches, each second or when a batch is complete. Many
machines share one database, so all of them together store some twenty times per second. A crash
loses the events that wait and no file: the next run finds the files and adopts them.

A partition's event points at the event of its source version, so it is made when that is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from contextlib import contextmanager
from functools import partial
from typing import Generic, Self, TypeVar

import dagster as dg

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.report import Failure, Receipt, SuperBatchReport
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.waiting import every, in_background, result_of, wait_in_turns
from surge_dagster.orchestration import asset_events
from surge_dagster.orchestration.dagster_internals import Event, Planned, store_batch
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Outcome
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.records import Catalogued

# A batch is one transaction, and other processes wait for SQLite as long as it lasts. While one is
# stored, another one waits, of some 4 kB per event: more would only take longer to store when a run
# is terminated.
BATCH_EVENTS = 1_000
_FLUSH_SECONDS = 1.0
_THREAD = "surge-events"
# The run's check lists more failures; a log line costs as much as an event.
FAILURES_LOGGED = 100

T = TypeVar("T")


def report_events(
    instance: dg.DagsterInstance, context: dg.OpExecutionContext | None, events: Sequence[Event]
) -> None:
    """Store events by kind and asset, in their order, and observations before others.

    Dagster's storages update their table of assets only from the last event of a batch, and
    Postgres stores a batch of several kinds event by event. Events without a `context` belong to no
    run.
    """
    groups: dict[object, list[Event]] = {}
    for event in events:
        groups.setdefault((type(event), event.asset_key), []).append(event)
    for group in sorted(
        groups.values(), key=lambda group: not isinstance(group[0], dg.AssetObservation)
    ):
        store_batch(instance, context, group, BATCH_EVENTS)


class EventWriter(Generic[T]):
    """Stores what a step puts, in the background.

    Args:
        grace_seconds: for the rest after an error.
    """

    def __init__(self, store: Callable[[Sequence[T]], None], grace_seconds: float) -> None:
        self._store = store
        self._grace_seconds = grace_seconds
        self._waiting: list[T] = []
        self._storing: Future[None] = Future()
        self._storing.set_result(None)
        self._lock = threading.Lock()

    def put(self, item: T) -> None:
        """Add an item; wait if a batch is complete and the one before it is still being stored."""
        with self._lock:
            self._waiting.append(item)
            is_complete = len(self._waiting) >= BATCH_EVENTS
        if is_complete or self._storing.done():
            self._require_stored()
        if is_complete:
            self._begin()

    @contextmanager
    def opened(self) -> Iterator[Self]:
        """Store what is put in the block, also at intervals; its end stores the rest."""
        try:
            with every(_FLUSH_SECONDS, self._begin, _THREAD):
                yield self
        except BaseException:
            # If that fails or takes longer, the error that ended the step is the one to report, and
            # the next run adopts the files.
            finishing = in_background(self._finish, _THREAD)
            wait_in_turns(
                lambda turn: bool(futures_wait([finishing], turn).done), self._grace_seconds
            )
            raise
        self._finish()

    def _begin(self) -> None:
        """Begin to store what waits, unless a batch is being stored or could not be."""
        with self._lock:
            is_ready = self._storing.done() and self._storing.exception() is None
            if self._waiting and is_ready:
                batch = self._waiting
                self._waiting = []
                self._storing = in_background(partial(self._store, batch), _THREAD)

    def _finish(self) -> None:
        self._require_stored()
        self._begin()
        self._require_stored()

    def _require_stored(self) -> None:
        """Wait for the batch that is being stored."""
        try:
            result_of(self._storing)
        except Exception as error:
            raise TransientError(
                "events could not be stored in Dagster's event log "
                f"({type(error).__name__}: {error}). The files that they report are "
                "published, and the next run adopts them without encoding them. Look whether the "
                "event log's database can be reached and written."
            ) from error


class RunEvents(EventWriter[Event | Receipt]):
    """Reports a run to Dagster and enters failures in the outcome.

    Args:
        store: the output.
        shown_as: returns the asset that shows the files of the run's space at that moment.
    """

    def __init__(
        self,
        names: CatalogNames,
        context: dg.OpExecutionContext,
        catalogued: Catalogued,
        outcome: Outcome,
        store: Store,
        shown_as: Callable[[], dg.AssetKey],
        grace_seconds: float,
    ) -> None:
        super().__init__(self._store_batch, grace_seconds)
        self._names = names
        self._context = context
        self._asset = catalogued.asset
        self._output = store
        self._shown_as = shown_as
        self._sources = dict(catalogued.sources)
        # A partition that failed is planned by name just before its run ends, which shows it as
        # failed. Every run that materializes it later plans it too: its page would otherwise go on
        # naming the run that failed.
        planned = dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED
        self._planned = context.instance.get_latest_storage_id_by_partition(
            self._asset, planned
        ).keys()
        self._outcome = outcome

    def superbatch(self, report: SuperBatchReport, space: Space) -> None:
        self.put(asset_events.superbatch(self._names, report, space))

    def repeated(self, event: dg.AssetMaterialization) -> None:
        """Report the last event of a partition again, as that of this run; its versions stay what
        they are."""
        assert event.partition
        if event.partition in self._planned:
            self.put(Planned(event.asset_key, event.partition))
        text = "This run left the partition as it is; this is its last event once more."
        self.put(event._replace(description=text))

    def embedding(self, receipt: Receipt) -> None:
        self.source(receipt.key)
        partition_key = to_partition_key(receipt.key)
        if partition_key in self._planned:
            self.put(Planned(self._asset, partition_key))
        self.put(receipt)

    def failure(self, failure: Failure) -> None:
        self.source(failure.key)
        self._outcome.fail(failure)
        if len(self._outcome.failures) <= FAILURES_LOGGED:
            self._context.log.error(failure.reason)

    def source(self, key: str) -> None:
        """Report the partition's source version if it is not the one on record."""
        # Not all of them at the start: with many partitions the first file would wait for minutes
        # of events.
        partition = self._outcome.partitions.get(key)
        partition_key = to_partition_key(key)
        if partition is None or self._sources.get(partition_key) == partition.source_version:
            return
        version = partition.source_version
        changed = partition_key in self._sources
        for event in asset_events.source_version(
            self._names, partition_key, version, partition.source_rows, changed=changed
        ):
            self.put(event)
        self._sources[partition_key] = version

    # In the writer's thread

    def _store_batch(self, batch: Sequence[Event | Receipt]) -> None:
        instance = self._context.instance
        plain = [item for item in batch if not isinstance(item, Receipt)]
        report_events(instance, self._context, plain)
        receipts = [item for item in batch if isinstance(item, Receipt)]
        if not receipts:
            return
        keys = {to_partition_key(receipt.key) for receipt in receipts}
        source_ids = instance.get_latest_storage_id_by_partition(
            self._names.source_partitions, dg.DagsterEventType.ASSET_MATERIALIZATION, keys
        )
        asset = self._shown_as()  # for each batch: a switch may take place during the run
        title = self._outcome.report.space_title
        events: list[Event] = []
        for receipt in receipts:
            source_id = source_ids.get(to_partition_key(receipt.key))
            rejected = asset_events.rows_set_aside(self._output, receipt)
            event = asset_events.embedding(self._names, asset, receipt, source_id, title, rejected)
            events.append(event)
        report_events(instance, self._context, events)
