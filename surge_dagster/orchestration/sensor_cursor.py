"""What the sensor remembers from tick to tick, as its cursor: what it asked for and how often, and what has vanished.

The cursor is JSON that a person can read, with a version, and can be thrown away: what it forgets is asked for once
more. States and keys stand in it as digests of eight characters, since Dagster keeps the cursor of every tick. Five
characters of a state tell whose it is, so that a partition which changes after each failure is not new each time.

    {"version": 3, "spec": "…",
     "requests": [{"id": "…", "attempt": 2, "last_active": "2026-01-31T12:00:00+00:00", "told": 41, "states": "…"}],
     "gone": [{"since": "2026-01-31T11:00:00+00:00", "looks": 3, "keys": "…"}],
     "looked": "2026-01-31T12:00:00+00:00"}
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

_VERSION = 3
_DIGEST_LENGTH, _KEY_LENGTH = 8, 5
_FIRST_WAIT, _LONGEST_WAIT = timedelta(minutes=1), timedelta(days=1)
_LONGEST_WAIT_CHANGED = timedelta(hours=1)  # the change may be what mends it
_LONGEST_PAUSE = timedelta(minutes=10)  # between two looks, of which there are two a minute


@dataclass(slots=True)
class Request:
    """Partitions that one run was asked to embed and that still need it.

    Attributes:
        id: stands in the run's tags.
        attempt: how often they were asked for without success, from 1.
        last_active: when a run was last seen to hold one of them, or when they were asked for.
        states: of `state_of`.
        stopped: a person canceled the run; they are not asked for again in this state.
        changed: they have another source version than the one that they were asked for with.
        told: storage id of the youngest materialization when they were asked for.
    """

    id: str
    attempt: int
    last_active: datetime
    states: set[str]
    stopped: bool = False
    changed: bool = False
    told: int = -1

    @property
    def due(self) -> datetime:
        """From when on they may be asked for again: after 1, 2, 4 … minutes, a day at most, an hour if changed."""
        longest = _LONGEST_WAIT_CHANGED if self.changed else _LONGEST_WAIT
        return self.last_active + min(_FIRST_WAIT * 2 ** min(self.attempt - 1, 20), longest)


@dataclass(frozen=True, slots=True)
class Gone:
    """Since when, and at how many consecutive looks, a partition was not in the catalog."""

    since: datetime
    looks: int


@dataclass(slots=True)
class SensorCursor:
    """Everything remembered.

    Attributes:
        gone: by digests of keys.
        looked: when the catalog was listed last.
        spec: digest of the settings that say which vectors are asked for, and of what.
    """

    requests: list[Request] = field(default_factory=list)
    gone: dict[str, Gone] = field(default_factory=dict)
    looked: datetime | None = None
    spec: str = ""

    @classmethod
    def read(cls, text: str | None) -> SensorCursor:
        """What `write` wrote; nothing for the first tick, and for what is not a cursor, or one of another version."""
        try:
            return cls._of_document(json.loads(text) if text else {})
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()

    @classmethod
    def _of_document(cls, document: Mapping[str, Any]) -> SensorCursor:
        if document.get("version") != _VERSION:
            return cls()
        requests = [
            Request(
                found["id"],
                int(found["attempt"]),
                datetime.fromisoformat(found["last_active"]),
                _split(found["states"]),
                bool(found.get("stopped")),
                bool(found.get("changed")),
                int(found["told"]),
            )
            for found in document["requests"]
        ]
        gone = {
            key: Gone(datetime.fromisoformat(found["since"]), int(found["looks"]))
            for found in document["gone"]
            for key in _split(found["keys"])
        }
        looked = document.get("looked")
        return cls(requests, gone, datetime.fromisoformat(looked) if looked else None, str(document["spec"]))

    def write(self) -> str:
        """The cursor as Dagster keeps it."""
        requests = [
            {
                "id": request.id,
                "attempt": request.attempt,
                "last_active": request.last_active.isoformat(timespec="seconds"),
                "told": request.told,
                "states": "".join(sorted(request.states)),
                **({"stopped": True} if request.stopped else {}),
                **({"changed": True} if request.changed else {}),
            }
            for request in self.requests
        ]
        groups: dict[Gone, list[str]] = {}
        for key, gone in self.gone.items():
            groups.setdefault(gone, []).append(key)
        vanished = [
            {"since": gone.since.isoformat(timespec="seconds"), "looks": gone.looks, "keys": "".join(sorted(keys))}
            for gone, keys in groups.items()
        ]
        looked = {"looked": self.looked.isoformat(timespec="seconds")} if self.looked else {}
        document = {"version": _VERSION, "spec": self.spec, "requests": requests, "gone": vanished, **looked}
        return json.dumps(document)

    def look(self, now: datetime) -> None:
        """Note that the catalog was listed; what was gone before a long pause may have been back in between."""
        if self.looked is None or now - self.looked > _LONGEST_PAUSE:
            self.gone = {}
        self.looked = now

    def mean(self, spec: str) -> None:
        """Forget what was asked for with another spec, given as its digest: a person has changed the settings."""
        if spec != self.spec:
            self.requests, self.spec = [], spec

    def ask(self, states_by_attempt: Mapping[str, int], now: datetime, told: int) -> str:
        """Remember that one run was asked for these states, each for the n-th time; gives the request's id.

        Args:
            told: storage id of the youngest materialization on record.
        """
        request_id = digest(now.isoformat() + "".join(states_by_attempt))
        for request in self.requests:
            request.states -= states_by_attempt.keys()
        for attempt in sorted(set(states_by_attempt.values())):
            states = {state for state, nth in states_by_attempt.items() if nth == attempt}
            self.requests.append(Request(request_id, attempt, now, states, told=told))
        self.requests = [request for request in self.requests if request.states]
        return request_id

    def keep(self, states: Iterable[str], active: set[str], now: datetime) -> None:
        """Forget partitions that are done, and note which requests a run is still at work on.

        Args:
            states: of all partitions that need work, as they are now.
            active: those of them that active runs hold.
        """
        needed, held = set(map(whose, states)), set(map(whose, active))
        for request in self.requests:
            request.states = {state for state in request.states if whose(state) in needed}
            if any(whose(state) in held for state in request.states):
                request.last_active = now
        self.requests = [request for request in self.requests if request.states]

    def move(self, request: Request, before: Iterable[str], after: set[str]) -> None:
        """Let partitions wait on in the states `after`, having left `before`."""
        request.states.difference_update(before)
        moved = replace(request, states=after, changed=True)
        for other in self.requests:
            if replace(other, states=after) == moved:
                other.states |= after
                break
        else:
            self.requests.append(moved)
        self.requests = [request for request in self.requests if request.states]


def state_of(key: str, source_version: str) -> str:
    """Stands for a partition in a source version."""
    return digest(key)[:_KEY_LENGTH] + digest(f"{key}\0{source_version}")[_KEY_LENGTH:]


def whose(state: str) -> str:
    """The part of a state that stands for the key alone; the few that share one may wait for each other's failures."""
    return state[:_KEY_LENGTH]


def digest(text: str) -> str:
    """Eight characters that stand for a text."""
    raw = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return base64.urlsafe_b64encode(raw[: _DIGEST_LENGTH * 6 // 8]).decode()


def _split(joined: str) -> set[str]:
    return {joined[start : start + _DIGEST_LENGTH] for start in range(0, len(joined), _DIGEST_LENGTH)}
