"""The sensor `lost_runs`: declares runs failed whose process has ended.

A killed run keeps its slot of the pool until Dagster knows that it ended, so this sensor is on from the start.
"""

from __future__ import annotations

import dagster as dg

from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration.active_runs import active_runs
from surge_dagster.orchestration.launch import record_pool_limit
from surge_dagster.orchestration.names import CatalogNames

_SENSOR_SECONDS = 5  # a tick without an active run costs two short queries


def lost_runs(names: CatalogNames) -> dg.SensorDefinition:
    """The sensor that declares lost runs failed, so that Dagster launches them again."""

    @dg.sensor(
        name=names.lost_runs_sensor,
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=_SENSOR_SECONDS,
        description="Declares runs failed whose process has ended: their slot is free, and they are launched again.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        record_pool_limit(context.instance)
        active = sum(1 for _ in active_runs(context.instance, lambda run: True))
        return dg.SkipReason(counted(active, "active run"))

    return sensor
