"""The sensor `lost_runs`: declares runs failed whose heartbeat stands still.

A killed run keeps its slot of the pool until Dagster records its end, so this sensor is on from the
start.
"""

from __future__ import annotations

import dagster as dg

from surge_dagster.config.settings import Settings
from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration import runs
from surge_dagster.orchestration.heartbeats import HEARTBEAT_TAG, declare_silent_runs
from surge_dagster.orchestration.names import CatalogNames

_SENSOR_SECONDS = 15  # a tick without an active run costs two short queries


def lost_runs(names: CatalogNames, settings: Settings) -> dg.SensorDefinition:
    """Return the sensor that declares lost runs failed, so that Dagster launches them again."""
    assets = names.assets(each.label for each in settings.derived)

    @dg.sensor(
        name=names.lost_runs,
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=_SENSOR_SECONDS,
        description=(
            "Declares runs failed that have shown no sign of life for a minute: their slot is "
            "free, and they are launched again."
        ),
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        instance = context.instance
        ours: list[dg.DagsterRun] = []
        for run in runs.active_runs(instance):
            if HEARTBEAT_TAG in run.tags and runs.concerns(instance, run, names.jobs, assets):
                ours.append(run)
        now = runs.now().timestamp()
        context.update_cursor(declare_silent_runs(instance, ours, context.cursor, now))
        return dg.SkipReason(counted(len(ours), "active run"))

    return sensor
