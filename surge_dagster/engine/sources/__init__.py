"""Sources of partitions: one opener for every kind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.bigquery import BIGQUERY_SCHEME, BigQueryCatalog, default_client
from surge_dagster.engine.sources.endings import is_source_file
from surge_dagster.engine.sources.folders import FolderCatalog
from surge_dagster.engine.sources.listing import open_files
from surge_dagster.engine.sources.parquet import PREFIX, ParquetCatalog
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.sources.rows import DEFAULT_MAX_TEXT_BYTES
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.sources.table import TableSource
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.support.urls import is_object_store, local_path

__all__ = [
    "DEFAULT_MAX_TEXT_BYTES",
    "FolderCatalog",
    "ParquetCatalog",
    "Selection",
    "Source",
    "TableSource",
    "open_source",
    "release",
]


def open_source(
    url: str | Path,
    *,
    selection: Selection | None = None,
    partition_by: Sequence[str] = (),
    storage_options: StorageOptions | None = None,
) -> Source:
    """Open a catalog: folders named by columns, a pattern such as `products/{category}.parquet`, single files, a table.

    Args:
        url: a local path, a `file://` URL, the URL of a bucket (`s3://`, `gs://`, `az://`), or a table as
            `bigquery://project.dataset.table`; see `BigQueryCatalog` for a query.
        selection: the columns that become ids and texts; by default those of these names.
        partition_by: columns whose values are the key of a row; then the file, or all files of the folder or pattern
            together, are one table, whose rows stand in any order.
        storage_options: how a bucket is reached.

    Raises:
        ConfigError: there is no such local place, the pattern cannot be used, or there are no credentials.
    """
    selection = selection or Selection()
    if str(url).startswith(BIGQUERY_SCHEME):
        return BigQueryCatalog(default_client(str(url)), str(url), partition_by, selection)
    if partition_by:
        return TableSource(open_files(url, storage_options, is_source_file), partition_by, selection)
    if not is_object_store(url):
        root = local_path(url, what="source")
        if _has_own_folders(root):
            return ParquetCatalog(root, selection)
    return FolderCatalog(open_files(url, storage_options, is_source_file), selection)


def release(source: Source) -> None:
    """Remove what a source keeps on this machine for a run, at the end of it; a run that crashed goes on with it."""
    if isinstance(source, TableSource):
        source.close()


def _has_own_folders(root: Path) -> bool:
    """Whether this is a folder of `partition=…` folders, or one that says when it is listed why it is none yet."""
    does = "open"
    try:
        if not root.is_dir():
            return False
        does = "list"
        with os.scandir(root) as entries:
            first = next(entries, None)
            return first is None or first.name.startswith(PREFIX) or any(e.name.startswith(PREFIX) for e in entries)
    except OSError as error:
        raise ConfigError(f"cannot {does} the catalog {str(root)!r}: {error.strerror}.") from error
