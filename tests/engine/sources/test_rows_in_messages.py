"""A refusal names the row of the file, counted from 0 without a header, wherever and whenever the
row is refused."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources import open_folders
from surge_dagster.engine.sources.partition import (
    IdSet,
    Partition,
    Source,
    located,
    refuse_repeated_id,
)
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.tables.frames import FrameTable
from tests.engine.sources.reading import refusal, rows_of
from tests.engine.sources.tables import Row, table_of, write_csv, write_parquet

# Of the partition k the first row is skipped, since it has no text, and the last one is at fault.
ROWS = [
    ("1", "a", "x"),
    ("2", "", "k"),
    ("3", "b", "k"),
    ("4", "c", "x"),
    ("5", "d", "k"),
    ("5", "long " * 5, "k"),
]


def source_of(kind: str, folder: Path, selection: Selection) -> Source:
    if "frame" in kind:
        frame = pl.DataFrame(ROWS, ["id", "text", "category"], orient="row")
        return FrameTable(frame.lazy() if "lazy" in kind else frame, ["category"], selection)
    if kind == "csv":
        return table_of(write_csv(folder / "t.csv", ROWS), selection=selection)
    if kind == "jsonl":
        lines = [
            json.dumps(dict(zip(("id", "text", "category"), row, strict=True))) for row in ROWS
        ]
        (folder / "t.jsonl").write_text("\n".join(lines))
        return table_of(folder / "t.jsonl", selection=selection)
    of_key: list[Row] = [row for row in ROWS if row[2] == "k"]
    (folder / "category=k").mkdir()
    for name, rows in (
        (("a", of_key[:2]), ("b", of_key[2:])) if kind == "folder" else (("a", of_key),)
    ):
        write_parquet(folder / "category=k" / f"{name}.parquet", rows)
    return open_folders(folder, selection)


def partition_of(kind: str, folder: Path, max_text_bytes: int) -> Partition:
    selection = Selection(missing_text="skip", max_text_bytes=max_text_bytes)
    return next(each for each in source_of(kind, folder, selection) if each.key == "k")


@pytest.mark.parametrize(
    ("kind", "first", "place"),
    [
        ("csv", "row 4 of t.csv", "row 5 of t.csv"),
        ("jsonl", "row 4 of t.jsonl", "row 5 of t.jsonl"),
        ("frame", "row 4", "row 5"),
        ("lazy frame", "row 4", "row 5"),
        ("folder", "row 0 of category=k/b.parquet", "row 1 of category=k/b.parquet"),
        ("one file", "row 2", "row 3"),
    ],
)
def test_row_in_a_refusal_is_that_of_the_file(
    tmp_path: Path, kind: str, first: str, place: str
) -> None:
    partition = partition_of(kind, tmp_path, 1_000)
    ids = IdSet()
    for batch in partition.read():
        ids.add(batch.ids)
    with pytest.raises(
        DataError, match=f"partition 'k', {place}: the id '5' stands at {first} already"
    ):
        refuse_repeated_id(partition, ids.repeated())
    late = DataError("k", "its text ends every worker", "", row=2)  # among the rows with a text
    assert (
        located(partition, late).finding == f"partition 'k', {place}: its text ends every worker."
    )


@pytest.mark.parametrize(
    ("kind", "place"), [("csv", "row 5 of t.csv"), ("lazy frame", "row 5"), ("one file", "row 3")]
)
def test_row_that_reading_refuses_is_that_of_the_file(
    tmp_path: Path, kind: str, place: str
) -> None:
    assert refusal(partition_of(kind, tmp_path, 20)).finding.startswith(
        f"partition 'k', {place}: the text has 25 bytes"
    )


@pytest.mark.parametrize("column", ["id", "text"])
def test_half_of_a_surrogate_pair_in_json_refuses_only_its_partition(
    tmp_path: Path, column: str
) -> None:
    bad = {"id": "3", "text": "c", "category": "k"} | {column: "\ud800"}
    rows = [{"id": str(row), "text": "a", "category": "x"} for row in range(2)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, [*rows, bad])))

    partition, other = table_of(tmp_path / "t.jsonl")

    assert rows_of(other) == [("0", "a"), ("1", "a")]
    found = refusal(partition)
    assert found.finding == f"partition 'k', row 2 of t.jsonl: the {column} is not valid UTF-8."
    assert found.remedy.startswith("Re-encode it in the source")
