"""The sensor `hand_over_changes`: derived spaces and tables follow the embeddings that runs have
changed.

A table that follows a derived space is brought up to date again when that has changed. A derived
space that cannot be brought up to date keeps back no table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg

from surge_dagster.config.settings import Settings
from surge_dagster.engine.output.current_space import space_of_readers
from surge_dagster.orchestration.active_runs import active_runs, embeds
from surge_dagster.orchestration.launch import RUN_TAGS, config_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.requests import has_succeeded, request_for

_SENSOR_SECONDS = 60
Job = Any  # a `dg.JobDefinition`, or what `dg.define_asset_job` makes


def hand_over_job(names: CatalogNames, tables: Sequence[dg.AssetsDefinition]) -> list[Job]:
    """Return the job that brings tables up to date, if there is a table."""
    job = dg.define_asset_job(
        names.hand_over_job,
        selection=dg.AssetSelection.assets(*tables),
        executor_def=dg.in_process_executor,
        run_tags=RUN_TAGS,
        description="Brings the tables that follow the embeddings up to date.",
    )
    return [job] if tables else []


def hand_over_changes(
    names: CatalogNames, settings: Settings, jobs: Sequence[Job]
) -> list[dg.SensorDefinition]:
    """Return the sensor that launches these jobs when no run embeds any more."""
    if not jobs:
        return []
    job_names = [job.name for job in jobs]
    derived = [names.derived(each.label) for each in settings.derived]
    deletes = settings.removed_partitions == "delete"
    configs = {names.derive_job: config_of(names.derive_all_op, {"delete_removed": deletes})}

    @dg.sensor(
        name=names.hand_over_sensor,
        jobs=jobs,
        minimum_interval_seconds=_SENSOR_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        required_resource_keys=names.resource_keys,
        description=(
            f"Launches {' and '.join(job_names)} when runs have changed embeddings, or readers "
            "use another space, and no run is active."
        ),
    )
    def sensor(context: dg.SensorEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        instance = context.instance

        def is_concerned(run: dg.DagsterRun) -> bool:
            return run.job_name in job_names or embeds(names, instance, run)

        run = next(active_runs(instance, is_concerned), None)
        if run is not None:
            return dg.SkipReason(f"waiting for run {run.run_id}, which embeds or hands over")

        requests: list[dg.RunRequest] = []
        reasons: list[str] = []
        for job_name in job_names:
            target = _target(names, context, job_name, derived)
            if target is None:
                return dg.SkipReason("nothing is embedded")
            if has_succeeded(instance, job_name, target):
                reasons.append(f"{job_name}: no embeddings have changed since it succeeded")
                continue
            requested = request_for(instance, job_name, target, configs.get(job_name))
            if isinstance(requested, dg.RunRequest):
                requests.append(requested)
            else:
                reasons.append(f"{job_name}: {requested.skip_message}")
        return requests or dg.SkipReason("; ".join(reasons))

    return [sensor]


def _target(
    names: CatalogNames,
    context: dg.SensorEvaluationContext,
    job_name: str,
    derived: Sequence[dg.AssetKey],
) -> str | None:
    """Return what a run of a job would bring other files up to date with: the newest event of the
    assets that the job follows, and for tables the space that readers use. None if nothing is
    embedded."""
    newest = _newest_event(context.instance, [names.embeddings])
    if newest is None or job_name == names.derive_job:
        return newest
    newest = _newest_event(context.instance, [names.embeddings, *derived])
    return f"{newest} {space_of_readers(names.resources(context).output.open()).name}"


def _newest_event(instance: dg.DagsterInstance, assets: Sequence[dg.AssetKey]) -> str | None:
    """Return the id of the newest event of these assets; None if they have none."""
    events = [instance.fetch_materializations(asset, limit=1).records for asset in assets]
    ids = [records[0].storage_id for records in events if records]
    return str(max(ids)) if ids else None
