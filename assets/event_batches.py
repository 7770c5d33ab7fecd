"""How events get into Dagster's event log: many with one call where that is known to work, one by one elsewhere.

Dagster stores the events of a large partitioned output in batches, and has no public call that does it for what an op
logs while it runs. The call used here is internal, so it is taken only with versions that it was tried with, and only
if it looks as it did there. Everywhere else the public `context.log_event` does the same, an event at a time.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence

import dagster as dg
from dagster._core import events as internal

Event = dg.AssetMaterialization | dg.AssetObservation
Store = Callable[[Sequence[Event]], None]

# A batch is one transaction, and as long as it lasts other processes wait for SQLite.
BATCH_EVENTS = 500
CHECKED_VERSIONS = ("1.13.27",)
# Dagster ignores what marks a batch unless this is over 0; whoever sets it to 0 gets events one by one.
_BATCH_SIZE = "DAGSTER_EVENT_BATCH_SIZE"
_PAGE = 1_000


def event_store(context: dg.OpExecutionContext) -> Store:
    """What stores events of a run, in order; all of one call are of one kind and of one asset.

    The same kind and asset, because Dagster's storages bring their table of assets up to date from the last event of a
    batch alone, and Postgres stores a mixed batch one by one.
    """
    if dg.__version__ in CHECKED_VERSIONS and _looks_as_checked():
        os.environ.setdefault(_BATCH_SIZE, str(BATCH_EVENTS))
        return lambda events: _store_batch(context, events)
    context.log.info(
        f"Dagster {dg.__version__} is not one of those that events are written in batches with "
        f"({', '.join(CHECKED_VERSIONS)}): they are written one by one, which takes about 10 ms each."
    )
    return lambda events: _store_one_by_one(context, events)


class StorageIds:
    """Finds the storage ids that events got; other events point at them.

    Args:
        instance: where the events are stored.
        run_id: of the run that stores them.
    """

    def __init__(self, instance: dg.DagsterInstance, run_id: str) -> None:
        self._instance = instance
        self._run_id = run_id
        self._seen: dict[dg.AssetKey, int] = {}

    def before(self, events: Sequence[Event]) -> None:
        """Note what is there already; called before events of one kind and asset are stored."""
        asset = events[0].asset_key
        if events[0].partition is None and asset not in self._seen:
            newest = self._instance.fetch_materializations(asset, limit=1).records
            self._seen[asset] = newest[0].storage_id if newest else 0

    def after(self, events: Sequence[Event]) -> list[int | None]:
        """The storage ids of events that were just stored, with two or three queries for all of them.

        Args:
            events: observations or materializations of partitions, or materializations of an asset without partitions.
        """
        asset = events[0].asset_key
        if events[0].partition is None:
            return self._of_unpartitioned(asset, len(events))
        partitions = {event.partition for event in events if event.partition is not None}
        found = self._instance.get_latest_storage_id_by_partition(asset, _kind(events[0]), partitions)
        return [found.get(event.partition or "") for event in events]

    def _of_unpartitioned(self, asset: dg.AssetKey, count: int) -> list[int | None]:
        # Another run may write events of the same asset at the same time.
        ours: list[int | None] = []
        more = True
        while more:
            since = dg.AssetRecordsFilter(asset, after_storage_id=self._seen[asset])
            page = self._instance.fetch_materializations(since, limit=_PAGE, ascending=True)
            ours += [record.storage_id for record in page.records if record.run_id == self._run_id]
            if page.records:
                self._seen[asset] = page.records[-1].storage_id
            more = page.has_more and bool(page.records)
        return ours if len(ours) == count else [None] * count


def _kind(event: Event) -> dg.DagsterEventType:
    if isinstance(event, dg.AssetMaterialization):
        return dg.DagsterEventType.ASSET_MATERIALIZATION
    return dg.DagsterEventType.ASSET_OBSERVATION


def _looks_as_checked() -> bool:
    def takes(function: object, *names: str) -> bool:
        return callable(function) and set(names) <= inspect.signature(function).parameters.keys()

    report = getattr(dg.DagsterInstance, "report_dagster_event", None)
    return (
        takes(report, "dagster_event", "run_id", "log_level", "batch_metadata")
        and takes(getattr(internal, "DagsterEventBatchMetadata", None), "id", "is_end")
        and takes(getattr(internal, "generate_event_batch_id", None))
        and hasattr(dg.OpExecutionContext, "get_step_execution_context")
    )


def _store_batch(context: dg.OpExecutionContext, events: Sequence[Event]) -> None:
    """As `context.log_event` would store them, but past the run's loggers: a console line each costs as much again."""
    step = context.get_step_execution_context()
    for start in range(0, len(events), BATCH_EVENTS):
        part = events[start : start + BATCH_EVENTS]
        batch = internal.generate_event_batch_id()
        for place, event in enumerate(part):
            if isinstance(event, dg.AssetMaterialization):
                data = internal.StepMaterializationData(event)
                message = event.description or f"Materialized value {event.label}."
            else:
                data, message = internal.AssetObservationData(event), None
            context.instance.report_dagster_event(
                internal.DagsterEvent(
                    event_type_value=_kind(event).value,
                    job_name=step.job_name,
                    step_handle=step.step.handle,
                    node_handle=step.step.node_handle,
                    step_kind_value=step.step.kind.value,
                    logging_tags=step.event_tags,
                    event_specific_data=data,
                    message=message,
                    pid=os.getpid(),
                ),
                context.run_id,
                logging.DEBUG,
                batch_metadata=internal.DagsterEventBatchMetadata(batch, is_end=place == len(part) - 1),
            )


def _store_one_by_one(context: dg.OpExecutionContext, events: Sequence[Event]) -> None:
    for event in events:
        context.log_event(event)
        for _ in context.consume_events():
            pass  # it is stored by now; the context would keep it in memory until the step ends (4 kB each)
