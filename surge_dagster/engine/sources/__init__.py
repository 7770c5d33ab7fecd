"""Partitions in folders, files named by a pattern, and single files, on a disk or in a bucket."""

from __future__ import annotations

from pathlib import Path

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.folders import FolderCatalog
from surge_dagster.engine.sources.listing import SourceFiles, split_pattern
from surge_dagster.engine.sources.local_files import LocalFiles
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.sources.selection import DEFAULT_MAX_TEXT_BYTES, Selection
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.support.urls import is_object_store, local_path

__all__ = [
    "DEFAULT_MAX_TEXT_BYTES",
    "FolderCatalog",
    "Selection",
    "Source",
    "open_files",
    "open_folders",
]


def open_folders(
    url: str | Path,
    selection: Selection | None = None,
    storage_options: StorageOptions | None = None,
) -> FolderCatalog:
    """Open a catalog whose folders or files are its partitions."""
    return FolderCatalog(open_files(url, storage_options), selection or Selection())


def open_files(url: str | Path, options: StorageOptions | None = None) -> SourceFiles:
    """Open a folder, one file or a pattern for listing; a bucket gets no request yet.

    A local path that exists is not a pattern, whatever its name is.
    """
    text = str(url)
    if is_object_store(text):
        return _open_bucket(text, options)
    path = local_path(url, what="source")
    try:
        if path.is_dir():
            return LocalFiles(text, path, "", None)
        if path.exists():
            return LocalFiles(text, path.parent, path.name, None)
        base, pattern = split_pattern(str(path))
        if pattern is not None and Path(base).is_dir():
            return LocalFiles(text, Path(base), "", pattern)
    except OSError as error:
        raise ConfigError(f"cannot open the source {text!r}: {error.strerror}.") from error
    missing = "such file or folder"
    if pattern is not None:
        missing = f"folder {base!r}"
    raise ConfigError(
        f"no catalog at {str(path.absolute())!r}: there is no {missing}. Check the path and "
        "whether it is mounted, or build one with `surge-dagster catalog demo --out DATA`."
    )


def _open_bucket(url: str, options: StorageOptions | None) -> SourceFiles:
    from surge_dagster.engine.sources.bucket_files import BucketFiles
    from surge_dagster.engine.store.object_store import open_object_store

    base, pattern = split_pattern(url)
    above = base.rstrip("/")
    name = ""
    if pattern is None and above.count("/") > 2:
        above, _, name = above.rpartition("/")
    return BucketFiles(url, open_object_store(above, options, what="source"), name, pattern)
