"""Helpers of the tests of tables: files with rows of many keys in any order, and what a source
makes of them."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.sources import open_files
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.tables.table import FileTable
from tests.engine.sources.reading import rows_of

Row = tuple[Any, ...]  # of id, text, key
NAMES = ("id", "text", "category")


def shuffled_rows(rows: int, keys: int, seed: int = 1) -> list[Row]:
    chosen = random.Random(seed)
    return [
        (f"id-{row}", f'text {row}, "quoted"\n', f"key {chosen.randrange(keys)}")
        for row in range(rows)
    ]


def write_csv(path: Path, rows: Sequence[Row], names: Sequence[str] = NAMES) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return path


def write_parquet(path: Path, rows: Sequence[Row], names: Sequence[str] = NAMES) -> Path:
    pq.write_table(pa.table(dict(zip(names, zip(*rows, strict=True), strict=True))), path)
    return path


def table_of(place: Path | str, *partition_by: str, **options: Any) -> FileTable:
    selection = options.pop("selection", Selection())
    columns = partition_by or ("category",)
    return FileTable(open_files(place), columns, selection, **options)


def by_key(rows: Sequence[Row]) -> dict[str, list[tuple[Any, Any]]]:
    """What the partitions of a table have to be."""
    expected: dict[str, list[tuple[Any, Any]]] = {}
    for identity, text, key in rows:
        expected.setdefault(str(key), []).append((identity, text))
    return expected


def contents(source: Iterable[Partition]) -> dict[str, list[tuple[Any, Any]]]:
    """All rows of a source by partition, in the order in which it lists them."""
    return {partition.key: rows_of(partition) for partition in source}


def versions(source: Iterable[Partition]) -> dict[str, str]:
    return {partition.key: partition.source_version for partition in source}
