"""Runs whose process is gone, and who finds them.

A killed run holds its slot of the pool for as long as Dagster believes that it goes on, so that the next one never
begins: whoever finds it must not wait for a run. Dagster's own monitoring sees a run die while the server that launched
it lives; when both went down together, only the process that the run left its name of can tell, or, where that was in
another container, that its signs of life have ended.

It is the one sensor that is always on, from the first minute of an instance. So the pool's limit is entered here, too.
"""

from __future__ import annotations

import dagster as dg

from surge_dagster.orchestration.heartbeats import LOOK_SECONDS, look_for_lost_runs
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.pool_limit import enter_pool


def lost_runs(names: CatalogNames) -> dg.SensorDefinition:
    """The sensor that is on without being asked: it declares lost runs failed, which lets Dagster launch them again."""

    @dg.sensor(
        name=names.lost_runs_sensor,
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=LOOK_SECONDS,
        description="Declares runs failed whose process is gone: their slot is free then, and they are launched again.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        enter_pool(context.instance)
        going_on, cursor = look_for_lost_runs(context.instance, context.cursor)
        return dg.SensorResult(skip_reason=f"{going_on:,} runs are waiting or going on", cursor=cursor)

    return sensor
