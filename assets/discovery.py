"""What is new: one look at the catalog's listing, the output's listing and Dagster's records.

Nothing is changed by looking. The result says which keys Dagster does not know, which source versions have moved,
which valid files are not on record, and which partitions a run should embed next. Doing it again gives the same.

A partition is not asked for when an active run holds it, when it was asked for in the same state before, or when it
failed since its source version was observed last: bad data does not get better by reading it again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

import dagster as dg

from surge_dagster.assets import lineage
from surge_dagster.assets.lineage import Catalogued, failed_since_observed, read_catalogued
from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.outputs import known_space, published
from surge_dagster.assets.partition_keys import to_partition_key
from surge_dagster.assets.source_partitions import changed, observation
from surge_dagster.engine.catalog import Partition
from surge_dagster.engine.encoder.spec import EncodingSpec, Space
from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.output.freshness import OutputState, Status
from surge_dagster.engine.output.store import Store

log = logging.getLogger(__name__)

# Dagster takes about 10 ms for each event of a tick and gives a tick a minute.
_EVENTS_PER_TICK = 1000
_DIGEST_LENGTH = 8


@dataclass(slots=True)
class Discovery:
    """What there is to do, as partition keys and events.

    Attributes:
        order: every partition key as Dagster will have them once the new ones are added.
        new: keys that Dagster does not know yet.
        events: observations of moved source versions and materializations of adopted files.
        chosen: what one run shall embed now, in `order`.
        asked: digests of what was asked for and is still to be embedded, `chosen` included.
        space: the space that they belong to, None when the output is empty.
        summary: one line for a person.
    """

    order: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    events: list[dg.AssetObservation | dg.AssetMaterialization] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    space: Space | None = None
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """How to look.

    Attributes:
        names: of the catalog.
        instance: whose records count.
        store, spec: the output, and the vectors it shall hold.
        refresh_stale: whether changed partitions are asked for, or new ones alone.
        limit: partitions asked for at once, at most.
    """

    names: CatalogNames
    instance: dg.DagsterInstance
    store: Store
    spec: EncodingSpec
    refresh_stale: bool
    limit: int

    def discover(self, partitions: Iterable[Partition], held: set[str] | None, asked: set[str]) -> Discovery:
        """Look once.

        Args:
            partitions: the catalog.
            held: partition keys that active runs may touch, None for all.
            asked: as the last look left it.
        """
        by_key = {to_partition_key(partition.key): partition for partition in partitions}
        catalogued = read_catalogued(self.names, self.instance)
        new = [key for key in by_key if key not in catalogued.registered]
        moved = list(changed(by_key.values(), catalogued.observed))[:_EVENTS_PER_TICK]
        found = Discovery(
            order=[*catalogued.registered, *new],
            new=new,
            events=[observation(self.names, part) for part in moved],
            asked=asked,
        )
        try:
            found.space = known_space(self.names, self.store, self.spec, unattended=True)
        except ConfigError as error:
            found.summary = str(error)
            return found
        free = {} if held is None else {key: part for key, part in by_key.items() if key not in held}
        outputs = OutputState(self.store, found.space.name) if found.space else None
        states = _states(by_key, outputs)
        wanted = self._wanted(by_key, states)
        if outputs:
            idle = {key: part for key, part in free.items() if key not in wanted and states[key] == "fresh"}
            adopted = self._adoptions(idle, outputs, catalogued)
            found.events += adopted[: _EVENTS_PER_TICK - len(found.events)]
        self._choose(found, wanted, free, failed_since_observed(self.names, self.instance, catalogued))
        if unreadable := sum(state is None for state in states.values()):
            found.summary += f", {unreadable:,} whose files cannot be read now"
        return found

    def _choose(self, found: Discovery, wanted: dict[str, str], free: dict[str, Partition], failed: set[str]) -> None:
        found.asked = found.asked & set(wanted.values())
        ready = [key for key, state in wanted.items() if key in free and key not in failed and state not in found.asked]
        place = {key: index for index, key in enumerate(found.order)}
        found.chosen = sorted(ready[: self.limit], key=place.__getitem__)
        found.asked |= {wanted[key] for key in found.chosen}
        counts = {
            "to be embedded": len(wanted),
            "held by active runs": sum(key not in free for key in wanted),
            "failed as they are": sum(key in failed for key in wanted),
        }
        found.summary = f"{len(found.order):,} partitions: " + ", ".join(f"{n:,} {what}" for what, n in counts.items())

    def _wanted(self, by_key: dict[str, Partition], states: Mapping[str, Status | None]) -> dict[str, str]:
        """The partitions that need work, in the catalog's order, each with a digest of the state it is in."""
        needed = ("missing", "stale") if self.refresh_stale else ("missing",)
        spec = json.dumps(asdict(self.spec), sort_keys=True)
        return {
            key: _digest(f"{key}\0{partition.source_version}\0{spec}")
            for key, partition in by_key.items()
            if states[key] in needed
        }

    def _adoptions(
        self, idle: dict[str, Partition], outputs: OutputState, catalogued: Catalogued
    ) -> list[dg.AssetObservation | dg.AssetMaterialization]:
        """Materializations of fresh files that are not on record, once their source version is."""
        adopted: list[dg.AssetObservation | dg.AssetMaterialization] = []
        for key, partition in idle.items():
            if catalogued.observed.get(key) != partition.source_version:
                continue
            receipt = published(outputs, partition.key)
            if receipt and not catalogued.knows(partition.key, receipt.desired_version):
                observed = catalogued.observation_ids.get(key)
                adopted.append(lineage.materialization(self.names, receipt, observed, adopted=True))
        return adopted


def _states(by_key: dict[str, Partition], outputs: OutputState | None) -> dict[str, Status | None]:
    """How each partition's file stands; None where it cannot be read now, so that a run would have to refuse it."""
    states: dict[str, Status | None] = dict.fromkeys(by_key, "missing")
    if outputs is None:
        return states
    outputs.look_at(partition.key for partition in by_key.values())
    for key, partition in by_key.items():
        try:
            states[key] = outputs.status(partition)
        except TransientError as error:
            log.warning("%s", error)
            states[key] = None
    return states


def write_cursor(asked: set[str]) -> str:
    """Digests as the sensor's cursor: eight characters each, since Dagster keeps the cursor of every tick."""
    return json.dumps({"asked": "".join(sorted(asked))})


def read_cursor(cursor: str | None) -> set[str]:
    """What `write_cursor` wrote; nothing for the first tick, or for a cursor that a person has edited."""
    try:
        joined = json.loads(cursor)["asked"] if cursor else ""
    except (ValueError, TypeError, KeyError):
        return set()
    return {joined[start : start + _DIGEST_LENGTH] for start in range(0, len(joined), _DIGEST_LENGTH)}


def _digest(state: str) -> str:
    raw = hashlib.sha256(state.encode("utf-8", "surrogatepass")).digest()
    return base64.urlsafe_b64encode(raw[: _DIGEST_LENGTH * 6 // 8]).decode()
