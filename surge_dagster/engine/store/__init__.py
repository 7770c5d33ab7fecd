"""The store of output files: a local disk or an object store behind one small interface."""

from __future__ import annotations

from pathlib import Path

from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.urls import is_object_store, local_path

__all__ = ["StorageOptions", "open_store"]


def open_store(url: str | Path, options: StorageOptions | None = None) -> Store:
    """Open an output: a local path, a `file://` URL, or a bucket (`s3://`, `gs://`, `az://`). It
    need not exist yet."""
    if is_object_store(url):
        # Imported here, because a run on a local disk needs no client of any cloud.
        from surge_dagster.engine.store.object_store import open_object_store

        return open_object_store(str(url), options)
    return LocalStore(local_path(url, what="output"))
