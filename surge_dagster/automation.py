"""What starts runs: a sensor for what is new, a schedule for what has changed, and the jobs that they launch.

The sensor is written by hand. Dagster's declarative conditions take seconds per tick at tens of thousands of partitions
and do not see what a run is working on already; this one costs two listings and a few queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from surge_dagster.assets.discovery import Look, read_cursor, write_cursor
from surge_dagster.assets.launch import active_runs, held_keys, name_keys
from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.outputs import known_space
from surge_dagster.assets.source_partitions import in_chunks
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import SurgeError
from surge_dagster.settings import Settings

_SENSOR_SECONDS = 30


def catalog_check(names: CatalogNames, checks: dg.AssetChecksDefinition) -> UnresolvedAssetJobDefinition:
    """The job that evaluates the catalog's checks."""
    return dg.define_asset_job(
        names.check_job,
        selection=dg.AssetSelection.checks(checks),
        executor_def=dg.in_process_executor,
        description="Reads the whole catalog and the whole output and compares them.",
    )


def new_partitions(names: CatalogNames, settings: Settings, job: dg.JobDefinition) -> dg.SensorDefinition:
    """The sensor that embeds what is new, and what has changed if the settings say so."""

    @dg.sensor(
        name=names.sensor,
        job=job,
        minimum_interval_seconds=_SENSOR_SECONDS,
        description="Registers new partitions, observes changed ones, adopts files it finds, embeds what is missing.",
        required_resource_keys=names.resource_keys,
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        instance, resources = context.instance, names.resources(context.resources)
        try:
            look = Look(
                names,
                instance,
                resources.output.open(),
                resources.encoder.spec(),
                refresh_stale=settings.refresh_stale,
                limit=settings.max_partitions_per_run,
            )
            found = look.discover(resources.catalog.open(), _held(names, instance), read_cursor(context.cursor))
        except SurgeError as error:
            return dg.SkipReason(str(error))
        requests = []
        if found.chosen:
            config = name_keys(instance, found.chosen)
            tags = {
                "dagster/asset_partition_range_start": found.chosen[0],
                "dagster/asset_partition_range_end": found.chosen[-1],
            }
            run_config = _run_config(names.embeddings_op, found.space, config)
            requests.append(dg.RunRequest(run_config=run_config, tags=tags))
        return dg.SensorResult(
            run_requests=requests,
            skip_reason=None if requests else found.summary,
            cursor=write_cursor(found.asked),
            dynamic_partitions_requests=[names.partitions.build_add_request(keys) for keys in in_chunks(found.new)],
            asset_events=found.events,
        )

    return sensor


def nightly_refresh(names: CatalogNames, settings: Settings, job: dg.JobDefinition) -> dg.ScheduleDefinition:
    """The schedule that brings everything up to date, changed partitions included."""

    @dg.schedule(
        name=names.schedule,
        job=job,
        cron_schedule=settings.nightly_cron,
        execution_timezone=settings.timezone,
        description="Everything that is missing or stale, once a night; never begins another vector space by itself.",
        required_resource_keys=names.resource_keys,
    )
    def schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        resources = names.resources(context.resources)
        try:
            space = known_space(names, resources.output.open(), resources.encoder.spec(), unattended=True)
        except SurgeError as error:
            return dg.SkipReason(str(error))
        return dg.RunRequest(run_config=_run_config(names.refresh_op, space, {}))

    return schedule


def scheduled_check(
    names: CatalogNames, settings: Settings, job: UnresolvedAssetJobDefinition
) -> list[dg.ScheduleDefinition]:
    """The schedule that compares the catalog with the output, where the settings ask for one."""
    if settings.check_cron is None:
        return []
    return [
        dg.ScheduleDefinition(
            name=names.check_schedule,
            job=job,
            cron_schedule=settings.check_cron,
            execution_timezone=settings.timezone,
            description="Reads the whole catalog and the whole output and compares them.",
        )
    ]


def _run_config(op_name: str, space: Space | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Config of an unattended run: it may fill the space that is there, or begin the first one of an empty output."""
    expected = {"expected_space": space.name} if space else {}
    return {"ops": {op_name: {"config": {"unattended": True, **expected, **options}}}}


def _held(names: CatalogNames, instance: dg.DagsterInstance) -> set[str] | None:
    """Partition keys that active runs may touch, None for all."""

    def embeds(run: dg.DagsterRun) -> bool:
        return run.job_name in (names.refresh_job, names.embed_job) or names.embeddings in (run.asset_selection or ())

    registered = dict.fromkeys(instance.get_dynamic_partitions(names.partitions_name))
    held: set[str] = set()
    for run in list(active_runs(instance, embeds)):
        keys = held_keys(run, registered, (names.embeddings_op, names.refresh_op))
        if keys is None:
            return None
        held |= keys
    return held
