"""The sensor `hand_over_changes`: hands changed embeddings over to the tables that follow them."""

from __future__ import annotations

from typing import Any

import dagster as dg

from surge_dagster.orchestration.active_runs import active_runs, embeds
from surge_dagster.orchestration.launch import RUN_TAGS
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.requests import has_succeeded, request_for

_SENSOR_SECONDS = 60


def hand_over_changes(names: CatalogNames, assets: list[dg.AssetKey]) -> tuple[dg.SensorDefinition, Any]:
    """The sensor, and the job of the tables' assets that it launches once no run embeds any more."""
    job = dg.define_asset_job(
        names.hand_over_job,
        selection=dg.AssetSelection.assets(*assets),
        executor_def=dg.in_process_executor,
        run_tags=RUN_TAGS,
        description="Brings the tables that follow the embeddings up to date.",
    )

    @dg.sensor(
        name=names.hand_over_sensor,
        job=job,
        minimum_interval_seconds=_SENSOR_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Launches {names.hand_over_job} when runs have changed embeddings and none is active any more.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        instance = context.instance
        concerned = lambda run: run.job_name == names.hand_over_job or embeds(names, instance, run)  # noqa: E731
        if run := next(active_runs(instance, concerned), None):
            return dg.SkipReason(f"waiting for run {run.run_id}, which embeds or hands over")
        records = instance.fetch_materializations(names.embeddings, limit=1).records
        if not records:
            return dg.SkipReason("nothing is embedded")
        newest = str(records[0].storage_id)
        if has_succeeded(instance, names.hand_over_job, newest):
            return dg.SkipReason("no embeddings have changed since the last hand-over")
        return request_for(instance, names.hand_over_job, newest)

    return sensor, job
