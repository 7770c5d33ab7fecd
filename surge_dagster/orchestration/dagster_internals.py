"""Everything that the project uses of Dagster's private modules, except for the SQLite storage in
`event_storage.py`.

Tried with dagster 1.13.20, 1.13.27 and 1.13.29. Public calls store events one by one, which takes
10 to 25 ms each.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from uuid import uuid4

import dagster as dg
from dagster._core import events as internal
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData as Target,
)
from dagster._core.definitions.selector import InstigatorSelector
from dagster._core.scheduler.instigation import InstigatorTick, TickStatus
from dagster._utils.schedules import cron_string_iterator, is_valid_cron_schedule

# Dagster ignores the marks of a batch unless this variable is above 0; an operator can set it to 0.
_BATCH_SIZE = "DAGSTER_EVENT_BATCH_SIZE"
# Over a year has both changes of the clock, and every weekend and month.
_HOUR = timedelta(hours=1)
_YEAR = timedelta(days=370)
_TICKS = 9_000  # an hourly schedule has fewer in that time; 30 µs each
_NO_RUN = ""  # Dagster's run id and job name of events that belong to no run
# the time of each asset's last event of this process, in seconds since 1970
_latest: dict[dg.AssetKey, float] = {}


@dataclass(frozen=True, slots=True)
class Planned:
    """The event that announces that a run is to materialize a partition."""

    asset_key: dg.AssetKey
    partition: str


Event = dg.AssetMaterialization | dg.AssetObservation | Planned


def store_batch(
    instance: dg.DagsterInstance,
    context: dg.OpExecutionContext | None,
    events: Sequence[Event],
    batch_events: int,
) -> None:
    """Store events of one kind and one asset in batches, past the run's loggers: a line costs as
    much as an event."""
    os.environ.setdefault(_BATCH_SIZE, str(batch_events))
    batch = uuid4().hex
    asset_key = events[0].asset_key
    run_id, level = (_NO_RUN, logging.INFO) if context is None else (context.run_id, logging.DEBUG)
    dagster_events = [_dagster_event(context, event) for event in events]
    for number, event in enumerate(dagster_events, 1):
        mark = internal.DagsterEventBatchMetadata(batch, is_end=number == len(dagster_events))
        # Of several events of an asset in one millisecond, Dagster's page of events shows one.
        at = max(time.time(), _latest.get(asset_key, 0.0) + 0.001)
        _latest[asset_key] = at
        instance.report_dagster_event(event, run_id, level, batch_metadata=mark, timestamp=at)


def last_tick(context: dg.SensorEvaluationContext, name: str) -> InstigatorTick | None:
    """Return the last tick that has ended of a sensor or schedule in the code location of another
    sensor; None before one."""
    location = context.code_location_origin
    if location is None or context.repository_name is None:
        return None
    own = InstigatorSelector(
        location_name=location.location_name, repository_name=context.repository_name, name=name
    ).get_id()
    ended = [TickStatus.SUCCESS, TickStatus.SKIPPED, TickStatus.FAILURE]
    return next(iter(context.instance.get_ticks("", own, limit=1, statuses=ended)), None)


def longest_wait(cron: str, timezone: str) -> timedelta | None:
    """Return the longest time between two ticks of a schedule in over a year, at least an hour.

    Of one that ticks more often than hourly only the first ticks count, of which there are enough
    for its nights and weekends. None if the cron is not valid, which the schedule reports.
    """
    if not is_valid_cron_schedule(cron):
        return None
    start = datetime(2026, 1, 1, tzinfo=UTC)
    end = (start + _YEAR).timestamp()
    times: list[float] = []
    for tick in islice(cron_string_iterator(start.timestamp(), cron, timezone), _TICKS):
        times.append(tick.timestamp())
        if len(times) > 1 and times[-1] > end:
            break
    longest = max(later - earlier for earlier, later in pairwise(times))
    return max(_HOUR, timedelta(seconds=longest))


def latest_target(instance: dg.DagsterInstance, asset_key: dg.AssetKey) -> Target | None:
    """Return what marks a check's result as one of the last materialization: SQLite's times have no
    fractions of a second."""
    records = instance.fetch_materializations(asset_key, limit=1).records
    if not records:
        return None
    return Target(
        storage_id=records[0].storage_id, run_id=records[0].run_id, timestamp=records[0].timestamp
    )


def _dagster_event(context: dg.OpExecutionContext | None, event: Event) -> dg.DagsterEvent:
    """Return what `context.log_event`, or without a run `instance.report_runless_asset_event`,
    stores of an event."""
    message = None
    match event:
        case dg.AssetMaterialization():
            kind = dg.DagsterEventType.ASSET_MATERIALIZATION
            data = internal.StepMaterializationData(event)
            message = event.description or f"Materialized value {event.label}."
        case dg.AssetObservation():
            kind = dg.DagsterEventType.ASSET_OBSERVATION
            data = internal.AssetObservationData(event)
        case Planned():
            assert context is not None, "only a run plans partitions"
            data = internal.AssetMaterializationPlannedData(
                event.asset_key, partition=event.partition
            )
            node = str(context.op_handle)
            return dg.DagsterEvent.build_asset_materialization_planned_event(
                context.job_name, node, data
            )
    if context is None:
        return dg.DagsterEvent(kind.value, _NO_RUN, event_specific_data=data)
    step = context.get_step_execution_context()
    return dg.DagsterEvent(
        kind.value,
        job_name=step.job_name,
        step_handle=step.step.handle,
        node_handle=step.step.node_handle,
        step_kind_value=step.step.kind.value,
        logging_tags=step.event_tags,
        event_specific_data=data,
        message=message,
        pid=os.getpid(),
    )
