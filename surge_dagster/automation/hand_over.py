"""The sensor `hand_over_changes`: derived spaces and tables follow the embeddings that runs have
changed.

Derived spaces come before tables, because a table may follow one. One that cannot be brought up to
date keeps back no table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg

from surge_dagster.config.settings import Settings
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
    follows = {
        names.derive_job: [names.embeddings],
        names.hand_over_job: [names.embeddings, *derived],
    }
    deletes = settings.removed_partitions == "delete"
    configs = {names.derive_job: config_of(names.derive_all_op, {"delete_removed": deletes})}

    @dg.sensor(
        name=names.hand_over_sensor,
        jobs=jobs,
        minimum_interval_seconds=_SENSOR_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            f"Launches {' and '.join(job_names)} when runs have changed embeddings and none is "
            "active."
        ),
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        instance = context.instance

        def is_concerned(run: dg.DagsterRun) -> bool:
            return run.job_name in job_names or embeds(names, instance, run)

        run = next(active_runs(instance, is_concerned), None)
        if run is not None:
            return dg.SkipReason(f"waiting for run {run.run_id}, which embeds or hands over")

        reasons: list[str] = []
        # The one whose turn is longer ago: embeddings that change all the time keep no job back.
        for job_name in sorted(job_names, key=lambda name: _last_time(instance, name)):
            newest = _newest_event(instance, follows[job_name])
            if newest is None:
                return dg.SkipReason("nothing is embedded")
            if has_succeeded(instance, job_name, newest):
                reasons.append(f"{job_name}: no embeddings have changed since it succeeded")
                continue
            requested = request_for(instance, job_name, newest, configs.get(job_name))
            if isinstance(requested, dg.RunRequest):
                return requested
            reasons.append(f"{job_name}: {requested.skip_message}")
        return dg.SkipReason("; ".join(reasons))

    return [sensor]


def _newest_event(instance: dg.DagsterInstance, assets: Sequence[dg.AssetKey]) -> str | None:
    """Return the id of the newest event of these assets; None if the first one has none."""
    events = [instance.fetch_materializations(asset, limit=1).records for asset in assets]
    if not events[0]:
        return None
    return str(max(records[0].storage_id for records in events if records))


def _last_time(instance: dg.DagsterInstance, job_name: str) -> float:
    """Return when the newest run of a job was created, in seconds; 0 if there was none."""
    records = instance.get_run_records(dg.RunsFilter(job_name=job_name), limit=1)
    return records[0].create_timestamp.timestamp() if records else 0.0
