"""Where embeddings go: files by partition, in a store, one folder per vector space."""

from __future__ import annotations

from pathlib import Path

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.output.local_store import LocalStore
from surge_dagster.engine.output.store import Store
from surge_dagster.engine.urls import local_path

__all__ = ["open_store"]


def open_store(url: str | Path) -> Store:
    """Open an output: a local path or `file://` URL; it need not exist yet.

    Raises:
        ConfigError: the path is a file, or lies on a storage that is not supported.
    """
    root = local_path(url, what="output")
    try:
        is_file = root.exists() and not root.is_dir()
    except OSError as error:
        raise ConfigError(f"cannot open the output {str(url)!r}: {error.strerror}.") from error
    if is_file:
        raise ConfigError(f"the output {str(url)!r} is a file; expected a folder.")
    return LocalStore(root)
