"""Earlier requests of the sensor: which partitions their runs left undone, and how long those wait.

The sensor keeps no state of its own. Its runs are on record with the partitions in their config, and tags say the rest;
an operator sees them on the page of a run:

    surge/attempt        how often the partitions were requested in a row without success
    surge/settings       fingerprint of the settings: with other settings nothing waits
    surge/newest_event   storage id of the catalog's newest event at the request

Dagster copies the tags of a run to the run that it launches in its place. Partitions that no failed run holds, because
it was deleted or is older than the newest 500, are requested as if for the first time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain

import dagster as dg

from surge_dagster.orchestration.active_runs import held_keys
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.records import Catalogued

_ATTEMPT_TAG = "surge/attempt"
_SETTINGS_TAG = "surge/settings"
_EVENT_TAG = "surge/newest_event"
_RUNS_READ = 500
_RUNS_PER_PAGE = 20  # a run of 10,000 keys takes a megabyte
_FIRST_WAIT, _LONGEST_WAIT = timedelta(minutes=1), timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Undone:
    """A partition that the run of an earlier request left undone.

    Attributes:
        attempt: how often it was requested in a row without success.
        due: when it may be requested again; None when an operator canceled the run.
    """

    attempt: int
    due: datetime | None


def request_tags(
    names: CatalogNames, instance: dg.DagsterInstance, catalogued: Catalogued, attempt: int, settings: str
) -> dict[str, str]:
    """The tags of a run that is requested now; `settings` is their fingerprint."""
    observed = instance.fetch_observations(names.source_partitions, limit=1).records
    ids = [catalogued.embedding_ids.values(), catalogued.refusal_ids.values(), (one.storage_id for one in observed)]
    newest = max(chain.from_iterable(ids), default=0)
    return {_ATTEMPT_TAG: str(attempt), _SETTINGS_TAG: settings, _EVENT_TAG: str(newest)}


def find_undone(
    names: CatalogNames,
    instance: dg.DagsterInstance,
    needed: Collection[str],
    catalogued: Catalogued,
    settings: str,
) -> dict[str, Undone]:
    """The partitions that were requested with these settings and that failed or canceled runs left undone.

    Args:
        names, instance: of the catalog, and where the runs are recorded.
        needed: partition keys that need a run.
        catalogued: what is on record.
        settings: their fingerprint.
    """
    statuses = [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
    filters = dg.RunsFilter(tags={_SETTINGS_TAG: settings}, statuses=statuses, job_name=names.embed_job)
    newest: dict[str, Undone | None] = {}
    for record in _newest_first(instance, filters) if needed else ():
        run, tags = record.dagster_run, record.dagster_run.tags
        canceled = run.status is dg.DagsterRunStatus.CANCELED
        attempt, since = int(tags[_ATTEMPT_TAG]), int(tags[_EVENT_TAG])
        undone = Undone(attempt, None if canceled else due_after(attempt, record.end_time or 0.0))
        for key in held_keys(run, {}, (names.embeddings_op,)) or ():
            if key in needed and key not in newest:
                newest[key] = None if _changed_since(key, since, catalogued, canceled) else undone
        if len(newest) == len(needed):
            break  # earlier runs say nothing more
    return {key: undone for key, undone in newest.items() if undone is not None}


def _newest_first(instance: dg.DagsterInstance, filters: dg.RunsFilter) -> Iterator[dg.RunRecord]:
    """The newest runs, in pages: all of them with their keys would take hundreds of megabytes."""
    cursor = None
    for _ in range(0, _RUNS_READ, _RUNS_PER_PAGE):
        page = instance.get_run_records(filters, limit=_RUNS_PER_PAGE, cursor=cursor)
        yield from page
        if len(page) < _RUNS_PER_PAGE:
            return
        cursor = page[-1].dagster_run.run_id


def due_after(attempt: int, ended: float) -> datetime:
    """When partitions may be requested again whose run ended then: 1, 2, 4 … minutes later, at most a day.

    Args:
        attempt: the number of the failed attempt, from 1.
        ended: end of its run in seconds since 1970.
    """
    return datetime.fromtimestamp(ended, UTC) + min(_FIRST_WAIT * 2 ** min(attempt - 1, 20), _LONGEST_WAIT)


def next_attempt(keys: Iterable[str], undone: Mapping[str, Undone], now: datetime) -> tuple[int, list[str]]:
    """The number of the attempt that is requested now, and its partitions.

    One request holds partitions of one attempt, the earliest first: new ones must not wait behind failing ones.
    """
    by_attempt: dict[int, list[str]] = {}
    for key in keys:
        before = undone.get(key)
        if before is None:
            by_attempt.setdefault(1, []).append(key)
        elif before.due is not None and before.due <= now:
            by_attempt.setdefault(before.attempt + 1, []).append(key)
    return min(by_attempt.items(), default=(1, []))


def _changed_since(key: str, event: int, catalogued: Catalogued, canceled: bool) -> bool:
    """Whether a partition was embedded or refused since an event, or for a canceled run: its source changed."""
    ids = [catalogued.embedding_ids.get(key, -1), catalogued.refusal_ids.get(key, -1)]
    if canceled:
        ids.append(catalogued.change_ids.get(key, -1))
    return max(ids) > event
