"""Helpers of the tests of source files: one file on the disk, as a listing shows it, and its rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from surge_dagster.engine.sources.formats import batches
from surge_dagster.engine.sources.listing import SourceFile

COLUMNS = ("id", "text", "category")


def source_file(path: Path) -> SourceFile:
    return SourceFile(path.name, path.stat().st_size, "v1", partial(pa.OSFile, str(path)))


def rows_in(path: Path, columns: Sequence[str] = COLUMNS, **options: Any) -> list[tuple[Any, ...]]:
    """All rows of a file, as tuples in the order of the columns."""
    read = list(batches(source_file(path), columns, **options))
    assert all(tuple(batch.schema.names) == tuple(columns) for batch in read)
    return [row for batch in read for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]
