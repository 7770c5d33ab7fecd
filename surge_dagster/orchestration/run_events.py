"""The events of one attempt at a run: what it observed, published, adopted and could not embed.

A partition's event is queued as soon as its file is complete. It is made when the events that it points at are stored:
the observation of its source version and the event of its SuperBatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Self

import dagster as dg

from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.report import Failure, Receipt, SuperBatchReport
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.orchestration import asset_events
from surge_dagster.orchestration.dagster_internals import Event, Planned
from surge_dagster.orchestration.events import EventWriter
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Outcome
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.records import Catalogued, planned_by_name

# The run's check lists more failures; a log line costs as much as an event.
FAILURES_LOGGED = 100


class RunEvents:
    """Reports one attempt to Dagster and enters it in the outcome; use `with`, which stores the remaining events.

    Args:
        names: of the catalog.
        context: of the op that reports the events.
        catalogued: Dagster's records before the run; observations are added.
        outcome: of this attempt.
        grace_seconds: how long storing events may take when an error or an interrupt ends the attempt, from the moment
            in which the engine was asked to stop.
    """

    def __init__(
        self,
        names: CatalogNames,
        context: dg.OpExecutionContext,
        catalogued: Catalogued,
        outcome: Outcome,
        grace_seconds: float,
    ) -> None:
        self._names = names
        self._context = context
        self._observed = catalogued.observed
        self._outcome = outcome
        self._planned = planned_by_name(names, context.instance)
        self._pointers = _EventPointers(names, context, catalogued.observation_ids)
        self._engine: EmbeddingRun | None = None
        self._writer = EventWriter(
            context,
            grace_seconds=grace_seconds,
            stopped_at=lambda: self._engine.stopped_at if self._engine else None,
            stored=self._pointers.learn,
        )

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)

    def follow(self, engine: EmbeddingRun) -> None:
        """Use the metrics of an engine that is about to run, and its time of stopping."""
        self._engine = engine
        self._outcome.report = engine.report

    def superbatch(self, report: SuperBatchReport, space: Space) -> None:
        """Report a SuperBatch."""
        self._writer.log(asset_events.superbatch(self._names, report, space.name))

    def end_of_superbatches(self) -> None:
        """Report the run as a whole, with charts, if it encoded anything."""
        if self._outcome.report.superbatches:
            self._writer.log(asset_events.whole_run(self._names, self._outcome.report, self._outcome.findings))

    def embedding(self, receipt: Receipt, *, reused: bool = False, adopted: bool = False) -> None:
        """Report a partition whose file is complete; see `asset_events.embedding`."""
        self.unchanged(receipt)
        partition_key = to_partition_key(receipt.key)
        if partition_key in self._planned:
            self._writer.log(Planned(self._names.embeddings, partition_key))
        self._writer.log_after(partial(self._materialization, receipt, reused=reused, adopted=adopted))

    def unchanged(self, receipt: Receipt) -> None:
        """Enter a fresh partition that is on record; only its source version is reported, if it has moved."""
        self._outcome.tried(receipt.key)
        self._observe(receipt.key)

    def failure(self, failure: Failure) -> None:
        """Enter and log a partition that failed."""
        self._observe(failure.key)  # the sensor requests nothing that has failed since it was observed
        self._outcome.fail(failure)
        if len(self._outcome.failures) <= FAILURES_LOGGED:
            self._context.log.error(failure.reason)

    def _materialization(self, receipt: Receipt, *, reused: bool, adopted: bool) -> dg.AssetMaterialization:
        observed = self._pointers.observations.get(to_partition_key(receipt.key))
        superbatch = None if receipt.superbatch is None else self._pointers.superbatches.get(receipt.superbatch)
        return asset_events.embedding(self._names, receipt, observed, superbatch, reused=reused, adopted=adopted)

    def _observe(self, key: str) -> None:
        """Queue the partition's source version if it has moved since it was observed last.

        Not all of them at the start: with many partitions the first file would wait for minutes of events.
        """
        partition, partition_key = self._outcome.partitions.get(key), to_partition_key(key)
        if partition is not None and self._observed.get(partition_key) != partition.source_version:
            self._writer.log(asset_events.observation(self._names, partition))
            self._observed[partition_key] = partition.source_version


class _EventPointers:
    """Storage ids of the events that a run's materializations point at, as they become known.

    Args:
        names: of the catalog.
        context: of the op that reports the events.
        observation_ids: of earlier observations, by partition key; updated here.
    """

    def __init__(self, names: CatalogNames, context: dg.OpExecutionContext, observation_ids: dict[str, int]) -> None:
        self._names = names
        self._context = context
        self.observations = observation_ids
        self.superbatches: dict[int, int] = {}  # by index of the SuperBatch
        newest = context.instance.fetch_materializations(names.superbatches, limit=1).records
        self._seen = newest[0].storage_id if newest else 0

    def learn(self, stored: Sequence[Event]) -> None:
        """Look up the storage ids of events that were just stored, with one query for each of the two assets."""
        instance = self._context.instance
        observed = {event.partition for event in stored if event.asset_key == self._names.source_partitions}
        if keys := {key for key in observed if key is not None}:
            self.observations |= instance.get_latest_storage_id_by_partition(
                self._names.source_partitions, dg.DagsterEventType.ASSET_OBSERVATION, keys
            )
        if any(event.asset_key == self._names.superbatches for event in stored):
            self._learn_superbatches()

    def _learn_superbatches(self) -> None:
        more = True
        while more:  # other runs may report SuperBatches at the same time
            since = dg.AssetRecordsFilter(self._names.superbatches, after_storage_id=self._seen)
            page = self._context.instance.fetch_materializations(since, limit=1_000, ascending=True)
            for record in page.records:
                self._seen = record.storage_id
                event = record.asset_materialization
                if record.run_id == self._context.run_id and event and "superbatch" in event.metadata:
                    index = event.metadata["superbatch"].value
                    self.superbatches[int(str(index))] = record.storage_id
            more = page.has_more and bool(page.records)
