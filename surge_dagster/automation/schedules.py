"""The schedules: the nightly refresh, and the weekly check of the whole catalog.

No schedule begins a second vector space: the config of its runs makes them unattended.
After an error the nightly tick requests the run all the same, which tries again and whose failure
is alerted. A schedule is on from the start if the settings contain its cron; the check of the
catalog also if they contain that of the nightly refresh.
"""

from __future__ import annotations

import dagster as dg

from surge_dagster.config.settings import NO_CRON, Settings
from surge_dagster.orchestration.active_runs import held_by_active_runs
from surge_dagster.orchestration.divided import refresh_requests
from surge_dagster.orchestration.names import CatalogNames


def nightly_refresh(
    names: CatalogNames, settings: Settings, job: dg.JobDefinition
) -> dg.ScheduleDefinition:
    """Return the schedule of the nightly refresh, which embeds missing and stale partitions."""

    @dg.schedule(
        name=names.schedule,
        job=job,
        cron_schedule=settings.nightly_cron,
        execution_timezone=settings.timezone,
        description=(
            "Embeds every partition that is missing or stale, once a day; never begins another "
            "vector space."
        ),
        default_status=_on_if_set(settings, "nightly_cron"),
        required_resource_keys=names.resource_keys,
    )
    def schedule(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        resources = names.resources(context)
        held = held_by_active_runs(names, context.instance)
        requests = refresh_requests(names, context.instance, resources, settings, held)
        return requests or dg.SkipReason(f"Every partition to embed is held by {held.by}.")

    return schedule


def scheduled_check(names: CatalogNames, settings: Settings) -> list[dg.ScheduleDefinition]:
    """Return the schedule of the catalog check; none if `check_cron` is "none"."""
    if settings.check_cron == NO_CRON:
        return []

    schedule = dg.ScheduleDefinition(
        name=names.check_schedule,
        job_name=names.check_job,
        cron_schedule=settings.check_cron,
        execution_timezone=settings.timezone,
        description="Compares the whole catalog with the whole output.",
        default_status=_on_if_set(settings, "nightly_cron", "check_cron"),
    )
    return [schedule]


def _on_if_set(settings: Settings, *names: str) -> dg.DefaultScheduleStatus:
    """Return "running" if the settings contain one of these names, else "stopped"."""
    if settings.model_fields_set.intersection(names):
        return dg.DefaultScheduleStatus.RUNNING
    return dg.DefaultScheduleStatus.STOPPED
