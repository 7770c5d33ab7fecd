"""The space of the settings, which runs fill, and the space that readers use.

`embeddings` shows the files that readers get. Otherwise an asset that depends on it would be
materialized for a file that it does not read. The files of any other space are shown by
`next_space`, until a switch reports them as materializations of `embeddings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.current_space import named_space, space_of_readers
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import find_space, list_spaces, nearest_spaces
from surge_dagster.engine.run.report import Receipt
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration.asset_events import (
    DATA_VERSION_TAG,
    embedding,
    rows_set_aside,
    whole_output,
)
from surge_dagster.orchestration.dagster_internals import Event
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.launch import in_backfill
from surge_dagster.orchestration.names import CatalogNames, CatalogResources
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.records import read_catalogued


def asset_of(names: CatalogNames, store: Store, space: Space | None) -> dg.AssetKey:
    """Return the asset that shows the files of a space.

    Args:
        space: None for one that is not begun yet.
    """
    try:
        current = space_of_readers(store)
    except ConfigError:  # there is no space yet, or readers have to name one
        return names.embeddings
    if space is None:
        return names.next_space
    if current.derived:
        is_read = space.name == current.derived.parent
    else:
        is_read = space.spec_sha256 == current.spec_sha256
    return names.embeddings if is_read else names.next_space


def report_files(names: CatalogNames, context: dg.OpExecutionContext, store: Store) -> None:
    """Report the files of the space that readers use as materializations of `embeddings`, unless
    they are on record."""
    space = space_of_readers(store)
    if space.derived:
        space = named_space(store, space.derived.parent)
    catalogued = read_catalogued(names, names.embeddings, context.instance)
    events: list[Event] = []
    for name, file in OutputState(store, space.name).files().items():
        if not isinstance(file, PublishedFile):
            continue
        key = to_partition_key(file.facts.partition_key)
        is_on_record = catalogued.embedded.get(key) == file.facts.desired_version
        if is_on_record or key not in catalogued.registered:
            continue
        receipt = Receipt.of(file.facts, file.stored, store.location(name), action="fresh")
        source_id = catalogued.source_ids.get(key)
        rejected = rows_set_aside(store, receipt)
        events.append(embedding(names, names.embeddings, receipt, source_id, space.title, rejected))
    report_events(context.instance, context, events)


def report_whole_output(
    context: dg.OpExecutionContext, asset: dg.AssetKey, store: Store, space: Space, text: str
) -> None:
    """Report what all files of an asset have together, or warn that they cannot be counted.

    A run reports it also if it had nothing to do: a freshness policy counts only materializations.
    One without a partition leaves all partitions as they are, and no automation condition follows
    it. But Dagster cannot end a backfill with such an event. Its runs report an observation: they
    materialize every partition anyway.

    Args:
        text: what the run did.
    """
    metadata: Mapping[str, Any] = {}
    try:
        metadata = whole_output(store, space, _published(store, space))
    except SurgeError as error:
        context.log.warning(f"the files of {space.name} could not be counted: {error}")
    kind = dg.AssetObservation if in_backfill(context) else dg.AssetMaterialization
    event = kind(asset, description=text, metadata=metadata)
    report_events(context.instance, context, [event])


def report_readers_space(
    names: CatalogNames,
    context: dg.OpExecutionContext,
    store: Store,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Report the space that readers use and all spaces if they have changed, or warn that it is not
    known.

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
    shown = ("spaces", "dagster/row_count")
    if last is not None and all(last.metadata.get(name) == metadata[name] for name in shown):
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
    """Return metadata of the space that readers use, with a table of all spaces, that one first."""
    spaces = sorted(list_spaces(store), key=lambda each: (each.name != space.name, each.title))
    records: list[dg.TableRecord] = []
    for each in spaces:
        row = {
            "current": "✓" if each.name == space.name else "",
            "title": each.title,
            "space": each.name,
            "model": each.requested.model,
            "path": store.location(each.name),
        }
        records.append(dg.TableRecord(row))
    rows = sum(file.facts.rows for file in _published(store, space))
    return {
        "space_title": space.title,
        "space": space.name,
        "model": space.requested.model,
        "dimension": space.dimension,
        "location": store.location(space.name),
        "dagster/row_count": dg.MetadataValue.int(rows),
        "spaces": dg.MetadataValue.table(records),
    }


def _published(store: Store, space: Space) -> list[PublishedFile]:
    found = OutputState(store, space.name).files().values()
    return [file for file in found if isinstance(file, PublishedFile)]


def known_space(resources: CatalogResources, store: Store) -> Space | None:
    """Return the space of the settings, without loading a model; None if a run would begin it."""
    return find_space(store, resources.encoder.encoding_spec())


def require_first_space(names: CatalogNames, resources: CatalogResources, store: Store) -> None:
    """Raise unless a space that is begun would be the first one of the output."""
    others = _nearest(store, resources.encoder.encoding_spec())
    if others:
        raise ConfigError(
            f"the settings mean none of the spaces of the output {store.url!r}: {others}. Correct "
            f"the setting, or launch {names.refresh_job} by hand once: a space is never begun "
            "unattended, since that encodes the whole catalog."
        )


def existing_space(
    names: CatalogNames, resources: CatalogResources, store: Store, then: str
) -> Space:
    """Return the space of the settings, for a job that needs one."""
    space = known_space(resources, store)
    if space is None:
        others = _nearest(store, resources.encoder.encoding_spec())
        held = f"; it holds {others}" if others else ""
        raise ConfigError(
            f"the output {store.url!r} holds nothing of {resources.encoder.model!r} with these "
            f"settings yet{held}. Launch {names.refresh_job}, then {then}."
        )
    return space


def _nearest(store: Store, spec: EncodingSpec) -> str:
    return nearest_spaces(spec, [space for space in list_spaces(store) if not space.derived])
