"""What the sensor remembers from tick to tick, as its cursor: what it asked for and how often, and what has vanished.

The cursor is JSON that a person can read, with a version, and can be thrown away: what it forgets is asked for once
more. States and keys stand in it as digests of eight characters, since Dagster keeps the cursor of every tick.

    {"version": 2,
     "requests": [{"id": "…", "attempt": 2, "last_active": "2026-01-31T12:00:00+00:00", "states": "…"}],
     "gone": [{"since": "2026-01-31T11:00:00+00:00", "looks": 3, "keys": "…"}],
     "looked": "2026-01-31T12:00:00+00:00"}
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

_VERSION = 2
_DIGEST_LENGTH = 8
_FIRST_WAIT, _LONGEST_WAIT = timedelta(minutes=1), timedelta(days=1)
_LONGEST_PAUSE = timedelta(minutes=10)  # between two looks, of which there are two a minute


@dataclass(slots=True)
class Request:
    """Partitions that one run was asked to embed and that still need it.

    Attributes:
        id: stands in the run's tags.
        attempt: how often they were asked for in this state, from 1.
        last_active: when a run was last seen to hold one of them, or when they were asked for.
        states: digests of key, source version and spec.
        stopped: a person canceled the run; they are not asked for again in this state.
    """

    id: str
    attempt: int
    last_active: datetime
    states: set[str]
    stopped: bool = False

    @property
    def due(self) -> datetime:
        """From when on they may be asked for again: after 1, 2, 4 … minutes, a day at most."""
        return self.last_active + min(_FIRST_WAIT * 2 ** min(self.attempt - 1, 20), _LONGEST_WAIT)


@dataclass(frozen=True, slots=True)
class Gone:
    """Since when, and at how many consecutive looks, a partition was not in the catalog."""

    since: datetime
    looks: int


@dataclass(slots=True)
class SensorCursor:
    """Everything remembered; `gone` goes by digests of keys, `looked` is when the catalog was listed last."""

    requests: list[Request] = field(default_factory=list)
    gone: dict[str, Gone] = field(default_factory=dict)
    looked: datetime | None = None

    @classmethod
    def read(cls, text: str | None, now: datetime) -> SensorCursor:
        """What `write` wrote; nothing for the first tick, and for what is not a cursor, or one of a later version."""
        try:
            return cls._of_document(json.loads(text) if text else {}, now)
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()

    @classmethod
    def _of_document(cls, document: Mapping[str, Any], now: datetime) -> SensorCursor:
        if "asked" in document:  # version 1: a set of states that were never asked for again
            return cls([Request("", 1, now, _split(document["asked"]))])
        if document.get("version") != _VERSION:
            return cls()
        requests = [
            Request(
                found["id"],
                int(found["attempt"]),
                datetime.fromisoformat(found["last_active"]),
                _split(found["states"]),
                bool(found.get("stopped")),
            )
            for found in document["requests"]
        ]
        gone = {
            key: Gone(datetime.fromisoformat(found["since"]), int(found["looks"]))
            for found in document["gone"]
            for key in _split(found["keys"])
        }
        return cls(requests, gone, datetime.fromisoformat(document["looked"]) if document.get("looked") else None)

    def write(self) -> str:
        """The cursor as Dagster keeps it."""
        requests = [
            {
                "id": request.id,
                "attempt": request.attempt,
                "last_active": request.last_active.isoformat(timespec="seconds"),
                "states": "".join(sorted(request.states)),
                **({"stopped": True} if request.stopped else {}),
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
        return json.dumps({"version": _VERSION, "requests": requests, "gone": vanished, **looked})

    def look(self, now: datetime) -> None:
        """Note that the catalog was listed; what was gone before a long pause may have been back in between."""
        if self.looked is None or now - self.looked > _LONGEST_PAUSE:
            self.gone = {}
        self.looked = now

    def ask(self, states_by_attempt: Mapping[str, int], now: datetime) -> str:
        """Remember that one run was asked for these states, each for the n-th time; gives the request's id."""
        request_id = digest(now.isoformat() + "".join(states_by_attempt))
        for request in self.requests:
            request.states -= states_by_attempt.keys()
        for attempt in sorted(set(states_by_attempt.values())):
            states = {state for state, nth in states_by_attempt.items() if nth == attempt}
            self.requests.append(Request(request_id, attempt, now, states))
        self.requests = [request for request in self.requests if request.states]
        return request_id

    def keep(self, states: Iterable[str], active: set[str], now: datetime) -> None:
        """Forget what is no longer needed, and note which requests a run is still at work on.

        Args:
            states: of all partitions that need work.
            active: those of them that active runs hold.
        """
        needed = set(states)
        for request in self.requests:
            request.states &= needed
            if not request.states.isdisjoint(active):
                request.last_active = now
        self.requests = [request for request in self.requests if request.states]


def digest(text: str) -> str:
    """Eight characters that stand for a text."""
    raw = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return base64.urlsafe_b64encode(raw[: _DIGEST_LENGTH * 6 // 8]).decode()


def _split(joined: str) -> set[str]:
    return {joined[start : start + _DIGEST_LENGTH] for start in range(0, len(joined), _DIGEST_LENGTH)}
