"""One opener for every kind of source that a URL can name: folders, patterns, buckets, tables of files, BigQuery."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from surge_dagster.engine.sources import open_files, open_folders
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.tables.bigquery import BIGQUERY_SCHEME, BigQueryCatalog, default_client
from surge_dagster.engine.tables.column_settings import FileColumnSettings, column_names, selected
from surge_dagster.engine.tables.table import TableSource


def open_source(
    url: str | Path,
    *,
    selection: Selection | None = None,
    partition_by: str | Sequence[str] = (),
    storage_options: StorageOptions | None = None,
    **columns: Unpack[FileColumnSettings],
) -> Source:
    """Open a catalog: folders named by columns, a pattern such as `products/{category}.parquet`, single files, a table.

    Args:
        url: a local path, a `file://` URL, the URL of a bucket (`s3://`, `gs://`, `az://`), or a table as
            `bigquery://project.dataset.table`; see `BigQueryCatalog` for a query.
        partition_by: columns whose values are the key of a row; then all files together are one table, whose rows
            stand in any order.
        columns: what is taken of its columns, as in the settings: `id="sku", text="{title}. {description}"`; a
            `selection` says the same.
    """
    selection, partition_by = selected(selection, columns), column_names(partition_by)
    if str(url).startswith(BIGQUERY_SCHEME):
        return BigQueryCatalog(default_client(str(url)), str(url), partition_by, selection)
    if partition_by:
        return TableSource(open_files(url, storage_options), partition_by, selection)
    return open_folders(url, selection, storage_options)


def release(source: Source) -> None:
    """Remove what a source keeps on this machine for a run, at the end of it."""
    if isinstance(source, TableSource):
        source.close()
