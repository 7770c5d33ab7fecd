"""The events of the catalog's assets, with the tags from which Dagster derives what is up to date.

Dagster decides that a partition is up to date from four tags of its last materialization: its own
data and code version, and which version and which event of each upstream asset it was made from. A
partition that was just encoded and a valid file that is adopted get the same tags.

Dagster takes the status and the metadata of a source partition from its last materialization. What
makes an embedding stale is another thing: among the events of an external asset with partitions,
Dagster looks only at observations. So each source version is materialized, and one that replaces
another is observed first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import dagster as dg
import pyarrow as pa

from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.rejected import NONE_LISTED, read_rejected
from surge_dagster.engine.run.report import Receipt, SuperBatchReport
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.urls import to_uri
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import from_partition_key, to_partition_key

DATA_VERSION_TAG = "dagster/data_version"
REMOVED = "removed"  # in the place of the source version of a partition that was removed
# Raised by hand when the same texts in the same space would give other files.
CODE_VERSION = "1"

_USER_VERSION = {"dagster/data_version_is_user_provided": "true"}
# Dagster's data version of an external asset whose events name none. `superbatches` names none, so
# that no SuperBatch, of whichever space, makes embeddings stale.
_SUPERBATCHES_VERSION = "INITIAL"
_OF_RECEIPT = (
    *("rows", "truncated", "skipped_rows", "blank_texts", "rejected_rows", "transient_rows"),
    *("rows_reused", "rows_encoded"),
    *("source_version", "content_digest", "etag", "oldest_encoded_at"),
)
_ROWS_SHOWN = 20

SourceEvent = dg.AssetObservation | dg.AssetMaterialization


def source_version(
    names: CatalogNames,
    partition_key: str,
    version: str,
    rows: int | None = None,
    *,
    changed: bool,
) -> Iterator[SourceEvent]:
    """Yield the events that report the source version that a partition has now, or `REMOVED`.

    Args:
        changed: whether another version is on record.
    """
    metadata: dict[str, Any] = {
        "key": from_partition_key(partition_key),
        "source_version": version,
        "removed": version == REMOVED,
    }
    if rows is not None:
        metadata["dagster/partition_row_count"] = rows
    kinds: list[type[SourceEvent]] = [dg.AssetMaterialization]
    if changed:
        kinds.insert(0, dg.AssetObservation)
    for kind in kinds:
        yield kind(
            names.source_partitions,
            partition=partition_key,
            metadata=metadata,
            tags={DATA_VERSION_TAG: version},
        )


def embedding(
    names: CatalogNames,
    asset: dg.AssetKey,
    receipt: Receipt,
    source_event_id: int | None,
    space_title: str,
    rejected: pa.Table = NONE_LISTED,
) -> dg.AssetMaterialization:
    """Return the event of one embedded partition; its action is "fresh" if its file was there
    already, and is reported for a backfill or was not on record.

    Args:
        rejected: the rows that were set aside; the first ones are shown.
    """
    metadata = (
        _of_file(receipt)
        | {name: getattr(receipt, name) for name in _OF_RECEIPT}
        | {"space_title": space_title}
    )
    if rejected.num_rows:
        metadata["rows_set_aside"] = _table_of(rejected)
    if receipt.superbatch is not None:
        metadata["superbatch"] = receipt.superbatch
    return dg.AssetMaterialization(
        asset,
        partition=to_partition_key(receipt.key),
        metadata=metadata,
        tags={
            DATA_VERSION_TAG: receipt.desired_version,
            **_USER_VERSION,
            "dagster/code_version": CODE_VERSION,
            **_made_from(names.source_partitions, receipt.source_version, source_event_id),
            **_made_from(names.superbatches, _SUPERBATCHES_VERSION, None),
        },
    )


def rows_set_aside(store: Store, receipt: Receipt) -> pa.Table:
    """Return the rows that were set aside from the file of a receipt; none if their list cannot be
    read now."""
    if receipt.rejected_rows:
        with suppress(SurgeError, OSError):
            return read_rejected(store, receipt.space, receipt.key, receipt.source_version)
    return NONE_LISTED


def _table_of(rejected: pa.Table) -> dg.TableMetadataValue:
    records: list[dg.TableRecord] = []
    for row in rejected.slice(0, _ROWS_SHOWN).to_pylist():
        shown = {name: row[name] or "" for name in ("place", "id", "reason", "kind")}
        records.append(dg.TableRecord(shown))
    return dg.MetadataValue.table(records)


def derived_embedding(
    names: CatalogNames,
    asset: dg.AssetKey,
    receipt: Receipt,
    parent_version: str,
    parent_event_id: int | None,
) -> dg.AssetMaterialization:
    """Return the event of one partition of a derived space, with the materialization that it was
    computed from."""
    return dg.AssetMaterialization(
        asset,
        partition=to_partition_key(receipt.key),
        metadata=_of_file(receipt),
        tags={
            DATA_VERSION_TAG: receipt.desired_version,
            **_USER_VERSION,
            **_made_from(names.embeddings, parent_version, parent_event_id),
        },
    )


def _of_file(receipt: Receipt) -> dict[str, Any]:
    return {
        "key": receipt.key,
        "dagster/partition_row_count": receipt.rows,
        "dimension": receipt.dimension,
        "path": dg.MetadataValue.path(receipt.path),
        "dagster/uri": to_uri(receipt.path),
        "bytes": receipt.bytes,
        "space": receipt.space,
        "action": receipt.action,
    }


def whole_output(store: Store, space: Space, files: Collection[PublishedFile]) -> dict[str, Any]:
    """Return metadata of an asset without a partition: what all its files have together.

    Dagster's page of an asset shows rows and columns of the last materialization. If that has no
    rows, it shows those of the last observation.
    """
    rows = [file.facts.rows for file in files]
    return {
        "space_title": space.title,
        "space": space.name,
        "partitions": len(rows),
        "dagster/row_count": sum(rows),
        "dagster/uri": to_uri(store.location(space.name)),
        "dagster/column_schema": _columns_of(files, space),
    }


def _columns_of(files: Collection[PublishedFile], space: Space) -> dg.TableSchema:
    """Return the columns of files, each with its types; files of one source may differ."""
    types: dict[str, list[str]] = {}
    for columns in dict.fromkeys(file.columns for file in files):
        for column in columns:
            named = str(column.type)
            if column.name == "embedding":
                named = f"{space.dtype}[{space.dimension}]"
            of_column = types.setdefault(column.name, [])
            if named not in of_column:
                of_column.append(named)
    return dg.TableSchema(
        [dg.TableColumn(name, " or ".join(sorted(found))) for name, found in types.items()]
    )


def superbatch(
    names: CatalogNames, report: SuperBatchReport, space: Space
) -> dg.AssetMaterialization:
    """Return the event of one SuperBatch, with its metrics."""
    metrics = report.as_dict()
    metadata: dict[str, Any] = {"superbatch": metrics.pop("index")}
    for name, value in metrics.items():
        if isinstance(value, float):
            metadata[name] = round(value, 4)
        elif isinstance(value, int):
            metadata[name] = value

    content = f"{counted(report.texts, 'text')} of {counted(report.partitions, 'partition')}"
    return dg.AssetMaterialization(
        names.superbatches,
        description=f"SuperBatch {report.index}: {content}",
        metadata=metadata | {"space_title": space.title, "space": space.name},
    )


def _made_from(asset: dg.AssetKey, version: str, storage_id: int | None) -> dict[str, str]:
    name, event = asset.to_user_string(), "NULL" if storage_id is None else str(storage_id)
    return {
        f"dagster/input_data_version/{name}": version,
        f"dagster/input_event_pointer/{name}": event,
    }
