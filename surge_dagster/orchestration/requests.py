"""What earlier runs left undone, and how long that waits.

The sensors keep no state of their own. Runs are on record with the partitions in their config, and
tags say the rest. Dagster's UI leaves out those that begin with a dot:

    surge/attempt                 how often the same was requested in a row without success
    .dagster/surge/settings       catalog and fingerprint of the settings: with others no partition
                                  waits
    .dagster/surge/newest_event   storage id of the catalog's newest event at the request
    .dagster/surge/target         what a run is for that has no partitions in its config

The sensor gives its runs these tags, and other runs that embed get them when they begin. Dagster
copies the tags of a run to the run that it launches in its place. What no failed run holds, because
it was deleted or is older than the newest 100, is requested as if for the first time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import dagster as dg

from surge_dagster.orchestration.active_runs import held_keys
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.records import Catalogued

_ATTEMPT_TAG = "surge/attempt"
_SETTINGS_TAG = ".dagster/surge/settings"
EVENT_TAG = ".dagster/surge/newest_event"
_TARGET_TAG = ".dagster/surge/target"
_UNDONE = [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_RUNS_READ = 100  # a run of 10,000 keys takes a megabyte
_FIRST_WAIT, _LONGEST_WAIT = timedelta(minutes=1), timedelta(days=1)


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
    """Return the needed partitions that runs with these settings have left undone."""
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
                has_changed = _changed_since(key, since, catalogued, undone.due is None)
                newest[key] = None if has_changed else undone
        if len(newest) == len(needed):
            break  # earlier runs say nothing more
    return {key: undone for key, undone in newest.items() if undone is not None}


def request_for(
    instance: dg.DagsterInstance,
    job_name: str,
    target: str,
    run_config: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> dg.RunRequest | dg.SkipReason:
    """Return a request for a run, after waits that grow while runs for this target fail.

    After a canceled run there is none.
    """
    filters = dg.RunsFilter(tags={_TARGET_TAG: target}, statuses=_UNDONE, job_name=job_name)
    attempt = 1
    for record in instance.get_run_records(filters, limit=1):
        before = Undone.of(record)
        if before.due is None:
            return dg.SkipReason(f"left alone after the canceled run {record.dagster_run.run_id}")
        if not before.is_due:
            until = before.due.isoformat(sep=" ", timespec="seconds")
            return dg.SkipReason(
                f"waiting after a failure (attempt {before.attempt}) until {until}"
            )
        attempt = before.attempt + 1
    tags = {_ATTEMPT_TAG: str(attempt), _TARGET_TAG: target, **(tags or {})}
    return dg.RunRequest(job_name=job_name, run_config=run_config, tags=tags)


def has_succeeded(instance: dg.DagsterInstance, job_name: str, target: str) -> bool:
    succeeded = [dg.DagsterRunStatus.SUCCESS]
    return (
        instance.get_runs_count(
            dg.RunsFilter(tags={_TARGET_TAG: target}, statuses=succeeded, job_name=job_name)
        )
        > 0
    )


def now() -> datetime:
    return datetime.now(UTC)


def due_after(attempt: int, ended: float) -> datetime:
    """Return when the next attempt is due: 1, 2, 4 … minutes after the last one ended."""
    return datetime.fromtimestamp(ended, UTC) + min(
        _FIRST_WAIT * 2 ** min(attempt - 1, 20), _LONGEST_WAIT
    )


def next_attempt(keys: Iterable[str], undone: Mapping[str, Undone]) -> tuple[int, list[str]]:
    """Return the number of the attempt that is requested now, and its partitions."""
    due = [key for key in keys if key not in undone or undone[key].is_due]
    attempts = [undone[key].attempt for key in due if key in undone]
    return 1 + max(attempts, default=0), due


def _changed_since(key: str, event: int, catalogued: Catalogued, canceled: bool) -> bool:
    """Return whether a partition was embedded or refused since an event; after a canceled run,
    whether its source changed."""
    ids = [catalogued.embedding_ids.get(key, -1), catalogued.refusal_ids.get(key, -1)]
    if canceled:
        ids.append(catalogued.source_ids.get(key, -1))
    return max(ids) > event
