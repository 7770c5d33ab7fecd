"""Partitions that were removed from the source; the nightly refresh handles them.

The setting `removed_partitions` decides. `report` gives the partition the source version `removed`
once, which the UI shows. `delete` logs the name of its file, then deletes the file in the space of
the settings, then the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import dagster as dg

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.readers.removed_partitions import handle_removed, is_removed
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration.asset_events import REMOVED, SourceEvent, removed_partition
from surge_dagster.orchestration.discovery import Listing, list_catalog
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import from_partition_key, to_partition_key


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
    removed = removed_keys(listing)
    without_file = list(map(from_partition_key, removed))
    reporter = _DagsterReporter(names, context, listing.catalogued.sources, removed)
    refusal = handle_removed(
        outputs,
        space,
        listing.catalog_keys,
        reporter,
        delete=delete,
        without_file=without_file,
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
        sources: Mapping[str, str],
        removed: Sequence[str],
    ) -> None:
        self._names = names
        self._context = context
        self._sources = sources
        self._removed = removed

    def found(self, keys: Sequence[str], refusal: str | None) -> None:
        new = [key for key in self._removed if self._sources.get(key) != REMOVED]
        events: list[SourceEvent] = []
        for key in new:
            events += removed_partition(self._names, key)
        report_events(self._context.instance, self._context, events)
        if self._removed:
            self._context.log.info(
                f"{counted(len(self._removed), 'partition')} removed from the source, "
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
    listed = listing.catalog_keys
    registered = listing.catalogued.registered
    return [key for key in registered if is_removed(from_partition_key(key), listed)]
