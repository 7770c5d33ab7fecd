"""Partitions in folders, files named by a pattern, and single files, on a disk or in a bucket."""

from __future__ import annotations

from surge_dagster.engine.sources.folders import FolderCatalog, open_folders
from surge_dagster.engine.sources.listing import open_files
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.sources.selection import DEFAULT_MAX_TEXT_BYTES, Selection

__all__ = [
    "DEFAULT_MAX_TEXT_BYTES",
    "FolderCatalog",
    "Selection",
    "Source",
    "open_files",
    "open_folders",
]
