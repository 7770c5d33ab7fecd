"""What a tick finds: the catalog's listing beside Dagster's records, and the partitions that need a run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import dagster as dg

from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration.asset_events import observation
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outputs import file_states
from surge_dagster.orchestration.partition_keys import to_partition_key, with_short_keys
from surge_dagster.orchestration.records import Catalogued, read_catalogued_again
from surge_dagster.resources import CatalogSource

# Dagster gives a tick a minute. A batch takes 0.3 to 1 s, or 10 to 25 s where Dagster stores events one by one.
_REPORT_SECONDS = 20.0
_BATCH = 1_000
_MOST_REPORTED = 10_000


@dataclass(frozen=True, slots=True)
class Listing:
    """The catalog's partitions, beside what Dagster has on record of them.

    Attributes:
        partitions: by partition key, in the source's order.
        catalogued: the records.
        unreported: keys that Dagster does not know, or whose source version it has not observed.
    """

    partitions: dict[str, Partition]
    catalogued: Catalogued
    unreported: list[str]


def list_catalog(names: CatalogNames, instance: dg.DagsterInstance, catalog: CatalogSource) -> Listing:
    """List the source, then read Dagster's records: a run that works meanwhile must not look undone.

    Raises:
        ConfigError: the source cannot be listed.
        TransientError: the source does not answer.
    """
    listed = list(catalog.open())
    catalogued = read_catalogued_again(names, instance)
    partitions = {to_partition_key(part.key): part for part in with_short_keys(listed, catalogued.registered)}
    moved = {to_partition_key(partition.key) for partition in catalogued.moved(partitions)}
    return Listing(
        partitions, catalogued, [key for key in partitions if key in moved or key not in catalogued.registered]
    )


def observations(names: CatalogNames, listing: Listing, keys: Iterable[str]) -> list[dg.AssetObservation]:
    """The source versions of those of the partitions whose version on record is another one."""
    observed = listing.catalogued.observed
    moved = (listing.partitions[key] for key in keys if observed.get(key) != listing.partitions[key].source_version)
    return [observation(names, partition) for partition in moved]


def report_changes(names: CatalogNames, instance: dg.DagsterInstance, listing: Listing) -> set[str]:
    """Observe and register what Dagster does not know yet, as much as a tick has time for.

    Returns:
        Partition keys that are left to the next tick.
    """
    until = time.monotonic() + _REPORT_SECONDS
    left = set(listing.unreported)
    for start in range(0, min(len(listing.unreported), _MOST_REPORTED), _BATCH):
        if time.monotonic() > until:
            break
        keys = listing.unreported[start : start + _BATCH]
        report_events(instance, None, observations(names, listing, keys))
        new = [key for key in keys if key not in listing.catalogued.registered]
        if new:
            instance.add_dynamic_partitions(names.partitions_name, new)
        left.difference_update(keys)
    return left


def states_of_unfinished(listing: Listing, store: Store, space: Space | None) -> dict[str, str | None]:
    """The partitions that are not up to date and on record, in the source's order, each with the state of its file.

    The state is a `Status`, None for a file that cannot be read now, or "unknown" for a fresh file that Dagster has no
    record of: a run was killed before it reported the file, or another program made it. The next run adopts it.

    Raises:
        StoreUnavailable: the store is down.
    """
    outputs = OutputState(store, space.name, space.file_format) if space else None
    fresh: dict[str, PublishedFile] = {}
    states: dict[str, str | None] = dict(file_states(listing.partitions, outputs, fresh))
    for key, file in fresh.items():
        version = listing.partitions[key].source_version
        if listing.catalogued.knows(key, file.facts.desired_version, version):
            del states[key]
        else:
            states[key] = "unknown"
    return states
