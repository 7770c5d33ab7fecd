"""Sources of partitions: one opener for every kind; today a folder of Parquet files."""

from __future__ import annotations

from pathlib import Path

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.parquet import ParquetCatalog
from surge_dagster.engine.sources.rows import DEFAULT_MAX_TEXT_BYTES
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support.urls import local_path

__all__ = ["DEFAULT_MAX_TEXT_BYTES", "ParquetCatalog", "Selection", "open_source"]


def open_source(url: str | Path, *, selection: Selection | None = None) -> ParquetCatalog:
    """Open a catalog folder: `partition=<encoded key>/….parquet`, one or more files per partition.

    Args:
        url: a local path or `file://` URL.
        selection: the columns that become ids and texts; by default those of these names.

    Raises:
        ConfigError: the folder is missing, holds no partition, or lies on a storage that is not supported.
    """
    root = local_path(url, what="catalog")
    try:
        found = root.is_dir()
    except OSError as error:
        raise ConfigError(f"cannot open the catalog {str(url)!r}: {error.strerror}.") from error
    if not found:
        raise ConfigError(
            f"no catalog at {str(url)!r}: the folder does not exist or is a file. Build one with "
            f"`surge-dagster catalog demo --out {url}` or give the path of your own."
        )
    return ParquetCatalog(root, selection or Selection())
