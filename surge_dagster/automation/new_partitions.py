"""The sensor `new_partitions`: registers and reports partitions, and requests runs for those that
need one.

It is written by hand: Dagster's declarative conditions take seconds per tick at tens of thousands
of partitions and do not consider which partitions an active run holds. A tick costs two listings
and a few bulk queries.

A partition is requested when it has no fresh file, no active run holds it, its content was not
refused as it is, and it does not wait after a failure. One that fails waits 1, 2, 4 … minutes, at
most a day, whether its source changes or not. A refused one is requested when its source changes,
and those of a canceled run when their source or a setting does.

A tick fails when the source or the output does not answer, or a setting means no space of this
output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import dagster as dg

from surge_dagster.config.settings import Settings
from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration.active_runs import Held, held_by_active_runs
from surge_dagster.orchestration.discovery import (
    Listing,
    list_catalog,
    report_changes,
    states_of_unfinished,
)
from surge_dagster.orchestration.divided import cut_keys
from surge_dagster.orchestration.failures import refusal_fingerprint, still_refused
from surge_dagster.orchestration.launch import config_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.readers_space import asset_of
from surge_dagster.orchestration.removed_partitions import removed_keys
from surge_dagster.orchestration.requests import (
    Undone,
    find_undone,
    has_succeeded,
    next_attempt,
    request_for,
    request_tags,
)
from surge_dagster.orchestration.space_of_settings import known_space, require_first_space
from surge_dagster.resources.upstream_asset import NotListed

_SENSOR_SECONDS = 30
_KEYS_PER_RUN = 10_000  # they are in the run's config
_STATES = {
    None: "with a file that cannot be read now",
    "foreign": "whose place is taken by a file of another space",
    "unknown": "whose file is not on record",
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
        return _look(names, settings, context)

    return sensor


def _look(
    names: CatalogNames, settings: Settings, context: dg.SensorEvaluationContext
) -> list[dg.RunRequest] | dg.RunRequest | dg.SkipReason:
    instance = context.instance
    resources = names.resources(context)
    fingerprint = refusal_fingerprint(resources)
    # before the output is listed: a run may end in the time between
    held = held_by_active_runs(names, instance)
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
    needed = [key for key, state in states.items() if state in wanted and key not in refused]
    undone = find_undone(names, instance, set(needed), listing.catalogued, fingerprint)
    free = (key for key in needed if key not in held and key not in unreported)
    attempt, keys = next_attempt(free, undone)
    summary = _message(listing, states, held, refused, undone, unreported)
    if not keys:
        return dg.SkipReason(summary)

    context.log.info(summary)
    pieces = cut_keys(listing, keys[: settings.max_runs * _KEYS_PER_RUN], settings.max_runs)
    tags = request_tags(names, instance, listing.catalogued, attempt, fingerprint)
    requests = []
    for piece in pieces:
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
    if has_succeeded(context.instance, names.embed_job, target):
        return dg.SkipReason(f"a run has embedded the last materialization ({unlisted.version})")

    options: dict[str, Any] = {"unattended": True}
    if not settings.refresh_stale:
        options["select"] = "missing"
    config = config_of(names.embeddings_op, options)
    return request_for(context.instance, names.embed_job, target, config, settings.run_tags)


def _message(
    listing: Listing,
    states: Mapping[str, str | None],
    held: Held,
    refused: Collection[str],
    undone: Mapping[str, Undone],
    unreported: Collection[str],
) -> str:
    """Return one line with the number of partitions in each state."""
    counts = Counter({"up to date": len(listing.partitions) - len(states)})
    for key, state in states.items():
        counts[_state_of(key, state, held, refused, undone.get(key), unreported)] += 1
    removed = len(removed_keys(listing))
    if removed:
        counts["removed from the source"] = removed

    parts = [f"{count:,} {state}" for state, count in counts.items()]
    return f"{counted(counts.total(), 'partition')}: {', '.join(parts)}"


def _state_of(
    key: str,
    state: str | None,
    held: Held,
    refused: Collection[str],
    before: Undone | None,
    unreported: Collection[str],
) -> str:
    """Return the first state that applies; a partition that is due again is missing or stale."""
    if state in (None, "foreign"):
        return _STATES[state]
    if key in refused:
        return "refused"
    if key in held:
        return f"held by {held.by}"
    if key in unreported:
        return "to be registered by the next ticks"
    if before is None or before.is_due:
        return _STATES.get(state, state)
    if before.due is None:
        return "left alone after a canceled run"
    return f"waiting after a failure until {before.due:%Y-%m-%d %H:%M:%S}"
