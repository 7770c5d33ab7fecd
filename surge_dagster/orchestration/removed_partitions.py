"""Partitions that Dagster knows and the catalog no longer lists.

What is done about them is the setting `vanished`. Nothing is done at the first look: a source may be listed while it is
written. To `report` is to observe the partition once, with the source version `gone`, so that it can be seen in the UI.
To `delete` is to report it first, and later, when it stayed away for the grace time, to remove its key and its file in
the space that the settings mean, with an observation that says so. Looks and time count from the start after a pause
in which nobody looked. However long they were away, no more partitions are deleted than a share of the catalog: a
source that suddenly lists far less is a mistake until a person says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import dagster as dg

from surge_dagster.assets.source_partitions import DATA_VERSION_TAG
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.files.file_formats import file_name
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration.lineage import Catalogued
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import from_partition_key
from surge_dagster.orchestration.sensor_cursor import Gone, digest
from surge_dagster.settings import VanishedPolicy

GONE, DELETED = "gone", "deleted"
_LOOKS = 3
# A request to a bucket for each.
_DELETED_PER_TICK = 500
_SECONDS = 15  # of a tick, which Dagster gives a minute


@dataclass(slots=True)
class Departures:
    """What is to be said and done of vanished partitions.

    Attributes:
        events: observations to store.
        delete: partition keys whose files are to be removed, and then they themselves.
        gone: for the cursor.
        summary: for a person; empty when there are none.
    """

    events: list[dg.AssetObservation] = field(default_factory=list)
    delete: list[str] = field(default_factory=list)
    gone: dict[str, Gone] = field(default_factory=dict)
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Vanishing:
    """How vanished partitions are treated.

    Attributes:
        names: of the catalog.
        policy: the setting `vanished`.
        grace: how long a partition must have stayed away before it is deleted.
        share: of the catalog that may be away for anything to be deleted; one partition always may.
    """

    names: CatalogNames
    policy: VanishedPolicy
    grace: timedelta
    share: float

    def look(
        self, missing: list[str], catalogued: Catalogued, before: dict[str, Gone], now: datetime, room: int
    ) -> Departures:
        """Report what has to be reported.

        Args:
            missing: registered partition keys that the catalog does not list.
            catalogued: what is on record.
            before: `gone` as the last look left it; empty after a long pause.
            now: the time of this look.
            room: events that this tick may still store.
        """
        found = Departures()
        if not missing:
            return found
        found.summary = f"{len(missing):,} vanished from the source"
        if self.policy == "keep":
            found.summary += " (kept)"
            return found
        for key in missing:
            known = before.get(digest(key))
            looks = Gone(known.since, min(known.looks + 1, _LOOKS)) if known else Gone(now, 1)
            reported = catalogued.observed.get(key) in (GONE, DELETED)
            if not reported or self.policy == "delete":
                found.gone[digest(key)] = looks
            if not reported and looks.looks >= _LOOKS and len(found.events) < room:
                found.events.append(self._observation(key, GONE, "The source does not list this partition any more."))
        return found

    def plan(
        self,
        found: Departures,
        missing: Iterable[str],
        held: Container[str],
        catalogued: Catalogued,
        store: Store,
        space: Space | None,
        now: datetime,
        room: int,
    ) -> None:
        """Choose those that stayed away long enough and are on record as gone, for `remove`; adds to `found`."""
        if self.policy != "delete":
            return
        missing = list(missing)
        due = [
            key
            for key in missing
            if catalogued.observed.get(key) in (GONE, DELETED) and key not in held and self._is_over(found, key, now)
        ]
        if due and len(missing) > max(1, int(self.share * len(catalogued.registered))):
            found.summary += (
                f"; nothing is deleted, since more than vanished_share ({self.share:g}) of the catalog would be. "
                "Put the source right, or delete them in Dagster"
            )
            return
        for key in due[: min(room, _DELETED_PER_TICK)]:
            what = "Its key is removed; there was no output."
            if space is not None:
                what = f"Its output {store.location(_file_of(key, space))} and its key are removed."
            if catalogued.observed.get(key) != DELETED:  # by a tick that was lost before it removed them
                said = f"The source has not listed this partition for {self.grace}. {what}"
                found.events.append(self._observation(key, DELETED, said))
            found.delete.append(key)
        if due:
            found.summary += f", {len(found.delete):,} deleted"

    def remove(
        self, partition_keys: Iterable[str], gone: dict[str, Gone], store: Store, space: Space | None
    ) -> tuple[list[str], str]:
        """Remove the files of partitions that were planned for it.

        Args:
            gone: forgets those that are removed; the others are planned again.

        Returns:
            The partition keys whose files are removed, and what kept it from removing them all; empty for nothing.
        """
        removed: list[str] = []
        until = time.monotonic() + _SECONDS
        for key in partition_keys:
            if time.monotonic() > until:
                return removed, "the other files are removed by the next ticks"
            try:
                if space is not None:
                    store.delete(_file_of(key, space))
            except SurgeError as error:
                return removed, str(error)
            gone.pop(digest(key), None)
            removed.append(key)
        return removed, ""

    def _is_over(self, found: Departures, key: str, now: datetime) -> bool:
        gone = found.gone[digest(key)]
        return gone.looks >= _LOOKS and now - gone.since >= self.grace

    def _observation(self, key: str, version: str, said: str) -> dg.AssetObservation:
        metadata = {
            "key": dg.MetadataValue.text(from_partition_key(key)),
            "source_version": dg.MetadataValue.text(version),
            "vanished": dg.MetadataValue.text(said),
        }
        return dg.AssetObservation(
            self.names.source_partitions,
            partition=key,
            description=said,
            metadata=metadata,
            tags={DATA_VERSION_TAG: version},
        )


def _file_of(partition_key: str, space: Space) -> str:
    return file_name(space.name, from_partition_key(partition_key), space.file_format)
