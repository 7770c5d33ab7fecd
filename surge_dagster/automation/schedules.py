"""What is launched by the clock: everything that needs it each night, and beside that what the settings ask for.

No schedule begins a vector space where there are others: each names the space it was meant for in the run's config. One
that the settings mean and the output does not have is left to a person, in the tick; whatever else is in the way of a
night is left to its run, which tries again, and whose failure somebody is told of.
One whose time is set is on from the start; the nightly one has a time of its own too, and is off where nobody chose it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from surge_dagster.orchestration.active_runs import active_runs, held_by_active_runs
from surge_dagster.orchestration.expected_settings import with_settings
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outputs import SpaceNotBegun
from surge_dagster.orchestration.refresh_shards import refresh_requests
from surge_dagster.settings import Settings


def nightly_refresh(names: CatalogNames, settings: Settings, job: dg.JobDefinition) -> dg.ScheduleDefinition:
    """The schedule that brings everything up to date, changed partitions included."""
    return _refresh(
        names,
        settings,
        job,
        name=names.schedule,
        cron=settings.nightly_cron,
        description="Everything that is missing or stale, once a night; never begins another vector space by itself.",
        options={},
        on="nightly_cron" in settings.model_fields_set,
    )


def forced_refresh(names: CatalogNames, settings: Settings, job: dg.JobDefinition) -> list[dg.ScheduleDefinition]:
    """The schedule that encodes everything again into the space that is there, where the settings ask for one."""
    if settings.forced_cron is None:
        return []
    return [
        _refresh(
            names,
            settings,
            job,
            name=names.forced_schedule,
            cron=settings.forced_cron,
            description="Everything is encoded again, fresh or not; never begins another vector space by itself.",
            options={"force": True},
            on=True,
        )
    ]


def scheduled_check(
    names: CatalogNames, settings: Settings, job: UnresolvedAssetJobDefinition
) -> list[dg.ScheduleDefinition]:
    """The schedule that compares the catalog with the output, where the settings ask for one."""
    if settings.check_cron is None:
        return []

    @dg.schedule(
        name=names.check_schedule,
        job=job,
        cron_schedule=settings.check_cron,
        execution_timezone=settings.timezone,
        description="Reads the whole catalog and the whole output and compares them.",
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )
    def schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        going_on = [run.run_id for run in active_runs(context.instance, lambda run: run.job_name == names.check_job)]
        if going_on:  # no pool makes them wait for each other
            return dg.SkipReason(f"a check is waiting or going on already: run {', '.join(going_on)}")
        return dg.RunRequest()

    return [schedule]


def _refresh(
    names: CatalogNames,
    settings: Settings,
    job: dg.JobDefinition,
    *,
    name: str,
    cron: str,
    description: str,
    options: Mapping[str, Any],
    on: bool,
) -> dg.ScheduleDefinition:
    """A schedule of the job that refreshes the catalog.

    Args:
        options: of its op's config.
        on: whether it is on from the start.
    """

    @dg.schedule(
        name=name,
        job=job,
        cron_schedule=cron,
        execution_timezone=settings.timezone,
        description=description,
        default_status=dg.DefaultScheduleStatus.RUNNING if on else dg.DefaultScheduleStatus.STOPPED,
        required_resource_keys=names.resource_keys,
    )
    def schedule(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        resources = names.resources(context.resources)
        # There is no other tick before tomorrow's. So nothing is left to a run that may pass it over, which one that
        # selects a state does, and one without force with what is fresh; the pool makes runs wait.
        held = held_by_active_runs(names, context.instance, entirely=True, forced=bool(options.get("force")))
        try:
            requests = refresh_requests(names, context.instance, resources, settings.sharding(), options, held)
        except SpaceNotBegun as refused:
            return dg.SkipReason(str(refused))
        return with_settings(requests, resources.catalog, resources.encoder) or dg.SkipReason(
            f"Whatever there is to do is held by {held.by}."
        )

    return schedule
