"""How events get into Dagster's event log: many at once where that is known to work, one by one elsewhere.

Dagster has no public call that stores many events of an op while it runs, so there are three ways, each the fall-back
of the one before: rows that are written into Dagster's tables, Dagster's own batches, and the public
`context.log_event`, an event at a time. The first two are internal to Dagster, so they are taken only with versions
that they were tried with, and only if everything looks as it did there.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import dagster as dg
from dagster._core import events as internal
from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage

from surge_dagster.orchestration.partition_events import AnyEvent, Event, made
from surge_dagster.orchestration.row_store import RowStore, row_writer
from surge_dagster.orchestration.storage_ids import StorageIds, kind_of

# Stores events, and gives their storage ids if somebody wants them: they may cost queries.
Store = Callable[[Sequence[AnyEvent], bool], Sequence[int | None]]

# A batch is one transaction, and as long as it lasts other processes wait for SQLite.
BATCH_EVENTS = 1_000
CHECKED_VERSIONS = ("1.13.27",)
# Dagster ignores what marks a batch unless this is over 0; whoever sets it to 0 gets events one by one.
_BATCH_SIZE = "DAGSTER_EVENT_BATCH_SIZE"
_LEVEL = logging.DEBUG


@contextmanager
def event_store(context: dg.OpExecutionContext) -> Iterator[Store]:
    """What stores events of a run, in their order; for the thread that opens it."""
    ids = StorageIds(context.instance, context.run_id)
    if not is_checked():
        context.log.info(
            f"Dagster {dg.__version__} is not one of those that events are written in batches with "
            f"({', '.join(CHECKED_VERSIONS)}): they are written one by one, which takes about 10 ms each."
        )
        yield lambda events, wanted: _in_groups(events, ids if wanted else None, partial(_store_one_by_one, context))
        return

    def in_batches(events: Sequence[AnyEvent], wanted: bool) -> Sequence[int | None]:
        return _in_groups(events, ids if wanted else None, partial(_store_batch, context))

    writer = None
    if os.environ.setdefault(_BATCH_SIZE, str(BATCH_EVENTS)) != "0":
        writer = row_writer(context.instance, context.run_id)
    if writer is None:
        yield in_batches
        return
    with writer as write:
        storage = context.instance.event_log_storage
        assert isinstance(storage, SqlEventLogStorage)
        rows = RowStore(storage, write, partial(_entry, context))

        def in_rows(events: Sequence[AnyEvent], wanted: bool) -> Sequence[int | None]:
            told = rows.store(events)
            return in_batches(events, wanted) if told is None else told

        yield in_rows


def _in_groups(
    given: Sequence[AnyEvent], ids: StorageIds | None, store: Callable[[Sequence[Event]], None]
) -> list[int | None]:
    """Store events of one kind and of one asset together.

    Dagster's storages bring their table of assets up to date from the last event of a batch alone, and Postgres stores
    a mixed batch one by one.
    """
    events = [made(event) for event in given]
    groups: dict[object, list[int]] = {}
    for place, event in enumerate(events):
        groups.setdefault((kind_of(event), event.asset_key), []).append(place)
    found: list[int | None] = [None] * len(events)
    for places in groups.values():
        group = [events[place] for place in places]
        if ids is not None:
            ids.before(group)
        store(group)
        if ids is not None:
            for place, storage_id in zip(places, ids.after(group), strict=True):
                found[place] = storage_id
    return found


def is_checked() -> bool:
    """Whether this version of Dagster is one that batches were tried with, and looks as it did then."""
    return dg.__version__ in CHECKED_VERSIONS and _looks_as_checked()


def _looks_as_checked() -> bool:
    def takes(function: object, *names: str) -> bool:
        return callable(function) and set(names) <= inspect.signature(function).parameters.keys()

    report = getattr(dg.DagsterInstance, "report_dagster_event", None)
    return (
        takes(report, "dagster_event", "run_id", "log_level", "batch_metadata")
        and takes(getattr(internal, "DagsterEventBatchMetadata", None), "id", "is_end")
        and takes(getattr(internal, "generate_event_batch_id", None))
        and takes(getattr(SqlEventLogStorage, "_event_to_row", None), "event")
        and takes(getattr(SqlEventLogStorage, "_tags_for_asset_event", None), "event")
        and takes(getattr(SqlEventLogStorage, "_store_asset_event", None), "conn", "event", "event_id")
        and hasattr(dg.OpExecutionContext, "get_step_execution_context")
    )


def _store_batch(context: dg.OpExecutionContext, events: Sequence[Event]) -> None:
    """As `context.log_event` would store them, but past the run's loggers: a console line each costs as much again."""
    report_batch(context.instance, context.run_id, [_dagster_event(context, event) for event in events], _LEVEL)


def report_batch(
    instance: dg.DagsterInstance, run_id: str, events: Sequence[internal.DagsterEvent], level: int = logging.INFO
) -> None:
    """Report events of a run as one batch; one by one with a version of Dagster that batches were not tried with."""
    batch = internal.generate_event_batch_id() if is_checked() else None
    for place, event in enumerate(events, 1):
        if batch is None:
            instance.report_dagster_event(event, run_id, level)
        else:
            ends = internal.DagsterEventBatchMetadata(batch, is_end=place == len(events))
            instance.report_dagster_event(event, run_id, level, batch_metadata=ends)


def _store_one_by_one(context: dg.OpExecutionContext, events: Sequence[Event]) -> None:
    for event in events:
        context.log_event(event)
        for _ in context.consume_events():
            pass  # it is stored by now; the context would keep it in memory until the step ends (4 kB each)


def _entry(context: dg.OpExecutionContext, event: Event, timestamp: float) -> EventLogEntry:
    """What `report_dagster_event` stores."""
    told = _dagster_event(context, event)
    return EventLogEntry(
        error_info=None,
        level=_LEVEL,
        user_message="",
        run_id=context.run_id,
        timestamp=timestamp,
        step_key=told.step_key,
        job_name=told.job_name,
        dagster_event=told,
    )


def _dagster_event(context: dg.OpExecutionContext, event: Event) -> internal.DagsterEvent:
    step = context.get_step_execution_context()
    if isinstance(event, dg.AssetMaterialization):
        data = internal.StepMaterializationData(event)
        message = event.description or f"Materialized value {event.label}."
    else:
        data, message = internal.AssetObservationData(event), None
    return internal.DagsterEvent(
        event_type_value=kind_of(event).value,
        job_name=step.job_name,
        step_handle=step.step.handle,
        node_handle=step.step.node_handle,
        step_kind_value=step.step.kind.value,
        logging_tags=step.event_tags,
        event_specific_data=data,
        message=message,
        pid=os.getpid(),
    )
