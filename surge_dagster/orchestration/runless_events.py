"""Events that no run logs, stored many at a time.

Dagster's daemon stores the events that a sensor gives it one by one, which takes 10 to 100 ms each, and does nothing
else meanwhile. So a sensor stores them itself, as rows, where the daemon evaluates it; who only tries a sensor out in
the UI is shown them. Where rows cannot be written, the daemon gets the events as ever. A tick that is lost after it has
stored its events finds them on record the next time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import dagster as dg
from dagster._core import events as internal
from dagster._core.events.log import EventLogEntry
from dagster._core.instance.utils import RUNLESS_JOB_NAME, RUNLESS_RUN_ID
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage

from surge_dagster.orchestration.event_batches import is_checked
from surge_dagster.orchestration.partition_events import AnyEvent, Event
from surge_dagster.orchestration.row_store import RowStore, row_writer
from surge_dagster.orchestration.storage_ids import kind_of


def is_real_tick(context: dg.SensorEvaluationContext) -> bool:
    """Whether Dagster's daemon evaluates the sensor, which names its tick by number, and not somebody who tries it."""
    key = context.log_key
    return bool(key) and key[-1].isdigit()


def store_runless(instance: dg.DagsterInstance, events: Sequence[AnyEvent]) -> bool:
    """Store events all at once; whether they were: if not, none of them is stored."""
    storage = instance.event_log_storage
    writer = row_writer(instance, RUNLESS_RUN_ID) if is_checked() else None
    if writer is None or not isinstance(storage, SqlEventLogStorage):
        return False
    with writer as write:
        return RowStore(storage, write, _entry).store(events) is not None


def _entry(event: Event, timestamp: float) -> EventLogEntry:
    """What `report_runless_asset_event` stores."""
    is_made = isinstance(event, dg.AssetMaterialization)
    data = internal.StepMaterializationData(event) if is_made else internal.AssetObservationData(event)
    return EventLogEntry(
        error_info=None,
        level=logging.INFO,
        user_message="",
        run_id=RUNLESS_RUN_ID,
        timestamp=timestamp,
        job_name=RUNLESS_JOB_NAME,
        dagster_event=internal.DagsterEvent(
            event_type_value=kind_of(event).value, event_specific_data=data, job_name=RUNLESS_JOB_NAME
        ),
    )
