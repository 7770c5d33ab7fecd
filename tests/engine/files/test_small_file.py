"""Files of a few rows: every byte is what pyarrow's own writer would have written."""

from __future__ import annotations

import io
import logging
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.files import parquet_proof
from surge_dagster.engine.files import small_file as module
from surge_dagster.engine.files.embedding_file import EmbeddingFileWriter, FileFacts, FileRows
from surge_dagster.engine.files.parquet_proof import arrow_writer
from surge_dagster.engine.files.small_file import MAX_ROWS, small_file

ID_TYPES = [pa.string(), pa.int64(), pa.binary()]


def facts(rows: int, dimension: int, key: str = "shoes", **other: int) -> FileFacts:
    return FileFacts(key, "space-1", "model", "fp32", "v1", "0" * 32, "1" * 32, rows, dimension, other.get("cut", 0))


def by_pyarrow(ids: pa.Array, texts: pa.Array | None, matrix: np.ndarray, said: FileFacts) -> bytes:
    sink = pa.BufferOutputStream()
    writer = EmbeddingFileWriter(
        sink, ids.type, matrix.shape[1], str(matrix.dtype), include_text=texts is not None, compress=False
    )
    sink = pa.BufferOutputStream()
    writer._writer = arrow_writer(sink, writer.schema, compress=False)
    writer.append(ids, texts, matrix)
    writer.close(said)
    return sink.getvalue().to_pybytes()


def ids_of(kind: pa.DataType, rows: int) -> pa.Array:
    return pa.array(range(-3, rows - 3) if kind == pa.int64() else [f"ä{row}" for row in range(rows)], kind)


@pytest.mark.parametrize("kind", ID_TYPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("include_text", [True, False])
def test_files_of_every_form_are_pyarrows_own(kind: pa.DataType, dtype: str, include_text: bool) -> None:
    random = np.random.default_rng(1)
    for dimension in (1, 7, 8, 9, 16, 384, 512):
        for rows in (1, 2, 10, MAX_ROWS):
            ids = ids_of(kind, rows)
            texts = pa.array([f"text {row}" for row in range(rows)], pa.large_string()) if include_text else None
            matrix = random.normal(size=(rows, dimension)).astype(dtype)
            said = facts(rows, dimension, cut=rows)
            assert small_file(FileRows([ids], kind, texts, matrix), said) == by_pyarrow(ids, texts, matrix, said)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    texts=st.lists(st.text(max_size=60), min_size=1, max_size=12),
    cut=st.integers(0, 12),
    key=st.text(min_size=1, max_size=300).filter(lambda key: key.isprintable()),
)
def test_whatever_stands_in_them(texts: list[str], cut: int, key: str) -> None:
    rows = len(texts)
    column = pa.array(["left out", *texts], pa.large_string())[1:]
    ids = pa.array([f"{row}{text}" for row, text in enumerate(texts)])
    matrix = np.random.default_rng(rows).normal(size=(rows, 12)).astype("float32")
    said = facts(rows, 12, key)
    found = small_file(FileRows([ids[:cut], ids[cut:]], pa.string(), column, matrix), said)
    assert found == by_pyarrow(ids, column, matrix, said)


def test_they_read_back_with_their_checksums() -> None:
    ids, texts = ids_of(pa.string(), 10), pa.array([f"text {row}" for row in range(10)], pa.large_string())
    matrix = np.random.default_rng(2).normal(size=(10, 8)).astype("float32")
    raw = small_file(FileRows([ids], pa.string(), texts, matrix), facts(10, 8))
    assert raw is not None
    table = pq.read_table(io.BytesIO(raw), page_checksum_verification=True)
    assert table["id"].to_pylist() == ids.to_pylist()
    assert table["text"].to_pylist() == texts.to_pylist()
    assert np.array_equal(np.stack(table["embedding"].to_numpy()), matrix)
    damaged = bytearray(raw)
    damaged[raw.index(matrix[3].tobytes()) + 5] ^= 1
    with pytest.raises(OSError, match=r"(?i)crc"):
        pq.read_table(io.BytesIO(bytes(damaged)), page_checksum_verification=True)


@pytest.mark.parametrize(
    ("rows", "dimension", "text"),
    [(0, 8, ""), (MAX_ROWS + 1, 8, "x"), (10, 8, "x" * 410), (10, 20_000, "x")],
    ids=["no rows", "many rows", "texts that are compressed", "wide vectors"],
)
def test_what_is_not_small_is_left_to_pyarrow(rows: int, dimension: int, text: str) -> None:
    texts = pa.array([text] * rows, pa.large_string())
    matrix = np.zeros((rows, dimension), "float32")
    assert small_file(FileRows([ids_of(pa.string(), rows)], pa.string(), texts, matrix), facts(rows, dimension)) is None


def test_a_pyarrow_that_writes_another_form_writes_the_files_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(sink: Any, schema: pa.Schema, *, compress: bool) -> pq.ParquetWriter:
        writer = arrow_writer(sink, schema, compress=compress)
        writer.add_key_value_metadata({"another": "entry"})
        return writer

    monkeypatch.setattr(module._proofs, "_frames", {})
    monkeypatch.setattr(parquet_proof, "arrow_writer", other)
    ids, matrix = ids_of(pa.string(), 3), np.zeros((3, 8), "float32")
    with caplog.at_level(logging.WARNING):
        assert small_file(FileRows([ids], pa.string(), None, matrix), facts(3, 8)) is None
        assert small_file(FileRows([ids], pa.string(), None, matrix), facts(3, 8)) is None
    assert caplog.text.count("left to pyarrow") == 1
