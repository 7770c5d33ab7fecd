"""Frames give the partitions, rows and digests of the same rows in folders, and refuse what cannot
be read by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.sources.content import ContentDigest
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.engine.tables.frames import FrameCatalog, FrameTable
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import refusal, rows_of
from tests.small_catalogs import Rows, numbered_rows, write_catalog

CATALOG: dict[str, Rows] = {
    key: numbered_rows(key, rows) for key, rows in (("b", 40), ("a", 3), ("ß, 50%", 2))
}


def shuffled() -> pa.Table:
    """All rows in one table, those of each key apart from each other and in their order."""
    rows = [(key, row, place) for key, found in CATALOG.items() for place, row in enumerate(found)]
    rows.sort(key=lambda row: (row[2], row[0]))
    columns = {"category": [key for key, _, _ in rows], "id": [row[0] for _, row, _ in rows]}
    return pa.table({**columns, "text": [row[1] for _, row, _ in rows], "unused": range(len(rows))})


def hugging_face(table: pa.Table) -> Any:
    """Its rows stand in another order than its Arrow table."""
    backwards = list(range(len(table) - 1, -1, -1))
    return (
        pytest.importorskip("datasets")
        .Dataset.from_dict(table.take(backwards).to_pydict())
        .select(backwards)
    )


def delta(table: pa.Table, folder: Path) -> Any:
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(str(folder), table)
    return deltalake.DeltaTable(str(folder))


KINDS: dict[str, Callable[[pa.Table, Path], Any]] = {
    "polars": lambda table, _: pl.DataFrame(table),
    "polars, lazy": lambda table, _: pl.LazyFrame(table),
    "pyarrow": lambda table, _: table,
    "pyarrow dataset": lambda table, _: ds.dataset(table),
    "pandas": lambda table, _: pytest.importorskip("pandas").DataFrame(table.to_pydict()),
    "Hugging Face": lambda table, _: hugging_face(table),
    "Hugging Face, streamed": lambda table, _: (
        hugging_face(table).flatten_indices().to_iterable_dataset()
    ),
    "Delta": delta,
}


def content(source: Source) -> dict[str, tuple[list[tuple[Any, Any]], str]]:
    """Rows and content digest of each partition."""
    return {partition.key: (rows_of(partition), digest(partition)) for partition in source}


def digest(partition: Partition) -> str:
    found = ContentDigest()
    for batch in partition.read():
        found.update(batch)
    return found.hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_one_frame_gives_what_the_same_rows_in_folders_give(kind: str, tmp_path: Path) -> None:
    folders = open_source(write_catalog(tmp_path / "catalog", CATALOG))
    frame = KINDS[kind](shuffled(), tmp_path / "table")
    assert content(FrameTable(frame, ["category"])) == content(folders)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_for_each_key_gives_what_the_same_rows_in_folders_give(
    kind: str, tmp_path: Path
) -> None:
    folders = open_source(write_catalog(tmp_path / "catalog", CATALOG))
    table = shuffled()
    frames = {
        key: KINDS[kind](
            table.filter(pa.array([each == key for each in table["category"].to_pylist()])),
            tmp_path / str(n),
        )
        for n, key in enumerate(CATALOG)
    }
    assert content(FrameCatalog(frames)) == content(folders)


def test_version_is_that_of_the_rows_however_they_lie_in_memory() -> None:
    table = shuffled()
    chunked = pa.Table.from_batches(table.to_batches(max_chunksize=7))
    versions = {each.key: each.source_version for each in FrameTable(table, ["category"])}
    assert {each.key: each.source_version for each in FrameTable(chunked, ["category"])} == versions
    other = table.set_column(2, "text", [[*table["text"].to_pylist()[:-1], "another text"]])
    moved = {each.key: each.source_version for each in FrameTable(other, ["category"])}
    assert [key for key in versions if moved[key] != versions[key]] == ["b"]
    renamed = FrameTable(table, ["category"], Selection(text="category"))
    assert all(each.source_version.endswith("?text_column=category") for each in renamed)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"Delta"}))
def test_frames_take_the_settings_by_their_names_and_columns_inside_of_others(
    kind: str, tmp_path: Path
) -> None:
    docs = [{"title": "boots", "more": {"n": 1}}, None, {"title": "hats", "more": None}]
    table = pa.table(
        {"doc": docs, "doc.sku": ["x", "y", "z"], "kind": ["a", "b", "a"], "price": [1, 2, 3]}
    )
    frame = KINDS[kind](table, tmp_path / "table")
    named: Any = {
        "id": "doc.sku",
        "text": "{doc.title}/{doc.more.n}",
        "columns": "price",
        "missing_text": "empty",
    }
    divided = FrameTable(frame, "kind", **named)
    assert [rows_of(each) for each in divided] == [[("x", "boots/1"), ("z", "hats/")], [("y", "")]]
    [one] = FrameCatalog({"all": frame}, **named)
    assert [id for id, _ in rows_of(one)] == ["x", "y", "z"] and one.source_version.endswith(
        "columns=price"
    )
    with pytest.raises(
        ConfigError, match=r"'doc.title', .* with the settings id, text, columns and partition_by\."
    ):
        FrameTable(frame, "kind", id="doc.skew")
    [one] = FrameCatalog({"all": frame})
    assert refusal(one).remedy == "Name the right ones with the settings id, text and columns."
    with pytest.raises(TypeError, match="give either a selection or settings; both were given: id"):
        FrameTable(frame, "kind", Selection(), id="doc.sku")


def test_several_columns_make_one_key_and_keys_come_in_their_order() -> None:
    frame = pl.DataFrame(
        {"lang": ["de", "de", "an"], "n": [10, 9, 10], "id": [1, 2, 3], "text": ["x", "y", "z"]}
    )
    found = {each.key: rows_of(each) for each in FrameTable(frame, ["lang", "n"])}
    assert list(found.items()) == [
        ("lang=an/n=10", [(3, "z")]),
        ("lang=de/n=10", [(1, "x")]),
        ("lang=de/n=9", [(2, "y")]),
    ]
    assert [each.key for each in FrameTable(frame, ["n"])] == ["10", "9"]
    assert list(FrameTable(frame.clear(), ["lang"])) == []
    [empty] = FrameCatalog({"a": frame.clear()})
    assert rows_of(empty) == [] and empty.rows == 0


def test_listed_versions_spare_the_reading_and_frames_are_opened_when_they_are_read() -> None:
    opened = list[str]()

    def frame(key: str) -> pa.Table:
        opened.append(key)
        return pa.table({"id": [key], "text": [key]})

    frames = {key: lambda key=key: frame(key) for key in "ab"}
    now = {"a": "v1", "b": "v2"}
    listed = list(FrameCatalog(frames, versions={"a": "v1", "b": "v1"}, current_version=now.get))
    assert [(each.source_version, each.current_source_version()) for each in listed] == [
        ("v1", "v1"),
        ("v1", "v2"),
    ]
    del now["a"]
    assert listed[0].current_source_version() is None and opened == []
    assert rows_of(listed[1]) == [("b", "b")] and opened == ["b"]


def test_order_is_kept_beyond_a_batch_of_rows() -> None:
    rows = range(30_000)
    frame = pl.DataFrame(
        {
            "key": [f"p{row % 3}" for row in rows],
            "id": rows,
            "text": [f"text {row}" for row in rows],
        }
    )
    for number, partition in enumerate(FrameTable(frame, ["key"])):
        assert [id for batch in partition.read() for id in batch.ids.to_pylist()] == list(rows)[
            number::3
        ]


def test_version_is_that_of_the_same_rows_in_a_table_of_files(tmp_path: Path) -> None:
    pq.write_table(shuffled(), tmp_path / "products.parquet")
    files = open_source(tmp_path / "products.parquet", partition_by=["category"])
    frame = FrameTable(pl.DataFrame(shuffled()), ["category"])
    assert {p.key: p.source_version for p in frame} == {p.key: p.source_version for p in files}


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
    assert (
        "the pyarrow Table has no column 'text'; its columns are 'id'. Name the right"
        in reasons["missing"]
    )
    assert "has two columns 'text'" in reasons["twice"]
    assert "partition 'null', row 1" in reasons["null"]
    assert (
        "a pyarrow RecordBatchReader, which can be read only once. Give a polars" in reasons["once"]
    )
    assert "a builtins list, which is not a frame" in reasons["list"]
    assert len({each.source_version for each in found.values()}) == len(found)


def test_a_frame_without_usable_key_columns_is_refused_as_a_whole() -> None:
    frame = pl.DataFrame({"nested": [[1], [2]], "id": [1, 2], "text": ["x", "y"]})
    for given in (frame, frame.lazy()):
        with pytest.raises(ConfigError, match="products: the column 'nested' has type"):
            FrameTable(given, ["nested"], url="products")
        with pytest.raises(
            ConfigError,
            match=r"products: .* no column 'kye'; its columns are 'nested', 'id', 'text'",
        ):
            FrameTable(given, ["kye"], url="products")


def test_rows_without_a_key_are_refused_together_and_the_others_are_read() -> None:
    frame = pl.DataFrame({"key": ["a", None, ""], "id": [1, 2, 3], "text": ["x", "y", "z"]})
    for given in (frame, frame.lazy()):
        bad, good = FrameTable(given, ["key"], url="products")
        assert "2 rows without a key, since 'key' is null, empty" in str(refusal(bad))
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
        assert "could not be computed (InvalidOperationError: conversion" in str(
            refusal(found["expression"])
        )
        assert "could not be computed (RuntimeError: the warehouse said no). Correct" in str(
            refusal(found["function"])
        )
        with pytest.raises(
            TransientError, match=r"partition 'gone': its frame could not be read .* Open it again"
        ):
            rows_of(found["gone"])
    with pytest.raises(ConfigError, match="products: its frame could not be computed"):
        FrameTable(frames["expression"], ["id"], url="products")


def test_delta_table_that_is_rewritten_is_read_as_it_was_opened_and_says_when_its_files_are_gone(
    tmp_path: Path,
) -> None:
    deltalake = pytest.importorskip("deltalake", reason="not installed: the extra 'delta'")
    place = str(tmp_path / "table")
    deltalake.write_deltalake(
        place, pa.table({"number": [7], "id": [1], "text": ["x"]}), partition_by=["number"]
    )
    [opened] = FrameCatalog({"a": deltalake.DeltaTable(place)})
    deltalake.write_deltalake(
        place, pa.table({"number": [8], "id": [2], "text": ["y"]}), mode="overwrite"
    )
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
    with pytest.raises(ConfigError, match="a datasets DatasetDict, which is not a frame"):
        FrameTable(datasets.DatasetDict({"train": found}), ["key"])


def test_key_of_a_frame_is_a_string_that_is_not_empty() -> None:
    for key in ("", 7):
        with pytest.raises(
            ConfigError, match=f"the key of a partition must be a non-empty string, not {key!r}"
        ):
            FrameCatalog({key: pl.DataFrame()})  # pyright: ignore[reportArgumentType]
