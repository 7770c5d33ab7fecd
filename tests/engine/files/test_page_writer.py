"""Files of any size: every byte is what pyarrow's own writer would have written, and no vector is copied for it."""

from __future__ import annotations

import io
import logging
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.files import page_writer as module
from surge_dagster.engine.files import parquet_proof
from surge_dagster.engine.files.embedding_file import EmbeddingFileWriter, FileFacts, row_group_rows, schema
from surge_dagster.engine.files.page_writer import PageWriter
from surge_dagster.engine.files.parquet_columns import vector_page_rows
from surge_dagster.engine.files.parquet_proof import WRITE_BATCH_ROWS, arrow_writer

ID_TYPES = [pa.string(), pa.int64(), pa.binary()]


def facts(rows: int, dimension: int) -> FileFacts:
    return FileFacts("shoes", "space-1", "model", "fp32", "v1", "0" * 32, "1" * 32, rows, dimension, 0)


def ids_of(kind: pa.DataType, rows: int) -> pa.Array:
    return pa.array(range(-3, rows - 3) if kind == pa.int64() else [f"ä{row}" for row in range(rows)], kind)


def texts_of(rows: int, longest: int = 1) -> pa.Array:
    return pa.array([f"Größe {row} " * (row % longest) + "\n☃" * (row % 3) for row in range(rows)], pa.large_string())


def vectors_of(rows: int, dimension: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, dimension), np.float32).astype(dtype)


def written(
    ids: pa.Array,
    texts: pa.Array | None,
    matrix: np.ndarray,
    *,
    borders: list[int] | None = None,
    compress: bool = True,
    by_pyarrow: bool = False,
) -> bytes:
    rows, dimension = matrix.shape
    sink = pa.BufferOutputStream()
    settings = {"include_text": texts is not None, "compress": compress}
    with EmbeddingFileWriter(sink, ids.type, dimension, str(matrix.dtype), **settings) as writer:
        if by_pyarrow:
            sink = pa.BufferOutputStream()
            writer._writer = arrow_writer(sink, writer.schema, compress=compress)
        else:
            assert isinstance(writer._writer, PageWriter) == (dimension > 13), "the rest is pyarrow's"
        start = 0
        for stop in [*(borders or []), rows]:
            part = slice(start, stop)
            writer.append(ids[part], None if texts is None else texts[part], matrix[part])
            start = stop
        writer.close(facts(rows, dimension))
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dimension", [1, 3, 30, 255, 384, 768, 1024, 1025])
def test_files_around_every_border_are_pyarrows_own(dimension: int, dtype: str) -> None:
    itemsize = np.dtype(dtype).itemsize
    group = row_group_rows(dimension, itemsize)
    page = vector_page_rows(group, dimension, itemsize)[0]
    enough = -(-256 * 1024 // (dimension * itemsize))
    counts = {0, 1, 2, enough, enough + 1, page, page + 1, page + 2, group - 1, group, group + 1}
    for rows in sorted(count for count in counts if count * dimension < 600_000):
        ids, texts, matrix = ids_of(pa.string(), rows), texts_of(rows), vectors_of(rows, dimension, dtype)
        found = written(ids, texts, matrix)
        assert found == written(ids, texts, matrix, by_pyarrow=True), f"{rows} rows"


@pytest.mark.parametrize("kind", ID_TYPES, ids=str)
@pytest.mark.parametrize("include_text", [True, False])
@pytest.mark.parametrize("compress", [True, False])
def test_files_of_every_form_are_pyarrows_own(kind: pa.DataType, include_text: bool, compress: bool) -> None:
    rows, dimension = 2500, 100
    ids, matrix = ids_of(kind, rows), vectors_of(rows, dimension, "float32")
    texts = texts_of(rows, 40) if include_text else None
    borders = [1, 1300, 1301]
    found = written(ids, texts, matrix, borders=borders, compress=compress)
    assert found == written(ids, texts, matrix, borders=borders, compress=compress, by_pyarrow=True)
    pages = pq.read_metadata(io.BytesIO(found)).row_group(1).column(0).num_values
    assert pages == 1299


def test_texts_are_cut_into_pages_as_pyarrow_cuts_them() -> None:
    rows, dimension = 5000, 30
    assert row_group_rows(dimension, 4) > rows > 4 * WRITE_BATCH_ROWS
    ids, matrix = ids_of(pa.string(), rows), vectors_of(rows, dimension, "float32")
    for longest in (1, 10, 60, 400):
        texts = texts_of(rows, longest)
        assert written(ids, texts, matrix) == written(ids, texts, matrix, by_pyarrow=True)


def test_files_of_many_row_groups_are_pyarrows_own() -> None:
    ids, texts, matrix = ids_of(pa.string(), 9000), texts_of(9000, 7), vectors_of(9000, 384, "float16")
    assert written(ids, texts, matrix) == written(ids, texts, matrix, by_pyarrow=True)


def test_texts_may_be_empty_or_very_long() -> None:
    matrix = vectors_of(300, 384, "float32")
    for values in ([""] * 300, ["x" * 5_000_000, *["ü"] * 298, "y" * 300_000]):
        texts = pa.array(values, pa.large_string())
        ids = pa.array([f"{row}" for row in range(300)])
        assert written(ids, texts, matrix) == written(ids, texts, matrix, by_pyarrow=True)


def test_columns_that_come_in_pieces_make_the_same_file() -> None:
    rows, dimension = 1500, 384
    ids, texts, matrix = ids_of(pa.string(), rows), texts_of(rows, 20), vectors_of(rows, dimension, "float32")
    whole = written(ids, texts, matrix)
    [batch] = pq.read_table(io.BytesIO(whole)).combine_chunks().to_batches()
    for size in (1, 97, 400, 1499):
        pieces = [batch.slice(start, size) for start in range(0, rows, size)]
        sink = pa.BufferOutputStream()
        with EmbeddingFileWriter(sink, pa.string(), dimension, "float32", include_text=True) as writer:
            writer.append_table(pa.Table.from_batches(pieces, schema=writer.schema))  # pyright: ignore[reportArgumentType]
            writer.close(facts(rows, dimension))
        assert sink.getvalue().to_pybytes() == whole


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_others_read_them_and_notice_damage(dtype: str) -> None:
    import polars

    rows = 1500
    ids, texts, matrix = ids_of(pa.string(), rows), texts_of(rows, 5), vectors_of(rows, 384, dtype)
    raw = written(ids, texts, matrix, borders=[500])
    table = pq.read_table(io.BytesIO(raw), page_checksum_verification=True)
    frame = polars.read_parquet(io.BytesIO(raw))
    assert table["id"].to_pylist() == ids.to_pylist() == frame["id"].to_list()
    assert table["text"].to_pylist() == texts.to_pylist() == frame["text"].to_list()
    np.testing.assert_array_equal(np.stack(table["embedding"].to_numpy()), matrix)
    np.testing.assert_array_equal(np.array(frame["embedding"].to_list(), dtype), matrix)
    for part in (matrix[1234].tobytes(), raw[40:60]):  # a vector, and what a text or an id was compressed to
        damaged = bytearray(raw)
        damaged[raw.index(part) + 5] ^= 1
        with pytest.raises(OSError, match=r"(?i)crc"):
            pq.read_table(io.BytesIO(bytes(damaged)), page_checksum_verification=True)


class Recorder:
    """A sink that keeps where the large parts that it is given lie in memory."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []

    def write(self, part: Any) -> int:
        if len(part) > 100_000:
            self.places.append((np.frombuffer(part, np.uint8).ctypes.data, len(part)))
        return len(part)


def test_vectors_are_written_from_where_they_lie() -> None:
    matrix = vectors_of(700, 384, "float32")
    kind = schema(pa.string(), 384, "float32", include_text=False)
    with EmbeddingFileWriter(pa.BufferOutputStream(), pa.string(), 384, "float32", include_text=False) as writer:
        assert isinstance(writer._writer, PageWriter)
        writer._writer._sink = recorder = Recorder()
        assert writer.schema == kind
        writer.append(ids_of(pa.string(), 690), None, matrix[10:])
    begin = matrix[10:].ctypes.data
    assert recorder.places == [
        (begin + page * 171 * 1536, rows * 1536) for page, rows in enumerate([171, 171, 171, 169])
    ]


def test_a_null_is_refused() -> None:
    with EmbeddingFileWriter(pa.BufferOutputStream(), pa.string(), 384, "float32", include_text=False) as writer:
        with pytest.raises(pa.ArrowInvalid, match="1 ids or texts are null"):
            writer.append(pa.array(["a", None]), None, vectors_of(2, 384, "float32"))
        broken = pa.array([[1.0] * 384, None], pa.list_(pa.float32(), 384))
        table = pa.table([pa.array(["a", "b"]), broken], names=["id", "embedding"])
        with pytest.raises(pa.ArrowInvalid, match="an embedding or one of its values is null"):
            writer.append_table(table)


def test_a_pyarrow_that_writes_another_form_writes_the_files_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(sink: Any, schema: pa.Schema, *, compress: bool) -> pq.ParquetWriter:
        return pq.ParquetWriter(sink, schema, data_page_size=100_000)

    monkeypatch.setattr(module._proofs, "_frames", {})
    monkeypatch.setattr(parquet_proof, "arrow_writer", other)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            writer = EmbeddingFileWriter(pa.BufferOutputStream(), pa.string(), 384, "float32", include_text=True)
            assert isinstance(writer._writer, pq.ParquetWriter)
    assert caplog.text.count("left to pyarrow") == 1
