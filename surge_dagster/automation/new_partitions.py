"""The sensor `new_partitions`: registers and observes partitions, and requests runs for those that need one.

It is written by hand: Dagster's declarative conditions take seconds per tick at tens of thousands of partitions and do
not consider which partitions an active run holds. A tick costs two listings and a few bulk queries.

A partition is requested when it has no fresh file, no active run holds it, its content was not refused as it is, and it
does not wait after a failure. One that fails waits 1, 2, 4 … minutes, at most a day, whether its source changes or not.
A refused one is requested when its source changes, and those of a canceled run when their source or a setting does.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import chain

import dagster as dg

from surge_dagster.engine.errors import SurgeError
from surge_dagster.orchestration.active_runs import Held, held_by_active_runs
from surge_dagster.orchestration.discovery import (
    known_space,
    list_catalog,
    observations,
    report_changes,
    states_of_unfinished,
)
from surge_dagster.orchestration.failures import refusal_fingerprint, still_refused
from surge_dagster.orchestration.launch import unattended_config
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.records import Catalogued
from surge_dagster.orchestration.run_queue import POOL, record_pool_limit
from surge_dagster.orchestration.sensor_cursor import REQUEST_TAG, Request, SensorCursor, Undone, look_after
from surge_dagster.orchestration.shards import cut, shard_tags
from surge_dagster.settings import Settings

_SENSOR_SECONDS = 30
_KEYS_PER_RUN = 10_000  # they are in the run's config
_SHOWN = 1_000  # events that an operator who tries the sensor out is shown


def new_partitions(names: CatalogNames, settings: Settings, job: dg.JobDefinition) -> dg.SensorDefinition:
    """The sensor that embeds what is new, and with the setting `refresh_stale` also what has changed."""
    wanted = {"missing", "unknown", "stale"} if settings.refresh_stale else {"missing", "unknown"}

    @dg.sensor(
        name=names.sensor,
        job_name=job.name,
        minimum_interval_seconds=_SENSOR_SECONDS,
        description="Registers new partitions, observes changed ones, and requests runs that embed what is missing.",
        required_resource_keys=names.resource_keys,
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        instance, resources, now = context.instance, names.resources(context.resources), _now()
        is_trial = not _is_real_tick(context)
        limited = is_trial or record_pool_limit(instance)
        try:
            held = held_by_active_runs(names, instance)  # before the output is listed: a run may end meanwhile
            listing = list_catalog(names, instance, resources.catalog)
            unreported = set[str]() if is_trial else report_changes(names, instance, listing)
            store = resources.output.open()
            space = known_space(names, store, resources.encoder.spec(), unattended=True)
            states = states_of_unfinished(listing, store, space)
        except SurgeError as error:
            return dg.SkipReason(str(error))
        fingerprint = refusal_fingerprint(resources)
        refused = still_refused(listing.catalogued, listing.partitions, fingerprint)
        needed = {key: None for key, state in states.items() if state in wanted and key not in refused}
        cursor = SensorCursor.read(context.cursor, hashlib.sha256(fingerprint.encode()).hexdigest()[:12])
        requests, undone = look_after(cursor.requests, names, instance, needed, listing.catalogued, now)
        attempt, keys = _next_attempt((key for key in needed if key not in held and key not in unreported), undone, now)
        stretches = cut(keys[: settings.shards * _KEYS_PER_RUN], listing.partitions, settings.shards) if keys else []
        newest = _newest_event(names, instance, listing.catalogued) if stretches else 0
        ids = [f"{names.sensor} {now:%Y-%m-%d %H:%M:%S} {number}" for number in range(1, len(stretches) + 1)]
        made = [Request(request_id, attempt, newest) for request_id in ids]
        counts = Counter(states.values())
        parts = {
            "to be embedded": len(needed),
            f"held by {held.by}": sum(key in held for key in needed),
            "refused as they are": sum(states.get(key) in wanted for key in refused),
            "whose place is taken by a file of another space": counts["foreign"],
            "whose files cannot be read now": counts[None],
            "to be registered by the next ticks": len(unreported),
        }
        summary = f"{len(listing.partitions):,} partitions: {len(needed):,} to be embedded" + "".join(
            f", {count:,} {what}" for what, count in list(parts.items())[1:] if count
        )
        summary += _waiting(undone, held)
        context.log.info(summary)
        if stretches and not limited:
            context.log.warning(
                f"this Dagster instance has no limit for the pool {POOL!r}, so that its queue starts any number of "
                "runs, each with an encoder of its own: use the dagster.yaml that comes with surge-dagster"
            )
        shown = listing.unreported if is_trial else []
        new = [key for key in shown if key not in listing.catalogued.registered][:_KEYS_PER_RUN]
        return dg.SensorResult(
            run_requests=[
                dg.RunRequest(
                    run_config=unattended_config(names.embeddings_op, resources, space, {"keys": stretch}),
                    tags={REQUEST_TAG: request.id, **shard_tags(number, len(made))},
                )
                for number, (request, stretch) in enumerate(zip(made, stretches, strict=True), 1)
            ],
            skip_reason=None if made else summary,
            cursor=SensorCursor(cursor.settings, (*requests, *made)).write(),
            asset_events=observations(names, listing, shown[:_SHOWN]),
            dynamic_partitions_requests=[names.partitions.build_add_request(new)] if new else [],
        )

    return sensor


def _next_attempt(free: Iterable[str], undone: Mapping[str, Undone], now: datetime) -> tuple[int, list[str]]:
    """The partitions to request now, and how often they are requested then, in a row without success.

    One request holds partitions of one attempt, the earliest first: new ones must not wait behind failing ones.
    """
    by_attempt: dict[int, list[str]] = {}
    for key in free:
        before = undone.get(key)
        if before is None:
            by_attempt.setdefault(1, []).append(key)
        elif before.due is not None and before.due <= now:
            by_attempt.setdefault(before.attempt + 1, []).append(key)
    return min(by_attempt.items(), default=(1, []))


def _newest_event(names: CatalogNames, instance: dg.DagsterInstance, catalogued: Catalogued) -> int:
    """Storage id of the newest event of the catalog, those that this tick has reported included."""
    observed = instance.fetch_observations(names.source_partitions, limit=1).records
    ids = [catalogued.embedding_ids.values(), catalogued.refusal_ids.values(), (one.storage_id for one in observed)]
    return max(chain.from_iterable(ids), default=0)


def _waiting(undone: Mapping[str, Undone], held: Held) -> str:
    """Text for an operator about partitions that are not requested again yet."""
    canceled = sum(each.canceled for each in undone.values())
    failed = [each for key, each in undone.items() if each.due is not None and key not in held]
    text = f", {canceled:,} left alone because their run was canceled" if canceled else ""
    if failed:
        due = min(each.due for each in failed if each.due is not None)
        attempt = max(each.attempt for each in failed)
        text += (
            f", {len(failed):,} waiting after a failure (attempt {attempt}), the next ones until "
            f"{due.isoformat(sep=' ', timespec='seconds')}"
        )
    return text


def _is_real_tick(context: dg.SensorEvaluationContext) -> bool:
    """Whether the daemon evaluates the sensor, which numbers its ticks, and not an operator who tries it out."""
    key = context.log_key
    return bool(key) and key[-1].isdigit()


def _now() -> datetime:
    return datetime.now(UTC)
