"""Loading gives the rows that were written: all of them, of one space, and damage is always
noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from surge_dagster import open_embeddings
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.store.object_store import ObjectStore
from surge_dagster.engine.support.footer_memory import forget_all
from surge_dagster.engine.tables.frames import FrameCatalog
from tests.engine import runs
from tests.engine.carried_values import VALUES
from tests.engine.outputs import Load, Output, both_ways, output
from tests.engine.store.object_server import ObjectServer, open_bucket

__all__ = ["output"]

LONG = "shoes/" + "x" * 300
KEYS = ["Köln, 50%", "b", LONG]


@pytest.fixture
def vectors(output: Output) -> dict[str, np.ndarray]:
    """Three partitions, one of them in several row groups' worth of batches; by key."""
    return {key: output.put(key, rows) for key, rows in zip(KEYS, (3, 20_000, 5), strict=True)}


def matrix_in(table: pa.Table) -> np.ndarray:
    column = table["embedding"].combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=False).reshape(table.num_rows, -1)


@both_ways
def test_every_row_is_loaded_with_its_partition_and_its_own_vector(
    output: Output, vectors: dict[str, np.ndarray], load: Load
) -> None:
    opened = open_embeddings(output.root)
    assert opened.keys() == sorted(KEYS)
    assert opened.space == output.space
    assert opened.dimension == 16
    assert opened.rows == 20_008
    table = load(opened)
    assert table.column_names == ["partition", "id", "text", "truncated", "embedding"]
    assert table.num_rows == 20_008
    for key, expected in vectors.items():
        rows = table.filter(ds.field("partition") == key)
        assert rows["id"].to_pylist() == [str(row) for row in range(len(expected))]
        assert rows["text"].to_pylist() == [f"{key} {row}" for row in range(len(expected))]
        np.testing.assert_array_equal(matrix_in(rows), expected)

    requested = load(opened, [LONG, "Köln, 50%", LONG])
    assert requested["partition"].to_pylist() == [LONG] * 5 + ["Köln, 50%"] * 3, (
        "in the requested order, each once"
    )
    assert load(opened, []).num_rows == 0


def test_column_types_are_those_of_the_file(output: Output, vectors: dict[str, np.ndarray]) -> None:
    opened = open_embeddings(output.root)
    expected = {
        "partition": pl.String,
        "id": pl.String,
        "text": pl.String,
        "truncated": pl.Boolean,
        "embedding": pl.Array(pl.Float32, 16),
    }
    assert opened.lazy().collect_schema() == expected
    assert opened.lazy(["b"]).collect().schema == expected
    item = pa.field("item", pa.float32(), nullable=False)
    assert opened.dataset().schema.field("embedding").type == pa.list_(item, 16)


@both_ways
@pytest.mark.parametrize("id_type", [pa.int64(), pa.binary()])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_types_of_ids_and_vectors_are_loaded(
    tmp_path: Path, load: Load, id_type: pa.DataType, dtype: str
) -> None:
    output = Output(tmp_path / "out", EncodingSpec("hash://8", dtype=dtype))
    matrix = output.put("a", 4, id_type=id_type)
    table = load(open_embeddings(output.root))
    assert table["id"].cast(pa.string()).to_pylist() == ["0", "1", "2", "3"]
    np.testing.assert_array_equal(matrix_in(table), matrix)


@pytest.mark.parametrize("kind", VALUES)
def test_carried_column_of_any_type_is_loaded(
    hash_pool: EncoderPool, tmp_path: Path, kind: str
) -> None:
    table = pa.table({"id": ["a", "b", "c"], "text": ["x", "y", "z"], "value": VALUES[kind]})
    source = FrameCatalog({"k": table}, Selection(carried=("value",)), versions={"k": "1"})
    runs.Output(hash_pool, tmp_path).embed(source)
    opened = open_embeddings(tmp_path)

    assert opened.dataset().to_table().num_rows == 3
    if kind == "decimal256":
        with pytest.raises(ConfigError, match=r"polars does not have a type .* with dataset"):
            opened.lazy()
    else:
        assert opened.lazy().select("value").collect().height == 3


@both_ways
def test_missing_texts_are_null_and_without_any_texts_there_is_no_column(
    output: Output, load: Load
) -> None:
    output.put("a", 2)
    output.put("b", 2, include_text=False)
    opened = open_embeddings(output.root)
    assert load(opened)["text"].to_pylist() == ["a 0", "a 1", None, None]
    assert load(opened, ["b", "a"])["text"].to_pylist() == [None, None, "a 0", "a 1"]
    assert load(opened, ["b"]).column_names == ["partition", "id", "truncated", "embedding"]


def test_text_hash_is_given_only_on_request(output: Output) -> None:
    output.put("a", 2)
    output.put("b", 1, include_text=False)
    opened = open_embeddings(output.root)
    expected = [sha256(text.encode()).digest()[:16] for text in ("a 0", "a 1", "b 0")]
    for table in (
        opened.lazy(text_hash=True).collect().to_arrow(),
        opened.dataset(text_hash=True).to_table(),
    ):
        names = ["partition", "id", "text", "text_hash", "truncated", "embedding"]
        assert table.column_names == names
        assert table["text_hash"].to_pylist() == expected
    assert (
        opened.lazy(["b"], text_hash=True).select("text_hash").collect()["text_hash"].to_list()
        == expected[2:]
    )
    assert "text_hash" not in opened.lazy().collect_schema().names() + opened.dataset().schema.names


@both_ways
def test_each_row_states_whether_its_text_was_truncated(output: Output, load: Load) -> None:
    output.put("a", 2, truncated=np.array([False, True]))
    output.put("b", 1, truncated=np.array([True]), include_text=False)

    assert load(open_embeddings(output.root))["truncated"].to_pylist() == [False, True, True]


def test_queries_give_the_same_result_as_on_a_table_in_memory(
    output: Output, vectors: dict[str, np.ndarray]
) -> None:
    lazy = open_embeddings(output.root).lazy()
    whole = lazy.collect()
    queries: list[Callable[[Any], Any]] = [
        lambda rows: rows.select(pl.len()),
        lambda rows: rows.head(7),
        lambda rows: rows.tail(2).select("id", "partition"),
        lambda rows: rows.filter(pl.col("id") == "2"),
        lambda rows: rows.filter(pl.col("id") == "2").head(2).select("text"),
        lambda rows: rows.head(4).filter(pl.col("id") == "0"),
        lambda rows: rows.head(4).filter(pl.col("partition") == "b"),
        lambda rows: rows.filter(pl.col("partition").str.contains("50%")).select("embedding"),
        lambda rows: rows.filter((pl.col("partition") == LONG) & (pl.col("id") > "2")),
        lambda rows: rows.group_by("partition").len().sort("partition"),
        lambda rows: rows.select("embedding").slice(19_990, 15),
    ]
    for query in queries:
        for engine in ("in-memory", "streaming"):
            assert query(lazy).collect(engine=engine).equals(query(whole))


def test_filter_on_the_partition_opens_only_the_files_that_match(
    output: Output, vectors: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_embeddings(output.root)
    read: list[str] = []
    original = type(output.store).open
    monkeypatch.setattr(
        type(output.store), "open", lambda self, *of: read.append(of[0]) or original(self, *of)
    )
    lazy = opened.lazy()
    assert read == [], "footers are read from the end of the file"
    assert lazy.filter(pl.col("partition") == LONG).collect().height == 5
    assert read == [output.name(LONG)]
    assert opened.dataset().to_table(filter=ds.field("partition") == LONG).num_rows == 5
    assert (
        opened.facts(LONG).rows
        == opened.dataset([LONG]).count_rows()
        == opened.lazy(LONG).collect().height
        == 5
    )
    assert set(read) == {output.name(LONG)}
    read.clear()
    assert opened.lazy().head(2).collect().height == 2
    assert len(read) == 1


@pytest.mark.parametrize("change", ["replaced", "removed", "same facts"])
def test_file_that_changed_after_opening_is_an_error(output: Output, change: str) -> None:
    output.put("a", 2)
    lazy = open_embeddings(output.root).lazy()
    before = output.path("a").stat()
    if change == "removed":
        output.path("a").unlink()
    else:
        output.put("a", 2, content="1" if change == "replaced" else "0")
        if change == "same facts":
            os.utime(output.path("a"), ns=(before.st_mtime_ns + 1, before.st_mtime_ns + 1))
    with pytest.raises(
        TransientError, match=r"partition 'a': .* was replaced or removed .* Open them again"
    ):
        lazy.collect()


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_file_that_changed_before_its_footer_was_read_is_an_error(
    output: Output, change: str
) -> None:
    output.put("a", 2)
    output.put("b", 2)
    opened = open_embeddings(output.root)
    output.put("c", 2)
    output.path("a").unlink()
    if change == "replaced":
        output.put("a", 3)
    with pytest.raises(ConfigError, match="no embeddings of 'c'"):
        opened.lazy(["c"])
    for partitions in (None, ["a"]):
        with pytest.raises(
            TransientError, match=r"partition 'a': .* was replaced or removed .* Open them again"
        ):
            opened.lazy(partitions)
    assert opened.keys() == ["b"]
    assert opened.rows == 2


class TestBucket:
    """Many small reads, each a request; takes seconds for the server's objects."""

    KEYS = tuple(f"p{number}" for number in range(12))

    @pytest.fixture
    def store(self, object_server: ObjectServer, tmp_path: Path) -> ObjectStore:
        store = open_bucket(object_server)
        forget_all()
        output = Output(tmp_path, EncodingSpec("hash://16"), store)
        for key in self.KEYS:
            output.put(key, 2)
        return store

    @staticmethod
    def requested(server: ObjectServer) -> list[str]:
        """Keys of the partitions whose objects were requested since the last call."""
        found = [
            target.split("?")[0].rpartition("/")[2].partition(".")[0]
            for target in server.requests("GET")
        ]
        server.log.clear()
        return sorted(key for key in found if key.startswith("p"))

    def test_only_footers_of_chosen_partitions_are_requested_and_each_once(
        self, store: ObjectStore, object_server: ObjectServer
    ) -> None:
        object_server.log.clear()
        opened = open_embeddings(store)
        assert self.requested(object_server) == []
        assert opened.facts("p3").rows == 2
        assert opened.facts("p4").rows == 2
        assert opened.lazy(["p3", "p4"]).collect_schema().names() == [
            "partition",
            "id",
            "text",
            "truncated",
            "embedding",
        ]
        assert self.requested(object_server) == ["p3", "p4"]
        assert opened.lazy(["p3"]).collect().height == 2


def test_loading_needs_no_dagster_and_importing_loads_no_library() -> None:
    command = (
        "import sys, surge_dagster; assert not {'polars', 'pyarrow'} & set(sys.modules); "
        "from surge_dagster import open_embeddings; print('dagster' in sys.modules, 'polars' in "
        "sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", command], check=True, capture_output=True, text=True
    )
    assert process.stdout.split() == ["False", "False"]
