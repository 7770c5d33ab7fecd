"""What the asset `current_space` shows: the space that readers use, and all spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import space_of_readers
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration.asset_events import DATA_VERSION_TAG
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.names import CatalogNames


def report_readers_space(
    names: CatalogNames,
    context: dg.OpExecutionContext,
    store: Store,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Report the space that readers use and all spaces if they have changed; never raises.

    Args:
        more: further metadata of the event.
    """
    try:
        space = space_of_readers(store)
        metadata = {**_shown_spaces(store, space), **(more or {})}
    except SurgeError as error:
        context.log.warning(f"the space that readers use is not known: {error}")
        return
    records = context.instance.fetch_materializations(names.current_space, limit=1).records
    last = records[0].asset_materialization if records else None
    if last is not None and last.metadata.get("spaces") == metadata["spaces"]:
        return
    # Not an observation where readers stay with their space: the asset's page would go on showing
    # the earlier table.
    text = f"{space.title} ({space.name}) is the space of {store.url} that readers use"
    tags = {DATA_VERSION_TAG: space.name}
    report_events(
        context.instance,
        context,
        [dg.AssetMaterialization(names.current_space, text, metadata, tags=tags)],
    )


def _shown_spaces(store: Store, space: Space) -> Mapping[str, Any]:
    """Return metadata of the space that readers use, with a table of all spaces by title."""
    spaces = sorted(list_spaces(store), key=lambda each: each.title)
    rows = [
        {
            "title": each.title,
            "space": each.name,
            "model": each.requested.model,
            "is_current": each.name == space.name,
        }
        for each in spaces
    ]
    return {
        "space_title": space.title,
        "space": space.name,
        "model": space.requested.model,
        "dimension": space.dimension,
        "location": store.location(space.name),
        "spaces": dg.MetadataValue.table([dg.TableRecord(row) for row in rows]),
    }
