"""Helpers of the tests of catalogs: a file, one partition, its rows, and why it is refused."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.checked_rows import checked_rows
from surge_dagster.engine.sources.file_read import SourceFile
from surge_dagster.engine.sources.partition import Partition, RowBatch, Source
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.store.local_store import stored_object

ROWS = [("1", "one"), ("2", "zwei ß"), ("3", "")]


def only(catalog: Source) -> Partition:
    [partition] = list(catalog)
    return partition


def rows_in(batches: Iterable[RowBatch]) -> list[tuple[Any, Any]]:
    rows: list[tuple[Any, Any]] = []
    for batch in batches:
        rows += zip(batch.ids.to_pylist(), batch.texts.to_pylist(), strict=True)
    return rows


def rows_of(partition: Partition) -> list[tuple[Any, Any]]:
    return rows_in(partition.read())


def partitions_of(source: Iterable[Partition]) -> dict[str, Partition]:
    """Partitions by key, in the order in which a source lists them."""
    return {partition.key: partition for partition in source}


def source_file(path: Path) -> SourceFile:
    """Return a file as a listing would."""
    stored = stored_object(path.name, path.stat())
    return SourceFile(path.name, stored, "v1", partial(pa.OSFile, str(path)))


def batches_of(selection: Selection, **columns: Any) -> list[RowBatch]:
    """Return what a selection makes of a batch that begins at row 100."""
    return list(checked_rows(selection, "k", [pa.record_batch(columns)], 100))


def refusal(partition: Partition) -> DataError:
    with pytest.raises(DataError) as refused:
        for _ in partition.read():
            pass
    assert refused.value.key == partition.key
    assert refused.value.remedy.endswith((".", ")."))
    return refused.value
