"""The sensor's cursor: the runs that it requested and that left partitions undone, and how long those wait.

The cursor is JSON that an operator can read and may throw away: partitions that it forgets are requested once more. It
names no partitions, since Dagster keeps the cursor of every tick. They are in the config of the runs, which carry the
id of their request as a tag.

    {"version": 4, "settings": "5f1c0d4e9a2b",
     "requests": [{"id": "new_partitions 2026-01-31 12:00:00 1", "attempt": 2, "newest_event": 41,
                   "ended": "2026-01-31T12:04:00+00:00"}]}
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta

import dagster as dg

from surge_dagster.orchestration.active_runs import held_keys
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.records import Catalogued

REQUEST_TAG = "surge/request"
_VERSION = 4
_FIRST_WAIT, _LONGEST_WAIT = timedelta(minutes=1), timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Request:
    """A run that the sensor requested.

    Attributes:
        id: in the tag of the run, and of the runs that Dagster launches in its place.
        attempt: how often its partitions were requested in a row without success, from 1.
        newest_event: storage id of the newest event when they were requested.
        ended: when a tick first saw the run ended, in ISO format; None before.
    """

    id: str
    attempt: int
    newest_event: int
    ended: str | None = None

    @property
    def due(self) -> datetime | None:
        """When the partitions may be requested again: 1, 2, 4 … minutes after the end, at most a day."""
        if self.ended is None:
            return None
        return datetime.fromisoformat(self.ended) + min(_FIRST_WAIT * 2 ** min(self.attempt - 1, 20), _LONGEST_WAIT)


@dataclass(frozen=True, slots=True)
class Undone:
    """A partition that an earlier request left undone.

    Attributes:
        attempt: how often it was requested in a row without success.
        due: when it may be requested again; None when it was canceled, or its run is active.
        canceled: whether an operator canceled the run.
    """

    attempt: int
    due: datetime | None
    canceled: bool


@dataclass(frozen=True, slots=True)
class SensorCursor:
    """Everything that the sensor remembers.

    Attributes:
        settings: fingerprint of the settings that the requests were made with.
        requests: the oldest one first.
    """

    settings: str = ""
    requests: tuple[Request, ...] = ()

    @classmethod
    def read(cls, text: str | None, settings: str) -> SensorCursor:
        """What `write` wrote; no requests for the first tick, for another version, and for other settings."""
        try:
            document = json.loads(text or "{}")
            if document.get("version") == _VERSION and document["settings"] == settings:
                return cls(settings, tuple(Request(**each) for each in document["requests"]))
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        return cls(settings)

    def write(self) -> str:
        """The cursor as Dagster keeps it."""
        requests = [asdict(request) for request in self.requests]
        return json.dumps({"version": _VERSION, "settings": self.settings, "requests": requests})


def look_after(
    requests: tuple[Request, ...],
    names: CatalogNames,
    instance: dg.DagsterInstance,
    needed: Container[str],
    catalogued: Catalogued,
    now: datetime,
) -> tuple[tuple[Request, ...], dict[str, Undone]]:
    """Find the results of earlier requests.

    Args:
        requests: of the cursor.
        names: of the catalog.
        instance: where the runs are recorded.
        needed: partition keys that need a run.
        catalogued: what is on record.
        now: the time of this tick.

    Returns:
        The requests that are active or left something undone, and the partitions that they left undone.
    """
    newest = _newest_runs(instance, requests)
    left: dict[str, tuple[Request, bool]] = {}
    going_on: set[str] = set()
    for request in requests:
        run = newest.get(request.id)
        if run is None:
            continue  # the run was deleted, or was never created
        if not run.is_finished:
            going_on.add(request.id)
            request = replace(request, ended=None)  # Dagster may have launched it again
        elif request.ended is None:
            request = replace(request, ended=now.isoformat(timespec="seconds"))
        canceled = run.status is dg.DagsterRunStatus.CANCELED
        for key in held_keys(run, {}, (names.embeddings_op,)) or ():
            if key in needed and not _changed_since(key, request, catalogued, canceled):
                left[key] = request, canceled
    kept = {request.id: request for request, _ in left.values()}
    return (
        tuple(kept.get(each.id, each) for each in requests if each.id in kept or each.id in going_on),
        {
            key: Undone(request.attempt, None if canceled else request.due, canceled)
            for key, (request, canceled) in left.items()
        },
    )


def _newest_runs(instance: dg.DagsterInstance, requests: tuple[Request, ...]) -> Mapping[str, dg.DagsterRun]:
    """The newest run of each request, by the request's id: Dagster launches a run again whose process died."""
    if not requests:
        return {}
    tags = {REQUEST_TAG: [request.id for request in requests]}
    newest: dict[str, dg.DagsterRun] = {}
    for run in instance.get_runs(dg.RunsFilter(tags=tags)):  # the newest one first
        newest.setdefault(run.tags[REQUEST_TAG], run)
    return newest


def _changed_since(key: str, request: Request, catalogued: Catalogued, canceled: bool) -> bool:
    """Whether a partition was embedded or refused since it was requested, or for a canceled run: its source changed."""
    ids = [catalogued.embedding_ids.get(key, -1), catalogued.refusal_ids.get(key, -1)]
    if canceled:
        ids.append(catalogued.observation_ids.get(key, -1))
    return max(ids) > request.newest_event
