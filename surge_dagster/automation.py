"""What starts runs besides the sensor: schedules, and the jobs that sensor and schedules launch."""

from __future__ import annotations

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.outputs import known_space
from surge_dagster.assets.refresh_shards import refresh_requests
from surge_dagster.engine.errors import SurgeError
from surge_dagster.sensor import sharding_of
from surge_dagster.settings import Settings


def embed_partitions(names: CatalogNames) -> UnresolvedAssetJobDefinition:
    """The job that the sensor launches."""
    return dg.define_asset_job(
        names.embed_job,
        selection=[names.embeddings],
        executor_def=dg.in_process_executor,
        description="Partitions that the sensor found, named in the run's config.",
    )


def catalog_check(names: CatalogNames, checks: dg.AssetChecksDefinition) -> UnresolvedAssetJobDefinition:
    """The job that evaluates the catalog's checks."""
    return dg.define_asset_job(
        names.check_job,
        selection=dg.AssetSelection.checks(checks),
        executor_def=dg.in_process_executor,
        description="Reads the whole catalog and the whole output and compares them.",
    )


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
    def schedule(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        resources = names.resources(context.resources)
        try:
            store = resources.output.open()
            space = known_space(names, store, resources.encoder.spec(), unattended=True)
            sharding = sharding_of(settings)
            catalog = resources.catalog.open() if sharding.shards > 1 else ()
            return refresh_requests(names, context.instance, store, space, sharding, catalog)
        except SurgeError as error:
            return dg.SkipReason(str(error))

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
