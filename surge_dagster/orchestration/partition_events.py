"""An event of one partition in plain values, of which a run logs two for each of thousands of partitions.

Dagster's own classes look at each of their values and wrap it, which takes longer than storing the event does. Events
of partitions differ in their values alone, so Dagster's objects are made of a few of them, by whoever needs one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import dagster as dg

Event = dg.AssetMaterialization | dg.AssetObservation


class FilePath(str):
    """A path in an event's metadata."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PartitionEvent:
    """An event before it is Dagster's.

    Attributes:
        kind: Dagster's class of it.
        asset_key, partition: what it is about.
        metadata: by label; strings, numbers, truth values and `FilePath`s.
        tags: as Dagster has them, its own ones and constants only: Dagster checks the values of others.
    """

    kind: type[dg.AssetMaterialization] | type[dg.AssetObservation]
    asset_key: dg.AssetKey
    partition: str
    metadata: Mapping[str, str | int | float]
    tags: Mapping[str, str]

    def made(self) -> Event:
        """Dagster's object."""
        metadata = {
            label: dg.MetadataValue.path(value) if type(value) is FilePath else value
            for label, value in self.metadata.items()
        }
        return self.kind(self.asset_key, partition=self.partition, metadata=metadata, tags=self.tags)


AnyEvent = Event | PartitionEvent


def made(event: AnyEvent) -> Event:
    """Dagster's object of an event."""
    return event.made() if isinstance(event, PartitionEvent) else event


def class_of(event: AnyEvent) -> type[Event]:
    """Dagster's class of an event."""
    return event.kind if isinstance(event, PartitionEvent) else type(event)
