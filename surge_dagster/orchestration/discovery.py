"""What is new: one look at the catalog's listing, the output's listing and Dagster's records.

Looking changes nothing. The result says which keys Dagster does not know, which source versions have moved, which valid
files are not on record, which partitions have vanished, and which ones runs should embed next. Doing it again gives the
same. What one look tells Dagster is bounded; what is left over is found again by the next one.

A partition is not asked for when an active run holds it, or when its content was refused as it is: bad data does
not get better by reading it again. One that failed for another reason is asked for again, after a wait that doubles
each time. A change of its source shortens the wait to an hour and does not end it, or one that changes all the time
would be asked for by each look; only after a success, or when a person canceled the run, does a change make it new.
Other settings make all of them new.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import islice

import dagster as dg

from surge_dagster.assets.source_partitions import changed, observation
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.freshness import OutputState, PublishedFile, Status
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.keys import encode_key, is_hashed
from surge_dagster.orchestration.active_runs import Held
from surge_dagster.orchestration.adoption import Adoptions, adopt
from surge_dagster.orchestration.launch import REQUEST_TAG
from surge_dagster.orchestration.lineage import Catalogued, read_catalogued_again
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outputs import file_states, known_space
from surge_dagster.orchestration.partition_events import AnyEvent
from surge_dagster.orchestration.partition_keys import (
    from_partition_key,
    is_canonical,
    to_partition_key,
    with_short_keys,
)
from surge_dagster.orchestration.refusals import still_refused
from surge_dagster.orchestration.removed_partitions import Departures, Vanishing
from surge_dagster.orchestration.sensor_cursor import Request, SensorCursor, digest, state_of, whose
from surge_dagster.shards import Sharding

# Dagster takes about 10 ms for each event of a tick and gives a tick a minute.
_EVENTS_PER_TICK = 1000
_KEYS_PER_TICK = 10_000


@dataclass(slots=True)
class Discovery:
    """What there is to do, as partition keys and events.

    Attributes:
        order: every partition key as Dagster will have them once the new ones are added.
        new, vanished: keys to add, and to delete with their files.
        events: observations and materializations to store.
        shards: what runs shall embed now, a request's id and its keys in `order` for each.
        cursor: for the next look.
        space: the space that they belong to, None when the output is empty.
        summary: one line for a person.
    """

    order: list[str]
    cursor: SensorCursor
    new: list[str] = field(default_factory=list)
    vanished: list[str] = field(default_factory=list)
    events: list[AnyEvent] = field(default_factory=list)
    shards: list[tuple[str, list[str]]] = field(default_factory=list)
    space: Space | None = None
    summary: str = ""

    @property
    def room(self) -> int:
        """Events that may still be added."""
        return max(0, _EVENTS_PER_TICK - len(self.events))


@dataclass(frozen=True, slots=True)
class Look:
    """How to look.

    Attributes:
        names: of the catalog.
        instance: whose records count.
        store, spec: the output, and the vectors it shall hold.
        refresh_stale: whether changed partitions are asked for, or new ones alone.
        sharding: how many runs are asked for, and how large they may be.
        vanishing: what is done about partitions that the catalog lists no more.
        terms: the settings that decide which content is refused, from `refusal_terms`.
    """

    names: CatalogNames
    instance: dg.DagsterInstance
    store: Store
    spec: EncodingSpec
    refresh_stale: bool
    sharding: Sharding
    vanishing: Vanishing
    terms: str

    def discover(self, partitions: Iterable[Partition], held: Held, cursor: SensorCursor, now: datetime) -> Discovery:
        """Look once.

        Args:
            partitions: the catalog.
            held: what active runs may touch.
            cursor: as the last look left it; changed.
            now: the time of this look.
        """
        listed = list(partitions)  # before the records: a run may be at work meanwhile, and they must not be older
        cursor.look(now)
        catalogued = read_catalogued_again(self.names, self.instance)
        by_key = {to_partition_key(part.key): part for part in with_short_keys(listed, catalogued.registered)}
        new = [key for key in by_key if key not in catalogued.registered]
        order = [*catalogued.registered, *new[:_KEYS_PER_TICK]]
        moved = list(islice(changed(by_key, catalogued.observed), _EVENTS_PER_TICK))
        found = Discovery(order, cursor, new[:_KEYS_PER_TICK])
        found.events += [observation(self.names, partition) for partition in moved]
        missing = [key for key in catalogued.registered if key not in by_key and _may_have_left(key, by_key)]
        departures = self.vanishing.look(missing, catalogued, cursor.gone, now, found.room)
        found.events += departures.events
        notes = (
            [f"{len(new) - len(found.new):,} to be registered by the next ticks"] if len(new) > len(found.new) else []
        )
        try:
            found.space = known_space(self.names, self.store, self.spec, unattended=True)
        except ConfigError as error:
            cursor.gone = departures.gone
            found.summary = str(error)
            return found
        self._let_go(found, departures, missing, held, catalogued, now)
        free = {key: part for key, part in by_key.items() if key not in held} if held.run_ids else by_key
        outputs = OutputState(self.store, found.space.name, found.space.file_format) if found.space else None
        fresh: dict[str, PublishedFile] = {}
        states = file_states(by_key, outputs, fresh)
        refused = still_refused(catalogued, by_key, self.terms)
        unknown = [key for key, file in fresh.items() if not catalogued.knows(key, file.facts.desired_version)]
        adopted = Adoptions()
        if outputs and found.space:
            candidates = {key: (by_key[key], fresh[key]) for key in unknown if key in free and key not in refused}
            adopted = adopt(self.names, outputs, found.space, candidates, catalogued, found.room)
        found.events += adopted.events
        states.update(dict.fromkeys(adopted.damaged, "missing"))
        # Until it is known what became of an attempt, the next one waits as if nothing had.
        unsure = _in_states(by_key, unknown) if cursor.requests else {}
        cursor.mean(digest(json.dumps([asdict(self.spec), self.terms], sort_keys=True)))
        self._choose(found, self._wanted(by_key, states), unsure, free, held, refused, catalogued.embedding_ids, now)
        count = Counter(states.values())
        if foreign := count["foreign"]:
            notes.append(f"{foreign:,} whose place is taken by a file of another space")
        if unreadable := count[None]:
            notes.append(f"{unreadable:,} whose files cannot be read now")
        if adopted.damaged:
            notes.append(f"{len(adopted.damaged):,} whose files were not what they say")
        if adopted.too_large:
            notes.append(f"{adopted.too_large:,} to be adopted by the next refresh, since their files are large")
        found.summary = ", ".join(filter(None, [found.summary, departures.summary, *notes]))
        return found

    def _let_go(
        self,
        found: Discovery,
        departures: Departures,
        missing: Sequence[str],
        held: Held,
        catalogued: Catalogued,
        now: datetime,
    ) -> None:
        told = len(departures.events)
        self.vanishing.plan(departures, missing, held, catalogued, self.store, found.space, now, found.room)
        found.events += departures.events[told:]
        found.vanished = departures.delete
        found.cursor.gone = departures.gone

    def _choose(
        self,
        found: Discovery,
        wanted: dict[str, str],
        unsure: dict[str, str],
        free: dict[str, Partition],
        held: Held,
        refused: set[str],
        told: Mapping[str, int],
        now: datetime,
    ) -> None:
        active = {state for key, state in wanted.items() if key not in free}
        cursor = found.cursor
        kept = unsure | wanted
        busy = {state for key, state in kept.items() if key not in free}
        cursor.keep((state for key, state in kept.items() if key not in refused), busy, now)
        self._carry_over(cursor, {key: state for key, state in wanted.items() if key in free}, kept, told)
        attempts: dict[str, int] = {}
        waiting: list[Request] = []
        for request in cursor.requests:
            if request.due <= now and not self._was_stopped(request):
                attempts |= dict.fromkeys(request.states, request.attempt + 1)
            else:
                attempts |= dict.fromkeys(request.states, 0)
                waiting.append(request)
        place = {key: index for index, key in enumerate(found.order)} if wanted else {}
        ready = [
            key
            for key, state in wanted.items()
            if key in free and key in place and key not in refused and attempts.get(state, 1)
        ]
        # What was never tried comes first: it must not wait behind what fails again and again.
        ready.sort(key=lambda key: attempts.get(wanted[key], 1))
        chosen = sorted(ready[: self.sharding.most], key=place.__getitem__)
        for keys in self.sharding.cut(chosen, free):
            nth = {wanted[key]: attempts.get(wanted[key], 1) for key in keys}
            found.shards.append((cursor.ask(nth, now, max(told.values(), default=-1)), keys))
        counts = {
            "to be embedded": len(wanted),
            f"held by {held.by}" if active else "held by active runs": len(active),
            "refused as they are": sum(key in refused for key in wanted),
        }
        said = [f"{n:,} {what}" for what, n in counts.items()]
        at_work = set(map(whose, active))
        said += _waits([(request, sum(whose(state) not in at_work for state in request.states)) for request in waiting])
        found.summary = f"{len(found.order):,} partitions: " + ", ".join(said)

    def _carry_over(
        self, cursor: SensorCursor, free: Mapping[str, str], kept: Mapping[str, str], told: Mapping[str, int]
    ) -> None:
        """Let what has changed since it was asked for wait on, unless it was done meanwhile or its run was canceled.

        Args:
            free: partitions that need work and that no run holds, with their states.
            kept: the states of all whose requests count.
            told: storage id of each partition's last materialization, whichever version that was made from.
        """
        asked = {state for request in cursor.requests for state in request.states}
        changed = {whose(state): key for key, state in free.items() if state not in asked} if asked else {}
        present = set(kept.values()) if changed else set[str]()
        for request in list(cursor.requests):
            left = {state: changed[whose(state)] for state in request.states - present if whose(state) in changed}
            if left:
                undone = {free[key] for key in left.values() if told.get(key, -1) <= request.told}
                cursor.move(request, left, set() if self._was_stopped(request) else undone)

    def _was_stopped(self, request: Request) -> bool:
        """Whether a person canceled the last run that was made for a request."""
        if not request.stopped and request.id:
            runs = self.instance.get_runs(dg.RunsFilter(tags={REQUEST_TAG: request.id}), limit=1)
            request.stopped = bool(runs) and runs[0].status == dg.DagsterRunStatus.CANCELED
        return request.stopped

    def _wanted(self, by_key: dict[str, Partition], states: Mapping[str, Status | None]) -> dict[str, str]:
        """The partitions that need work, in the catalog's order, each with a digest of the state it is in."""
        needed = ("missing", "stale") if self.refresh_stale else ("missing",)
        return _in_states(by_key, (key for key in by_key if states[key] in needed))


def _in_states(by_key: Mapping[str, Partition], keys: Iterable[str]) -> dict[str, str]:
    return {key: state_of(key, by_key[key].source_version) for key in keys}


def _may_have_left(partition_key: str, listed: Container[str]) -> bool:
    """Whether a key that is not listed may belong to a partition that has left the catalog.

    A long key stands in its files alone, so while they cannot be read its folder is listed under its own name.
    """
    if not is_canonical(partition_key):
        return False
    name = encode_key(from_partition_key(partition_key))
    return not is_hashed(name) or to_partition_key(name) not in listed


def _waits(waiting: Sequence[tuple[Request, int]]) -> list[str]:
    """What a person wants to know of requests that are not made again yet, each with its number of partitions."""
    said = []
    if stopped := sum(count for request, count in waiting if request.stopped):
        said.append(f"{stopped:,} left alone because their run was canceled")
    failed = [(request, count) for request, count in waiting if count and not request.stopped]
    if failed:
        next_one = min((request for request, _ in failed), key=lambda request: request.due)
        said.append(
            f"{sum(count for _, count in failed):,} asked for and not done (attempt "
            f"{max(request.attempt for request, _ in failed)}), the next are asked for again from "
            f"{next_one.due.isoformat(sep=' ', timespec='seconds')}"
        )
    return said
