"""Frames give the partitions, rows and digests of the same rows in folders, and refuse what cannot
be read by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.sources.partition import ContentDigest, Partition, Source
from surge_dagster.engine.tables.frames import FrameCatalog, FrameTable
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import refusal, rows_of
from tests.engine.sources.tables import contents, versions
from tests.small_catalogs import Rows, ids_of, numbered_rows, write_catalog

CATALOG: dict[str, Rows] = {
    "b": numbered_rows("b", 40),
    "a": numbered_rows("a", 3),
    "ß, 50%": numbered_rows("ß", 2),
}


def shuffled() -> pa.Table:
    """All rows in one table, those of each key apart from each other and in their order."""
    rows: list[dict[str, Any]] = []
    for key, found in CATALOG.items():
        for place, row in enumerate(found):
            rows.append({"category": key, "id": row[0], "text": row[1], "unused": place})
    rows.sort(key=lambda row: (row["unused"], row["category"]))
    return pa.Table.from_pylist(rows)


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
def test_one_frame_gives_what_folders_give(kind: str, tmp_path: Path) -> None:
    folders = open_source(write_catalog(tmp_path / "catalog", CATALOG))
    frame = KINDS[kind](shuffled(), tmp_path / "table")
    assert content(FrameTable(frame, ["category"])) == content(folders)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_for_each_key_gives_what_folders_give(kind: str, tmp_path: Path) -> None:
    folders = open_source(write_catalog(tmp_path / "catalog", CATALOG))
    frames: dict[str, Any] = {}
    for number, key in enumerate(CATALOG):
        of_key = shuffled().filter(pc.field("category") == key)
        frames[key] = KINDS[kind](of_key, tmp_path / str(number))
    assert content(FrameCatalog(frames)) == content(folders)


def test_version_does_not_depend_on_how_rows_lie_in_memory() -> None:
    table = shuffled()
    chunked = pa.Table.from_batches(table.to_batches(max_chunksize=7))
    expected = versions(FrameTable(table, ["category"]))
    assert versions(FrameTable(chunked, ["category"])) == expected


def test_version_changes_with_the_rows_of_its_key_only() -> None:
    table = shuffled()
    other = table.set_column(2, "text", [[*table["text"].to_pylist()[:-1], "another text"]])
    before = versions(FrameTable(table, ["category"]))
    after = versions(FrameTable(other, ["category"]))
    assert dict(before.items() - after.items()).keys() == {"b"}


def test_version_is_that_of_the_same_rows_in_a_table_of_files(tmp_path: Path) -> None:
    pq.write_table(shuffled(), tmp_path / "products.parquet")
    files = open_source(tmp_path / "products.parquet", partition_by=["category"])
    assert versions(FrameTable(pl.DataFrame(shuffled()), ["category"])) == versions(files)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"Delta"}))
def test_frames_have_columns_inside_of_others(kind: str, tmp_path: Path) -> None:
    docs = [{"title": "boots", "more": {"n": 1}}, None, {"title": "hats", "more": None}]
    columns = {"doc": docs, "doc.sku": ["x", "y", "z"], "kind": ["a", "b", "a"]}
    frame = KINDS[kind](pa.table(columns), tmp_path / "table")
    named: Any = {"id": "doc.sku", "text": "{doc.title}/{doc.more.n}", "missing_text": "empty"}

    divided = FrameTable(frame, "kind", **named)
    assert contents(divided) == {"a": [("x", "boots/1"), ("z", "hats/")], "b": [("y", "")]}
    [one] = FrameCatalog({"all": frame}, **named)
    assert ids_of(rows_of(one)) == ["x", "y", "z"]


def test_missing_column_is_refused_with_the_names_of_settings() -> None:
    frame = pa.table({"doc": [{"title": "boots"}], "kind": ["a"]})
    remedy = r"'doc.title'.* with the settings id, text, columns and partition_by\."
    with pytest.raises(ConfigError, match=remedy):
        FrameTable(frame, "kind", id="doc.skew")
    [one] = FrameCatalog({"all": frame})
    assert refusal(one).remedy == "Name the right ones with the settings id, text and columns."


def test_selection_and_settings_together_are_refused() -> None:
    with pytest.raises(TypeError, match="give either a selection or settings; both were given: id"):
        FrameTable(pa.table({}), "kind", Selection(), id="doc.sku")


def test_several_columns_make_one_key_and_keys_come_in_their_order() -> None:
    frame = pl.DataFrame(
        {"lang": ["de", "de", "an"], "n": [10, 9, 10], "id": [1, 2, 3], "text": ["x", "y", "z"]}
    )
    found = contents(FrameTable(frame, ["lang", "n"]))
    assert list(found.items()) == [
        ("lang=an/n=10", [(3, "z")]),
        ("lang=de/n=10", [(1, "x")]),
        ("lang=de/n=9", [(2, "y")]),
    ]


def test_frame_without_rows_has_no_partitions_and_one_by_key_is_empty() -> None:
    frame = pl.DataFrame({"id": [1], "text": ["x"]}).clear()
    assert list(FrameTable(frame, ["id"])) == []
    [empty] = FrameCatalog({"a": frame})
    assert rows_of(empty) == []
    assert empty.rows == 0


def test_frame_with_a_version_is_opened_when_it_is_read() -> None:
    opened: list[str] = []

    def frame(key: str) -> pa.Table:
        opened.append(key)
        return pa.table({"id": [key], "text": [key]})

    frames = {key: partial(frame, key) for key in "ab"}
    _, listed = FrameCatalog(frames, versions={"a": "v1", "b": "v1"})
    assert opened == []
    assert rows_of(listed) == [("b", "b")]
    assert opened == ["b"]


@pytest.mark.parametrize("current", ["v1", "v2", None])
def test_current_version_of_a_frame_is_looked_up(current: str | None) -> None:
    frames = {"a": pa.table({})}
    [listed] = FrameCatalog(frames, versions={"a": "v1"}, current_version={"a": current}.get)
    assert listed.source_version == "v1"
    assert listed.current_source_version() == current


def test_texts_stored_as_runs_are_read() -> None:
    texts = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["x", "y"]))
    [one] = FrameTable(pa.table({"key": ["a"] * 3, "id": [1, 2, 3], "text": texts}), "key")
    assert rows_of(one) == [(1, "x"), (2, "x"), (3, "y")]


def test_order_is_kept_beyond_a_batch_of_rows() -> None:
    rows = np.arange(30_000)
    keys = [f"p{row % 3}" for row in rows]
    frame = pl.DataFrame({"key": keys, "id": rows, "text": keys})
    for number, partition in enumerate(FrameTable(frame, ["key"])):
        assert ids_of(rows_of(partition)) == rows[number::3].tolist()


GOOD = pa.table({"id": [1], "text": ["x"]})


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (GOOD.drop_columns("text"), "Table has no column 'text'; its columns are 'id'. Name the"),
        (GOOD.select(["id", "text", "text"]), "has two columns 'text'"),
        (pa.table({"id": [1, 2], "text": ["x", None]}), "partition 'bad', row 1"),
        (GOOD.to_reader(), "which can be read only once. Give a polars"),
        ([{"id": 1}], "a builtins list, which is not a frame"),
    ],
)
def test_bad_frame_is_refused_by_name_and_the_others_go_on(frame: Any, reason: str) -> None:
    bad, good = FrameCatalog({"bad": frame, "good": GOOD})
    assert rows_of(good) == [(1, "x")]
    assert reason in str(refusal(bad))


def test_a_frame_without_usable_key_columns_is_refused_as_a_whole() -> None:
    frame = pl.DataFrame({"nested": [[1], [2]], "id": [1, 2], "text": ["x", "y"]})
    for given in (frame, frame.lazy()):
        with pytest.raises(ConfigError, match="the column 'nested' of products has type"):
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


def broken() -> pl.DataFrame:
    raise RuntimeError("the warehouse said no\nand more")


@pytest.mark.parametrize("has_versions", [False, True])
@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (pl.LazyFrame({"id": ["1"], "text": ["x"]}).cast({"text": pl.Int64}), "conversion"),
        (broken, r"RuntimeError: the warehouse said no\). Correct"),
    ],
)
def test_frame_that_cannot_be_computed_is_refused(
    frame: Any, reason: str, has_versions: bool
) -> None:
    [listed] = FrameCatalog({"a": frame}, versions={"a": "1"} if has_versions else None)
    assert re.search(rf"could not be computed \(.*{reason}", str(refusal(listed)))


def test_lazy_frame_whose_file_is_gone_is_transient(tmp_path: Path) -> None:
    [gone] = FrameCatalog({"gone": pl.scan_parquet(tmp_path / "gone.parquet")})
    with pytest.raises(TransientError, match=r"'gone': its frame could not be read .* Open it"):
        rows_of(gone)


def test_table_of_a_frame_that_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ConfigError, match="products: its frame could not be computed"):
        FrameTable(pl.LazyFrame({"id": ["x"]}).cast(pl.Int64), ["id"], url="products", text="id")


def test_delta_table_is_read_as_it_was_opened(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="not installed: the extra 'delta'")
    [partition] = FrameCatalog({"a": delta(GOOD, tmp_path)})
    deltalake.write_deltalake(tmp_path, GOOD.slice(1), mode="overwrite")
    assert rows_of(partition) == [(1, "x")]

    newest = deltalake.DeltaTable(tmp_path)
    newest.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(TransientError, match="partition 'a': its frame could not be read"):
        rows_of(partition)


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
