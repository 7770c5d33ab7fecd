"""The events of a run: what it found in the source, published, adopted and could not embed.

An event is queued as soon as there is something to report, and a thread stores batches of them. A
partition's event points at the event of its source version, so it is made when that is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import dagster as dg

from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.report import Failure, Receipt, SuperBatchReport
from surge_dagster.orchestration import asset_events
from surge_dagster.orchestration.dagster_internals import Event, Planned
from surge_dagster.orchestration.events import EventWriter, report_events
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Outcome
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.records import Catalogued

# The run's check lists more failures; a log line costs as much as an event.
FAILURES_LOGGED = 100


class RunEvents(EventWriter[Event | Receipt]):
    """Reports a run to Dagster and enters failures in the outcome.

    Args:
        shown_as: returns the asset that shows the files of the run's space at that moment.
    """

    def __init__(
        self,
        names: CatalogNames,
        context: dg.OpExecutionContext,
        catalogued: Catalogued,
        outcome: Outcome,
        shown_as: Callable[[], dg.AssetKey],
        grace_seconds: float,
    ) -> None:
        super().__init__(self._store_batch, grace_seconds)
        self._names = names
        self._context = context
        self._asset = catalogued.asset
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
        changed = partition_key in self._sources
        for event in asset_events.source_version(self._names, partition, changed=changed):
            self.put(event)
        self._sources[partition_key] = partition.source_version

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
            event = asset_events.embedding(self._names, asset, receipt, source_id, title)
            events.append(event)
        report_events(instance, self._context, events)
