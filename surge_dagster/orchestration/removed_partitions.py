"""Partitions that Dagster or the output has and that were removed from the source; the nightly
refresh handles them.

The setting `removed_partitions` decides. `report` gives the partition the source version `removed`
once, which the UI shows. `delete` reports the name of its file, then deletes the file in the space
of the settings, then the key. Both record what readers leave out, and both refuse a listing that
may be incomplete (`engine.readers.removed_partitions`).
"""

from __future__ import annotations

from itertools import chain
from typing import Literal

import dagster as dg

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.readers.removed_partitions import (
    find_removed,
    is_removed,
    may_be_removed,
    record_removed,
)
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration.active_runs import held_by_active_runs
from surge_dagster.orchestration.asset_events import removed_partition
from surge_dagster.orchestration.discovery import Listing, list_catalog
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import (
    from_partition_key,
    is_canonical,
    to_partition_key,
)

_REMOVED, _DELETED = "removed", "deleted"


def handle_removed_partitions(
    names: CatalogNames,
    context: dg.OpExecutionContext,
    action: Literal["report", "delete"],
    store: Store,
    space: Space,
) -> None:
    """Report or delete the partitions that the source no longer lists; those that another run holds
    stay."""
    instance = context.instance
    outputs = OutputState(store, space.name)
    held = held_by_active_runs(names, instance, besides=context.run_id)
    listing = list_catalog(names, instance, names.resources(context).catalog)
    sources = listing.catalogued.sources
    listed = {partition.key for partition in listing.partitions.values()}
    files = find_removed(outputs, space, listed)
    removed = removed_keys(listing)
    new = [key for key in removed if sources.get(key) not in (_REMOVED, _DELETED)]
    text = "The source does not list this partition."
    events = (removed_partition(names, key, _REMOVED, text) for key in new)
    report_events(instance, context, list(chain.from_iterable(events)))
    if removed:
        context.log.info(
            f"{counted(len(removed), 'partition')} removed from the source, {len(new):,} of them since the last report"
        )
    keys = dict.fromkeys((*map(from_partition_key, removed), *files))
    refusal = record_removed(outputs, space, files, listed)
    if action == "report":
        if refusal:
            context.log.warning(f"{refusal}.")
        return
    without_file = [key for key in keys if key not in files]
    total = len(listed) + len(without_file)
    if not refusal and not may_be_removed(len(without_file), total):
        refusal = (
            f"{len(without_file):,} of {counted(total, 'partition')} were removed from the source and have no "
            f"file in {space.name}, such as {without_file[0]!r}. Nothing was deleted. If the source's listing is "
            "incomplete, fix it. Else remove what is left of them"
        )
    if refusal:
        raise ConfigError(
            f"{refusal}, and delete them in Dagster on the page of the asset source_partitions."
        )
    for key in keys:
        partition_key, name = to_partition_key(key), file_name(space.name, key)
        # a run may have published it since
        if partition_key in held or not outputs.is_as_listed(name):
            continue
        what = f"Its output {store.location(name)} and its key are deleted."
        if sources.get(partition_key) != _DELETED:
            report_events(
                instance, context, list(removed_partition(names, partition_key, _DELETED, what))
            )
        store.delete(name)
        instance.delete_dynamic_partition(names.partitions_name, partition_key)


def removed_keys(listing: Listing) -> list[str]:
    """The partition keys of Dagster's that the source no longer lists."""
    listed = {partition.key for partition in listing.partitions.values()}
    registered = listing.catalogued.registered
    return [
        key
        for key in registered
        if is_canonical(key) and is_removed(from_partition_key(key), listed)
    ]
