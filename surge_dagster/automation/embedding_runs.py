"""What requests runs that embed: the sensor `new_partitions`, which also registers and reports
partitions, and the schedule of the nightly refresh. Next to them stands the schedule of the weekly
check of the whole catalog.

The sensor is written by hand: Dagster's declarative conditions take seconds per tick at tens of
thousands of partitions and do not consider which partitions an active run holds. A tick costs two
listings and a few bulk queries.

A partition is requested when it has no fresh file, no active run holds it, its content was not
refused as it is, and it does not wait after a failure. One that fails waits 1, 2, 4 … minutes, at
most a day, whether its source changes or not. A refused one is requested when its source changes,
and those of a canceled run when their source or a setting does.

A tick of the sensor fails when the source or the output does not answer, or a setting means no
space of this output. After such an error the nightly tick requests the run all the same, which
tries again and whose failure is alerted.

If the setting `max_runs` allows more than one run, the work is cut into pieces of equal weight, and
Dagster's queue starts them as its pool has room. Equal pieces wait for the slowest machine: a
cluster divides work among unequal machines.

No schedule begins a second vector space: the config of its runs makes them unattended. A schedule
is on from the start if the settings contain its cron; the check of the catalog also if they contain
that of the nightly refresh.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import dagster as dg

from surge_dagster.config.settings import Settings
from surge_dagster.engine.errors import Cancelled, SurgeError
from surge_dagster.engine.plan.dividing import cut
from surge_dagster.engine.support.collector import without_collector
from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration.discovery import (
    Listing,
    list_catalog,
    removed_keys,
    report_changes,
    states_of_unfinished,
)
from surge_dagster.orchestration.failures import refusal_fingerprint, still_refused
from surge_dagster.orchestration.launch import config_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.records import failed_on_record
from surge_dagster.orchestration.runs import (
    Held,
    Undone,
    find_undone,
    held_by_active_runs,
    request_for,
    request_tags,
)
from surge_dagster.orchestration.spaces import asset_of, known_space, require_first_space
from surge_dagster.resources.upstream_asset import NotListed

_SENSOR_SECONDS = 30
LEAST_BYTES = 16 << 20  # of text, which is worth the start of another encoder
# Dagster kills a tick after a minute, without a run or an alert.
_LOOK_SECONDS = 40.0
_KEYS_PER_RUN = 10_000  # they are in the run's config
_STATES = {
    "unread": "with a file that cannot be read now",
    "foreign": "whose place is taken by a file of another space",
    "unknown": "whose file is not on record",
    "missing": "missing",
    "stale": "stale",
    "retry": "with rows that the nightly run tries again",
}


def new_partitions(
    names: CatalogNames, settings: Settings, job: dg.JobDefinition
) -> dg.SensorDefinition:
    """Return the sensor that embeds new partitions, and with `refresh_stale` changed ones."""

    @dg.sensor(
        name=names.sensor,
        job_name=job.name,
        minimum_interval_seconds=_SENSOR_SECONDS,
        description=(
            "Registers new partitions, reports changed ones, and requests runs that embed what is "
            "missing."
        ),
        required_resource_keys=names.resource_keys,
    )
    def sensor(
        context: dg.SensorEvaluationContext,
    ) -> list[dg.RunRequest] | dg.RunRequest | dg.SkipReason:
        with without_collector():
            return _look(names, settings, context)

    return sensor


def _look(
    names: CatalogNames, settings: Settings, context: dg.SensorEvaluationContext
) -> list[dg.RunRequest] | dg.RunRequest | dg.SkipReason:
    instance = context.instance
    resources = names.resources(context)
    fingerprint = refusal_fingerprint(resources)
    held = held_by_active_runs(names, instance)  # first: a run may end before the output is listed
    store = resources.output.open()
    space = known_space(resources, store)
    asset = asset_of(names, store, space)
    try:
        listing = list_catalog(names, asset, instance, resources.open_source())
    except NotListed as unlisted:
        return _request_listing(names, settings, context, unlisted, held, fingerprint)

    unreported = report_changes(names, instance, listing)
    if space is None:
        require_first_space(names, resources, store)
    states = states_of_unfinished(listing, store, space)
    refused = still_refused(listing.catalogued, listing.partitions, fingerprint)
    wanted = {"missing", "unknown", "stale"} if settings.refresh_stale else {"missing", "unknown"}
    needed = {key for key, state in states.items() if state in wanted and key not in refused}
    undone = find_undone(names, instance, needed, listing.catalogued, fingerprint)
    shown: dict[str, str] = {}
    for key, state in states.items():
        shown[key] = _state_of(key, state, held, refused, undone.get(key), unreported)
    summary = _message(listing, shown)
    keys = [key for key in states if key in needed and shown[key] == _STATES[states[key]]]
    if not keys:
        return dg.SkipReason(summary)

    context.log.info(summary)
    attempt = 1 + max((undone[key].attempt for key in keys if key in undone), default=0)
    tags = request_tags(names, instance, listing.catalogued, attempt, fingerprint)
    keys = keys[: settings.max_runs * _KEYS_PER_RUN]
    requests = []
    for piece in _cut_keys(listing, keys, settings.max_runs):
        config = config_of(names.embeddings_op, {"keys": piece, "unattended": True})
        requests.append(dg.RunRequest(run_config=config, tags=tags | settings.run_tags))
    return requests


def _request_listing(
    names: CatalogNames,
    settings: Settings,
    context: dg.SensorEvaluationContext,
    unlisted: NotListed,
    held: Held,
    fingerprint: str,
) -> dg.RunRequest | dg.SkipReason:
    """Request one run for each materialization of an asset whose partitions only a run can list."""
    target = f"{unlisted.version} {fingerprint}"
    if held.run_ids:
        return dg.SkipReason(f"{unlisted}; waiting for {held.by}")

    select = "all" if settings.refresh_stale else "missing"
    config = config_of(names.embeddings_op, {"unattended": True, "select": select})
    done = f"a run has embedded the last materialization ({unlisted.version})"
    return request_for(context.instance, names.embed_job, target, done, config, settings.run_tags)


def _message(listing: Listing, shown: Mapping[str, str]) -> str:
    """Return one line with the number of partitions in each state."""
    counts = Counter({"up to date": len(listing.partitions) - len(shown)})
    counts.update(shown.values())
    removed = len(removed_keys(listing))
    if removed:
        counts["removed from the source"] = removed

    parts = [f"{count:,} {state}" for state, count in counts.items()]
    return f"{counted(counts.total(), 'partition')}: {', '.join(parts)}"


def _state_of(
    key: str,
    state: str,
    held: Held,
    refused: Collection[str],
    before: Undone | None,
    unreported: Collection[str],
) -> str:
    """Return the first state that applies; a partition that is due again is missing or stale."""
    if state in ("unread", "foreign"):
        return _STATES[state]
    if key in refused:
        return "refused"
    if key in held:
        return f"held by {held.by}"
    if key in unreported:
        return "to be registered by the next ticks"
    if before is None or before.is_due:
        return _STATES[state]
    if before.due is None:
        return "left alone after a canceled run"
    return f"waiting after a failure until {before.due:%Y-%m-%d %H:%M:%S}"


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
        held = held_by_active_runs(names, context.instance)
        requests = _refresh_requests(names, settings, context, held)
        return requests or dg.SkipReason(f"Every partition to embed is held by {held.by}.")

    return schedule


def scheduled_check(names: CatalogNames, settings: Settings) -> list[dg.ScheduleDefinition]:
    """Return the schedule of the catalog check; none if `check_cron` is "none"."""
    if settings.check_cron in ("none", ""):
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


def _refresh_requests(
    names: CatalogNames, settings: Settings, context: dg.ScheduleEvaluationContext, held: Held
) -> list[dg.RunRequest]:
    """Return runs that bring the whole catalog up to date, except for partitions that active runs
    hold.

    A single run covers everything and finds out itself what there is to do. Several runs, and one
    next to active runs, name their partitions; the first one handles removed partitions. If source
    or output cannot be read now, or not in time, the single run tries again and fails if it cannot
    do better; its failure is alerted.
    """
    if held.keys is None:
        return []

    pieces: Sequence[list[str] | None] = [None]  # the whole catalog
    if settings.max_runs > 1 or held.keys:
        over = threading.Event()
        timer = threading.Timer(_LOOK_SECONDS, over.set)
        timer.daemon = True
        timer.start()
        with suppress(SurgeError, Cancelled):
            found = _pieces_to_do(names, settings, context, held, over)
            if held.keys or len(found) > 1:
                pieces = found

    requests = []
    for number, keys in enumerate(pieces):
        removed = settings.removed_partitions if number == 0 else "leave"
        options = {"keys": keys, "unattended": True, "removed_partitions": removed}
        config = config_of(names.refresh_op, options)
        # Dagster evaluates a tick again in which its daemon died, and launches the runs whose key
        # is new then.
        run_key = keys[0] if keys else "everything"
        requests.append(dg.RunRequest(run_key, run_config=config, tags=settings.run_tags))
    return requests


def _pieces_to_do(
    names: CatalogNames,
    settings: Settings,
    context: dg.ScheduleEvaluationContext,
    held: Held,
    over: threading.Event,
) -> list[list[str]]:
    """Return the partition keys that need work and that no active run holds, in pieces."""
    instance = context.instance
    resources = names.resources(context)
    store = resources.output.open().until(over)
    space = known_space(resources, store)
    asset = asset_of(names, store, space)
    listing = list_catalog(names, asset, instance, resources.open_source())
    todo = states_of_unfinished(listing, store, space).keys() | failed_on_record(asset, instance)
    keys = [key for key in listing.partitions if key in todo and key not in held]
    return _cut_keys(listing, keys, settings.max_runs)


def _cut_keys(listing: Listing, keys: Sequence[str], max_runs: int) -> list[list[str]]:
    """Divide partition keys, in their order, into at most `max_runs` equal pieces."""
    pieces = cut([listing.partitions[key] for key in keys], max_runs, LEAST_BYTES)
    return [list(map(to_partition_key, piece.keys)) for piece in pieces]
