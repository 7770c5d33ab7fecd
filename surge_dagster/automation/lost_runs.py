"""The sensor `lost_runs`: declares runs failed whose heartbeat stands still.

A killed run keeps its slot of the pool until Dagster records its end, so this sensor is on from the
start. It looks at all runs of the instance, so all catalogs of a code location share it.
"""

from __future__ import annotations

from typing import Any

import dagster as dg

from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration import requests
from surge_dagster.orchestration.active_runs import active_runs
from surge_dagster.orchestration.heartbeats import declare_silent_runs
from surge_dagster.orchestration.names import LOST_RUNS

_SENSOR_SECONDS = 15  # a tick without an active run costs two short queries


class _SharedSensor(dg.SensorDefinition):
    """A sensor that stays the same object in a project of components.

    Dagster gives what each component defines the metadata of its file, on copies, and refuses two
    of one name.
    """

    def with_attributes(self, *, jobs: Any = None, metadata: Any = None) -> dg.SensorDefinition:
        return self


def _declare_lost(context: dg.SensorEvaluationContext) -> dg.SkipReason:
    """Declare lost runs failed, so that Dagster launches them again."""
    active = list(active_runs(context.instance, lambda run: True))
    now = requests.now().timestamp()
    context.update_cursor(declare_silent_runs(context.instance, active, context.cursor, now))
    return dg.SkipReason(counted(len(active), "active run"))


lost_runs = _SharedSensor(
    name=LOST_RUNS,
    evaluation_fn=_declare_lost,
    default_status=dg.DefaultSensorStatus.RUNNING,
    minimum_interval_seconds=_SENSOR_SECONDS,
    description=(
        "Declares runs failed that have shown no sign of life for a minute: their slot is free, "
        "and they are launched again."
    ),
)
