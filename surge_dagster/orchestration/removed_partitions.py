"""Partitions that Dagster has and that were removed from the source; the nightly refresh reports or deletes them.

The setting `removed_partitions` decides. `report` gives the partition the source version `removed` once, which the UI
shows. `delete` reports the name of its file, then deletes the file in the space of the settings, then the key. More
than a tenth of the catalog is never deleted: such a listing may be incomplete.
"""

from __future__ import annotations

from collections.abc import Container
from itertools import chain
from typing import Literal

import dagster as dg

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.keys import encode_key, is_hashed
from surge_dagster.orchestration.active_runs import held_by_active_runs
from surge_dagster.orchestration.asset_events import removed_partition
from surge_dagster.orchestration.discovery import Listing, list_catalog
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import from_partition_key, is_canonical, to_partition_key

_REMOVED, _DELETED = "removed", "deleted"
_LARGEST_SHARE = 0.1  # of the catalog that may be deleted; one partition always may


def handle_removed_partitions(
    names: CatalogNames, context: dg.OpExecutionContext, action: Literal["report", "delete"], store: Store, space: Space
) -> None:
    """Report or delete the partitions that the source no longer lists; those that another run holds stay."""
    instance = context.instance
    held = held_by_active_runs(names, instance, besides=context.run_id)
    listing = list_catalog(names, instance, names.resources(context).catalog)
    registered, sources = listing.catalogued.registered, listing.catalogued.sources
    removed = removed_keys(listing)
    new = [key for key in removed if sources.get(key) not in (_REMOVED, _DELETED)]
    text = "The source does not list this partition."
    events = (removed_partition(names, key, _REMOVED, text) for key in new)
    report_events(instance, context, list(chain.from_iterable(events)))
    if removed:
        context.log.info(
            f"{counted(len(removed), 'partition')} removed from the source, {len(new):,} of them since the last report"
        )
    if action == "report":
        return
    if len(removed) > max(1, int(_LARGEST_SHARE * len(registered))):
        raise ConfigError(
            f"{len(removed):,} of {len(registered):,} partitions were removed from the source, such as {removed[0]!r}. "
            f"Nothing was deleted, since at most {_LARGEST_SHARE:.0%} of the catalog may be at a time; everything else "
            "was embedded. If the source's listing is incomplete, fix it. If the partitions are no longer needed, "
            "delete them in Dagster on the page of the asset source_partitions."
        )
    for key in removed:
        if key in held:
            continue
        name = file_name(space.name, from_partition_key(key), space.file_format)
        what = f"Its output {store.location(name)} and its key are deleted."
        if sources.get(key) != _DELETED:
            report_events(instance, context, list(removed_partition(names, key, _DELETED, what)))
        store.delete(name)
        instance.delete_dynamic_partition(names.partitions_name, key)


def removed_keys(listing: Listing) -> list[str]:
    """The partition keys of Dagster's that the source no longer lists."""
    listed = listing.partitions
    return [key for key in listing.catalogued.registered if key not in listed and _may_be_removed(key, listed)]


def _may_be_removed(partition_key: str, listed: Container[str]) -> bool:
    """Whether a key that is not listed belongs to a partition that was removed."""
    if not is_canonical(partition_key):
        return False
    # A long key is read from the partition's files; while they cannot be read, the folder is listed under its own name.
    name = encode_key(from_partition_key(partition_key))
    return not is_hashed(name) or to_partition_key(name) not in listed
