"""The runs of a catalog: active ones with the partitions that they hold, and what earlier ones left
undone, with how long that waits.

The sensors keep no state of their own. Runs are on record with the partitions in their config, and
tags say the rest. Dagster's UI leaves out those that begin with a dot:

    surge/attempt                 how often the same was requested in a row without success
    .dagster/surge_settings       catalog and fingerprint of the settings: with others no partition
                                  waits
    .dagster/surge_newest_event   storage id of the catalog's newest event at the request
    .dagster/surge_target         what a run is for that has no partitions in its config

The sensor gives its runs these tags, and other runs that embed get them when they begin. Dagster
copies the tags of a run to the run that it launches in its place. What no failed run holds, because
it was deleted or is older than the newest 100, is requested as if for the first time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import dagster as dg

from surge_dagster.engine.support.counts import named
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.records import Catalogued

_ATTEMPT_TAG = "surge/attempt"
_SETTINGS_TAG = ".dagster/surge_settings"
EVENT_TAG = ".dagster/surge_newest_event"
_TARGET_TAG = ".dagster/surge_target"
_UNDONE = [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_ENDED = [dg.DagsterRunStatus.SUCCESS, *_UNDONE]
_ACTIVE = [status for status in dg.DagsterRunStatus if status not in _ENDED]
_RUNS_READ = 100  # a run of 10,000 keys takes a megabyte
_FIRST_WAIT, _LONGEST_WAIT = timedelta(minutes=1), timedelta(days=1)
_RUNS_NAMED = 3


@dataclass(frozen=True, slots=True)
class Held:
    """The partition keys that active runs may touch.

    Attributes:
        keys: None for all.
        run_ids: of these runs, first those that hold all.
    """

    keys: set[str] | None
    run_ids: tuple[str, ...] = ()

    def __contains__(self, partition_key: str) -> bool:
        return self.keys is None or partition_key in self.keys

    @property
    def by(self) -> str:
        return (
            f"active runs ({named(self.run_ids, _RUNS_NAMED)}; terminate one that makes no "
            "progress)"
        )


def active_runs(instance: dg.DagsterInstance) -> Sequence[dg.DagsterRun]:
    """Return the runs that wait or are executed, the newest first."""
    return instance.get_runs(filters=dg.RunsFilter(statuses=_ACTIVE))


def embeds(names: CatalogNames, instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Return whether a run embeds partitions of this catalog, or may do so."""
    return concerns(instance, run, {names.refresh_job, names.embed_job}, {names.embeddings})


def concerns(
    instance: dg.DagsterInstance,
    run: dg.DagsterRun,
    job_names: Set[str],
    asset_keys: Set[dg.AssetKey],
) -> bool:
    """Return whether a run is one of these jobs, or executes one of these assets, or may do so."""
    if run.job_name in job_names:
        return True
    assets = assets_of(instance, run)
    return assets is None or not assets.isdisjoint(asset_keys)


def held_by_active_runs(names: CatalogNames, instance: dg.DagsterInstance) -> Held:
    """Return the partitions that active runs may touch."""
    runs = [run for run in active_runs(instance) if embeds(names, instance, run)]
    if not runs:
        return Held(set(), ())

    registered = dict.fromkeys(instance.get_dynamic_partitions(names.partitions_name))
    held: set[str] = set()
    holders_of_all: list[str] = []
    holders: list[str] = []
    for run in runs:
        keys = held_keys(names, run, registered)
        if keys is None:
            holders_of_all.append(run.run_id)
        else:
            holders.append(run.run_id)
            held |= keys
    return Held(None if holders_of_all else held, (*holders_of_all, *holders))


def held_keys(
    names: CatalogNames, run: dg.DagsterRun, registered: Mapping[str, None]
) -> set[str] | None:
    """Return the partition keys that a run may touch; None for all.

    Args:
        registered: in Dagster's order.
    """
    ops: Mapping[str, Any] = dict(run.run_config).get("ops") or {}  # pyright: ignore[reportAssignmentType]
    for op_name in (names.embeddings_op, names.refresh_op):
        config = (ops.get(op_name) or {}).get("config") or {}
        if config.get("keys") is not None:
            return set(config["keys"])
    if "dagster/partition" in run.tags:
        return {run.tags["dagster/partition"]}
    first = run.tags.get("dagster/asset_partition_range_start")
    last = run.tags.get("dagster/asset_partition_range_end")
    if first is None or last is None or first not in registered or last not in registered:
        return None
    ordered = list(registered)
    return set(ordered[ordered.index(first) : ordered.index(last) + 1])


def assets_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Set[dg.AssetKey] | None:
    """Return the assets that a run executes; None if its plan cannot be read."""
    # Dagster records the assets that were selected for a run. A user's own job,
    # `define_asset_job(selection=[…])`, selects them beforehand: a run that a schedule, a sensor or
    # a backfill of the job launches has only its plan.
    plan_id = run.execution_plan_snapshot_id
    if run.asset_selection is not None or plan_id is None:
        return run.asset_selection or frozenset()
    try:
        return instance.get_execution_plan_snapshot(plan_id).asset_selection
    except Exception:  # the database does not answer, or another version of Dagster wrote the plan
        return None


@dataclass(frozen=True, slots=True)
class Undone:
    attempt: int  # how often it was requested in a row without success
    due: datetime | None  # when it may be requested again; None when an operator canceled the run

    @property
    def is_due(self) -> bool:
        return self.due is not None and self.due <= now()

    @classmethod
    def of(cls, record: dg.RunRecord) -> Self:
        run = record.dagster_run
        attempt = int(run.tags[_ATTEMPT_TAG])
        canceled = run.status is dg.DagsterRunStatus.CANCELED
        return cls(attempt, None if canceled else due_after(attempt, record.end_time or 0.0))


def request_tags(
    names: CatalogNames,
    instance: dg.DagsterInstance,
    catalogued: Catalogued,
    attempt: int,
    settings: str,
) -> dict[str, str]:
    """Return the tags of a run that begins or is requested now; `settings` is their fingerprint."""
    reported = instance.fetch_materializations(names.source_partitions, limit=1).records
    ids = [
        *catalogued.embedding_ids.values(),
        *catalogued.refusal_ids.values(),
        *(each.storage_id for each in reported),
    ]
    return {
        _ATTEMPT_TAG: str(attempt),
        _SETTINGS_TAG: f"{names.partitions_name} {settings}",
        EVENT_TAG: str(max(ids, default=0)),
    }


def find_undone(
    names: CatalogNames,
    instance: dg.DagsterInstance,
    needed: Collection[str],
    catalogued: Catalogued,
    settings: str,
) -> dict[str, Undone]:
    """Return the needed partitions that runs with these settings have left undone.

    That is over when a partition is embedded or refused; after a canceled run also when its source
    changes.
    """
    tags = {_SETTINGS_TAG: f"{names.partitions_name} {settings}"}
    filters = dg.RunsFilter(tags=tags, statuses=_UNDONE)
    newest: dict[str, Undone | None] = {}
    records = instance.get_run_records(filters, limit=_RUNS_READ) if needed else []
    for record in records:
        run = record.dagster_run
        undone = Undone.of(record)
        since = int(run.tags[EVENT_TAG])
        keys = held_keys(names, run, catalogued.registered)
        for key in needed if keys is None else keys.intersection(needed):
            if key not in newest:
                ids = [catalogued.embedding_ids.get(key, -1), catalogued.refusal_ids.get(key, -1)]
                if undone.due is None:
                    ids.append(catalogued.source_ids.get(key, -1))
                newest[key] = undone if max(ids) <= since else None
    return {key: undone for key, undone in newest.items() if undone is not None}


def request_for(
    instance: dg.DagsterInstance,
    job_name: str,
    target: str,
    done: str,
    run_config: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> dg.RunRequest | dg.SkipReason:
    """Return a request for a run, after waits that grow while runs for this target fail.

    After a run that succeeded or was canceled there is none.

    Args:
        done: says that a run for this target has succeeded.
    """
    filters = dg.RunsFilter(tags={_TARGET_TAG: target}, statuses=_ENDED, job_name=job_name)
    attempt = 1
    for record in instance.get_run_records(filters, limit=1):
        run = record.dagster_run
        before = Undone.of(record)
        if run.status is dg.DagsterRunStatus.SUCCESS:
            return dg.SkipReason(done)
        if before.due is None:
            return dg.SkipReason(f"left alone after the canceled run {run.run_id}")
        if not before.is_due:
            until = before.due.isoformat(sep=" ", timespec="seconds")
            return dg.SkipReason(
                f"waiting after a failure (attempt {before.attempt}) until {until}"
            )
        attempt = before.attempt + 1
    tags = {_ATTEMPT_TAG: str(attempt), _TARGET_TAG: target, **(tags or {})}
    return dg.RunRequest(job_name=job_name, run_config=run_config, tags=tags)


def now() -> datetime:
    return datetime.now(UTC)


def due_after(attempt: int, ended: float) -> datetime:
    """Return when the next attempt is due: 1, 2, 4 … minutes after the last one ended."""
    return datetime.fromtimestamp(ended, UTC) + min(
        _FIRST_WAIT * 2 ** min(attempt - 1, 20), _LONGEST_WAIT
    )
