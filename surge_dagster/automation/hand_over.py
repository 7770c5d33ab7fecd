"""The sensor `hand_over_changes`: derived spaces and tables follow the embeddings that runs have
changed.

A table that follows a derived space is brought up to date again when that has changed. A derived
space that cannot be brought up to date keeps back no table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import dagster as dg

from surge_dagster.config.settings import Settings
from surge_dagster.engine.output.current_space import space_of_readers
from surge_dagster.orchestration.launch import RUN_TAGS, config_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.runs import active_runs, embeds, request_for

_SENSOR_SECONDS = 60
_MATERIALIZATION = dg.DagsterEventType.ASSET_MATERIALIZATION
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

        for run in active_runs(instance):
            if run.job_name in job_names or embeds(names, instance, run):
                return dg.SkipReason(f"waiting for run {run.run_id}, which embeds or hands over")

        requests: list[dg.RunRequest] = []
        reasons: list[str] = []
        for job_name in job_names:
            found = _request(names, settings, context, job_name)
            if isinstance(found, dg.RunRequest):
                requests.append(found)
            else:
                reasons.append(found.skip_message or "")
        return requests or dg.SkipReason("; ".join(reasons))

    return [sensor]


def _request(
    names: CatalogNames, settings: Settings, context: dg.SensorEvaluationContext, job_name: str
) -> dg.RunRequest | dg.SkipReason:
    """Return a request for a run of a job, unless one has brought everything up to date.

    What it would bring up to date is named by the newest event of the assets that it follows, and
    for tables by the space that readers use.
    """
    is_of_tables = job_name == names.hand_over_job
    labels = [each.label for each in settings.derived]
    follows = [names.embeddings]
    if is_of_tables:
        follows += map(names.derived, labels)
    ids: list[int] = []
    for asset in follows:
        # An event without a partition, at the end of a run, changes nothing.
        newest = context.instance.get_latest_storage_id_by_partition(asset, _MATERIALIZATION)
        ids += newest.values()
    if not ids:
        return dg.SkipReason("nothing is embedded")

    wanted = labels
    options = {"delete_removed": settings.removed_partitions == "delete"}
    config = config_of(names.derive_all_op, options)
    if is_of_tables:
        space = space_of_readers(names.resources(context).output.open())
        tables = [settings.lancedb, settings.pgvector, settings.qdrant]
        wanted = [space.name, *(table.target().place for table in tables if table is not None)]
        config = {}
    target = f"{max(ids)} {hashlib.sha256(repr(wanted).encode()).hexdigest()[:12]}"
    done = f"{job_name}: no embeddings have changed since it succeeded"
    return request_for(context.instance, job_name, target, done, config)
