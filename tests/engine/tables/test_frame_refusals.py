"""Frames that cannot be read are refused by name, and the others go on."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.tables.frames import FrameCatalog, FrameTable
from tests.engine.sources.reading import refusal, rows_of


def test_one_bad_frame_is_refused_by_name_and_the_others_go_on() -> None:
    good = pa.table({"id": [1], "text": ["x"]})
    frames = {
        "missing": good.drop_columns("text"),
        "twice": pa.Table.from_arrays([*good.columns, good["text"]], ["id", "text", "text"]),
        "null": pa.table({"id": [1, 2], "text": ["x", None]}),
        "once": pa.RecordBatchReader.from_batches(good.schema, good.to_batches()),
        "list": [{"id": 1}],
        "good": good,
    }
    found = {each.key: each for each in FrameCatalog(frames)}
    assert rows_of(found.pop("good")) == [(1, "x")]
    reasons = {key: str(refusal(each)) for key, each in found.items()}
    assert "the pyarrow Table has no column 'text'; its columns are 'id'. Name the right" in reasons["missing"]
    assert "has two columns 'text'" in reasons["twice"]
    assert "partition 'null', row 1" in reasons["null"]
    assert "a pyarrow RecordBatchReader, which can be read only once. Give a polars" in reasons["once"]
    assert "a builtins list, which is no frame" in reasons["list"]
    assert len({each.source_version for each in found.values()}) == len(found)


def test_a_frame_without_usable_key_columns_is_refused_as_a_whole() -> None:
    frame = pl.DataFrame({"nested": [[1], [2]], "id": [1, 2], "text": ["x", "y"]})
    for given in (frame, frame.lazy()):
        with pytest.raises(ConfigError, match="products: the column 'nested' has type"):
            FrameTable(given, ["nested"], url="products")
        with pytest.raises(ConfigError, match=r"products: .* no column 'kye'; its columns are 'nested', 'id', 'text'"):
            FrameTable(given, ["kye"], url="products")


def test_rows_without_a_key_are_refused_together_and_the_others_are_read() -> None:
    frame = pl.DataFrame({"key": ["a", None, ""], "id": [1, 2, 3], "text": ["x", "y", "z"]})
    for given in (frame, frame.lazy()):
        bad, good = FrameTable(given, ["key"], url="products")
        assert "2 rows have no key, since 'key' is null, empty" in str(refusal(bad))
        assert bad.key == "__HIVE_DEFAULT_PARTITION__" and rows_of(good) == [(1, "x")]


def test_frame_that_cannot_be_computed_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    def broken() -> pl.DataFrame:
        raise RuntimeError("the warehouse said no\nand more")

    good = pl.DataFrame({"id": ["1"], "text": ["x"]})
    frames = {
        "expression": good.lazy().with_columns(pl.col("text").cast(pl.Int64)),
        "function": broken,
        "gone": pl.scan_parquet(tmp_path / "gone.parquet"),
        "good": good,
    }
    for versions in (None, dict.fromkeys(frames, "1")):
        found = {each.key: each for each in FrameCatalog(frames, versions=versions)}
        assert rows_of(found["good"]) == [("1", "x")]
        assert "could not be computed (InvalidOperationError: conversion" in str(refusal(found["expression"]))
        assert "could not be computed (RuntimeError: the warehouse said no). Correct" in str(refusal(found["function"]))
        with pytest.raises(TransientError, match=r"partition 'gone': its frame could not be read .* Open it anew"):
            rows_of(found["gone"])
    with pytest.raises(ConfigError, match="products: its frame could not be computed"):
        FrameTable(frames["expression"], ["id"], url="products")


def test_delta_table_that_is_rewritten_is_read_as_it_was_opened_and_says_when_its_files_are_gone(
    tmp_path: Path,
) -> None:
    deltalake = pytest.importorskip("deltalake", reason="not installed: the extra 'delta'")
    place = str(tmp_path / "table")
    deltalake.write_deltalake(place, pa.table({"number": [7], "id": [1], "text": ["x"]}), partition_by=["number"])
    [opened] = FrameCatalog({"a": deltalake.DeltaTable(place)})
    deltalake.write_deltalake(place, pa.table({"number": [8], "id": [2], "text": ["y"]}), mode="overwrite")
    assert rows_of(opened) == [(1, "x")]
    table = deltalake.DeltaTable(place)
    assert {each.key: rows_of(each) for each in FrameTable(table, ["number"])} == {"8": [(2, "y")]}
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(TransientError, match="partition 'a': its frame could not be read"):
        rows_of(opened)


def test_dataset_with_a_transform_and_several_splits_are_refused() -> None:
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_dict({"key": ["a"], "id": [1], "text": ["x"]})
    with pytest.raises(ConfigError, match=r"it has a transform.* use map\(\) instead"):
        FrameTable(found.with_transform(lambda rows: rows), ["key"])
    with pytest.raises(ConfigError, match="a datasets DatasetDict, which is no frame"):
        FrameTable(datasets.DatasetDict({"train": found}), ["key"])


def test_key_of_a_frame_is_a_string_that_is_not_empty() -> None:
    for key in ("", 7):
        with pytest.raises(ConfigError, match=f"the key of a partition is a string that is not empty, not {key!r}"):
            FrameCatalog({key: pl.DataFrame()})  # pyright: ignore[reportArgumentType]
