"""The storage ids that events got; other events point at them."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from surge_dagster.orchestration.partition_events import Event

_PAGE = 1_000


class StorageIds:
    """Finds the storage ids of events where what stores them does not tell.

    Args:
        instance: where the events are stored.
        run_id: of the run that stores them.
    """

    def __init__(self, instance: dg.DagsterInstance, run_id: str) -> None:
        self._instance = instance
        self._run_id = run_id
        self._seen: dict[dg.AssetKey, int] = {}

    def before(self, events: Sequence[Event]) -> None:
        """Note what is there already; called before events of one kind and asset are stored."""
        asset = events[0].asset_key
        if events[0].partition is None:
            newest = self._instance.fetch_materializations(asset, limit=1).records
            self._seen[asset] = newest[0].storage_id if newest else 0

    def after(self, events: Sequence[Event]) -> list[int | None]:
        """The storage ids of events that were just stored, with two or three queries for all of them.

        Args:
            events: observations or materializations of partitions, or materializations of an asset without partitions.
        """
        asset = events[0].asset_key
        if events[0].partition is None:
            return self._of_unpartitioned(asset, len(events))
        partitions = {event.partition for event in events if event.partition is not None}
        found = self._instance.get_latest_storage_id_by_partition(asset, kind_of(events[0]), partitions)
        return [found.get(event.partition or "") for event in events]

    def _of_unpartitioned(self, asset: dg.AssetKey, count: int) -> list[int | None]:
        # Another run may write events of the same asset at the same time.
        ours: list[int | None] = []
        more = True
        while more:
            since = dg.AssetRecordsFilter(asset, after_storage_id=self._seen[asset])
            page = self._instance.fetch_materializations(since, limit=_PAGE, ascending=True)
            ours += [record.storage_id for record in page.records if record.run_id == self._run_id]
            if page.records:
                self._seen[asset] = page.records[-1].storage_id
            more = page.has_more and bool(page.records)
        return ours if len(ours) == count else [None] * count


def kind_of(event: Event) -> dg.DagsterEventType:
    """What Dagster calls an event of this class."""
    if isinstance(event, dg.AssetMaterialization):
        return dg.DagsterEventType.ASSET_MATERIALIZATION
    return dg.DagsterEventType.ASSET_OBSERVATION
