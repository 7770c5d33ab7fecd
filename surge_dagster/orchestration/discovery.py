"""The catalog compared with Dagster's records of it: partitions that are new, need work, or were
removed from the source.

The setting `removed_partitions` decides about the latter. `report` gives the partition the source
version `removed` once, which the UI shows. `delete` logs the name of its file, then deletes the
file in the space of the settings, then the key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.readers.removed_partitions import handle_removed, is_removed
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration.asset_events import (
    REMOVED,
    SourceEvent,
    source_version,
)
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import (
    from_partition_key,
    in_groups,
    to_partition_key,
    with_short_keys,
)
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

    for keys in in_groups(list(unreported), _BATCH):
        if time.monotonic() > until:
            break
        events: list[SourceEvent] = []
        for key in keys:
            partition = unreported.pop(key)
            version = partition.source_version
            if sources.get(key) != version:
                events += source_version(
                    names, key, version, partition.source_rows, changed=key in sources
                )
        report_events(instance, None, events)
        new = [key for key in keys if key not in registered]
        if new:
            instance.add_dynamic_partitions(names.partitions_name, new)
    return set(unreported)


def states_of_unfinished(listing: Listing, store: Store, space: Space | None) -> dict[str, str]:
    """Return the partitions without a fresh file on record, with the state of their files.

    The state is a `Status`, or "unknown" for a fresh file that Dagster has no record of: a run was
    killed before it reported the file, or another program made it. The next run adopts it.
    """
    if space is None:
        return dict.fromkeys(listing.partitions, "missing")
    outputs = OutputState(store, space.name)
    outputs.look_at(partition.key for partition in listing.partitions.values())
    states: dict[str, str] = {}
    for key, partition in listing.partitions.items():
        freshness = outputs.freshness(partition)
        file = freshness.file
        if freshness.error is not None:
            log.warning("%s", freshness.error)
        if file is None or freshness.status != "fresh":
            states[key] = freshness.status
        elif not listing.catalogued.knows(
            key, file.facts.desired_version, partition.source_version
        ):
            states[key] = "unknown"
    return states


def handle_removed_partitions(
    names: CatalogNames,
    context: dg.OpExecutionContext,
    source: Source,
    outputs: OutputState,
    space: Space,
    *,
    delete: bool,
) -> None:
    """Report or delete the partitions that the source no longer lists.

    Args:
        outputs: as they are now; the source is listed after them.
    """
    listing = list_catalog(names, names.embeddings, context.instance, source)
    refusal = handle_removed(
        outputs,
        space,
        listing.catalog_keys,
        _DagsterReporter(names, context, listing),
        delete=delete,
        without_file=list(map(from_partition_key, removed_keys(listing))),
    )
    if refusal and delete:
        raise ConfigError(
            f"{refusal}, and delete them in Dagster on the page of the asset source_partitions."
        )
    if refusal:
        context.log.warning(f"{refusal}.")


class _DagsterReporter:
    """See `RemovalReporter`."""

    def __init__(
        self,
        names: CatalogNames,
        context: dg.OpExecutionContext,
        listing: Listing,
    ) -> None:
        self._names = names
        self._context = context
        self._listing = listing

    def found(self, keys: Sequence[str], refusal: str | None) -> None:
        removed = removed_keys(self._listing)
        sources = self._listing.catalogued.sources
        new = [key for key in removed if sources.get(key) != REMOVED]
        events: list[SourceEvent] = []
        for key in new:
            events += source_version(self._names, key, REMOVED, changed=True)
        report_events(self._context.instance, self._context, events)
        if removed:
            self._context.log.info(
                f"{counted(len(removed), 'partition')} removed from the source, "
                f"{len(new):,} of them since the last report"
            )

    def deleting(self, key: str, location: str) -> None:
        # before it happens
        self._context.log.info(
            f"partition {key!r} was removed from the source: {location} and its key are deleted"
        )

    def deleted(self, key: str) -> None:
        instance = self._context.instance
        instance.delete_dynamic_partition(self._names.partitions_name, to_partition_key(key))


def removed_keys(listing: Listing) -> list[str]:
    """Return the partition keys of Dagster that the source no longer lists."""
    unlisted = [key for key in listing.catalogued.registered if key not in listing.partitions]
    if not unlisted:
        return []
    listed = listing.catalog_keys
    return [key for key in unlisted if is_removed(from_partition_key(key), listed)]
