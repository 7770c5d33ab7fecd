"""The catalog with Dagster's records of it, and the partitions that need work."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import dagster as dg

from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration.asset_events import SourceEvent, source_version
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import to_partition_key, with_short_keys
from surge_dagster.orchestration.records import Catalogued, read_catalogued

log = logging.getLogger(__name__)

# Dagster gives a tick a minute. A batch takes 0.3 to 1 s, or 10 to 25 s where Dagster stores events
# one by one.
_REPORT_SECONDS = 20.0
_BATCH = 1_000


@dataclass(frozen=True, slots=True)
class Listing:
    """Partitions by partition key, in the source's order, and Dagster's records of them."""

    partitions: dict[str, Partition]
    catalogued: Catalogued

    @property
    def catalog_keys(self) -> set[str]:
        return {partition.key for partition in self.partitions.values()}


def list_catalog(
    names: CatalogNames, asset: dg.AssetKey, instance: dg.DagsterInstance, source: Source
) -> Listing:
    """List the source, then read Dagster's records, with the files that an asset shows."""
    # In this order a run that ends in the time between is not missed.
    listed = list(source)
    catalogued = read_catalogued(names, asset, instance)
    short = with_short_keys(listed)
    return Listing({to_partition_key(partition.key): partition for partition in short}, catalogued)


def report_changes(names: CatalogNames, instance: dg.DagsterInstance, listing: Listing) -> set[str]:
    """Report and register what Dagster lacks, as far as a tick has time; return the other keys."""
    until = time.monotonic() + _REPORT_SECONDS
    registered = listing.catalogued.registered
    sources = listing.catalogued.sources
    unreported: dict[str, Partition] = {}
    for key, partition in listing.partitions.items():
        if key not in registered or sources.get(key) != partition.source_version:
            unreported[key] = partition

    keys = list(unreported)
    for start in range(0, len(keys), _BATCH):
        if time.monotonic() > until:
            break
        events: list[SourceEvent] = []
        for key in keys[start : start + _BATCH]:
            partition = unreported.pop(key)
            if sources.get(key) != partition.source_version:
                events += source_version(names, partition, changed=key in sources)
        report_events(instance, None, events)
        new = [key for key in keys[start : start + _BATCH] if key not in registered]
        if new:
            instance.add_dynamic_partitions(names.partitions_name, new)
    return set(unreported)


def states_of_unfinished(
    listing: Listing, store: Store, space: Space | None
) -> dict[str, str | None]:
    """Return the partitions without a fresh file on record, with the state of their files.

    The state is a `Status`, None for a file that cannot be read now, or "unknown" for a fresh file
    that Dagster has no record of: a run was killed before it reported the file, or another program
    made it. The next run adopts it.
    """
    if space is None:
        return dict.fromkeys(listing.partitions, "missing")
    outputs = OutputState(store, space.name)
    outputs.look_at(partition.key for partition in listing.partitions.values())
    states: dict[str, str | None] = {}
    for key, partition in listing.partitions.items():
        freshness = outputs.freshness(partition)
        status = freshness.status
        file = freshness.file
        if freshness.error is not None:
            log.warning("%s", freshness.error)
            states[key] = None
            continue
        if file is None or status != "fresh":
            states[key] = status
        elif not listing.catalogued.knows(
            key, file.facts.desired_version, partition.source_version
        ):
            states[key] = "unknown"
    return states
