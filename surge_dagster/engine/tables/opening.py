"""Opens every kind of source that a URL can name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources import open_files, open_folders
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.sources.selection import (
    FileColumnSettings,
    Selection,
    column_names,
    selected,
)
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.tables.bigquery import BIGQUERY_SCHEME, open_bigquery
from surge_dagster.engine.tables.delta import DeltaSource, is_delta
from surge_dagster.engine.tables.table import FileTable


def open_source(
    url: str | Path,
    *,
    selection: Selection | None = None,
    partition_by: str | Sequence[str] = (),
    query: str | None = None,
    updated_at: str | None = None,
    storage_options: StorageOptions | None = None,
    **columns: Unpack[FileColumnSettings],
) -> Source:
    """Open a catalog: folders named by columns, a pattern, single files or a table.

    Args:
        url: a local path or pattern such as `products/{category}.parquet`, a `file://` URL, the URL
            of a bucket (`s3://`, `gs://`, `az://`), or `bigquery://project.dataset.table`.
        partition_by: columns whose values are the key of a row. All files together are then one
            table, with its rows in any order. A Delta table may have its own.
        query, updated_at: see `BigQueryCatalog`.
        columns: as in the settings, `id="sku", text="{title}. {description}"`, or in a `selection`.
    """
    selection = selected(selection, columns)
    partition_by = column_names(partition_by)
    if str(url).startswith(BIGQUERY_SCHEME):
        gcp = (storage_options or StorageOptions()).gcp
        return open_bigquery(
            str(url), partition_by, selection, gcp, query=query, updated_at=updated_at
        )
    require_no_bigquery(str(url), query=query, updated_at=updated_at)
    if is_delta(str(url), storage_options):
        return DeltaSource(str(url), partition_by, selection, storage_options)
    if partition_by:
        return FileTable(open_files(url, storage_options), partition_by, selection)
    return open_folders(url, selection, storage_options)


def require_no_bigquery(url: str, **settings: str | None) -> None:
    """Raise `ConfigError` if settings of BigQuery are given for another source."""
    for name, value in settings.items():
        if value is not None:
            raise ConfigError(
                f"the setting {name} is for sources of BigQuery (bigquery://…), and the source is "
                f"{url!r}. Leave {name} out."
            )
