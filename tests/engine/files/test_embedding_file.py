"""The output file: exactly format 1, by reference instead of by copy, and no damage unnoticed."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.files.embedding_file import (
    MAX_ROW_GROUP_ROWS,
    EmbeddingFileWriter,
    FileFacts,
    InvalidFile,
    check_schema,
    desired_version,
    matrix_of,
    page_window_bytes,
    piece_bytes,
    read_facts,
    read_rows,
    row_group_rows,
    schema,
)
from surge_dagster.engine.files.validation import invalid_row

FACTS = FileFacts("Köln", "hash-16-abc", "hash://16", "fp32", "v1", "0" * 32, "1" * 32, 5, 16, 2)


def facts_of(rows: int, dimension: int = 16) -> FileFacts:
    return FileFacts("k", "s-1", "m", "fp32", "v1", "0" * 32, "1" * 32, rows, dimension, 0)


def unit_vectors(rows: int, dimension: int, dtype: str = "float32") -> np.ndarray:
    values = np.random.default_rng(3).standard_normal((rows, dimension))
    return (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(dtype)


def write(
    path: Path,
    matrix: np.ndarray,
    *,
    ids: pa.Array | None = None,
    include_text: bool = True,
    facts: FileFacts | None = None,
    pieces: int = 1,
) -> pa.Schema:
    rows, dimension = matrix.shape
    column: Any = pa.array([f"id-{row}" for row in range(rows)], pa.string()) if ids is None else ids
    texts = pa.array([f"text {row} of many" for row in range(rows)], pa.large_string())
    with (
        pa.OSFile(str(path), "wb") as sink,
        EmbeddingFileWriter(sink, column.type, dimension, str(matrix.dtype), include_text=include_text) as writer,
    ):
        for part in np.array_split(np.arange(rows), pieces):
            if len(part):
                cut = slice(int(part[0]), int(part[-1]) + 1)
                writer.append(column[cut], texts[cut] if include_text else None, matrix[cut])
        writer.close(facts or facts_of(rows, dimension))
        return writer.schema


class TestFormat:
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    @pytest.mark.parametrize("id_type", [pa.string(), pa.int64(), pa.binary()])
    @pytest.mark.parametrize("include_text", [True, False])
    def test_columns_are_those_of_format_1(
        self, tmp_path: Path, dtype: str, id_type: pa.DataType, include_text: bool
    ) -> None:
        values: list[Any] = {pa.string(): ["a", "b"], pa.int64(): [1, 2], pa.binary(): [b"a", b"b"]}[id_type]
        matrix = unit_vectors(2, 3, dtype)
        write(tmp_path / "f", matrix, ids=pa.array(values, id_type), include_text=include_text)
        item = pa.field("item", pa.float32() if dtype == "float32" else pa.float16(), nullable=False)
        expected = [
            pa.field("id", id_type, nullable=False),
            *([pa.field("text", pa.large_string(), nullable=False)] if include_text else []),
            pa.field("embedding", pa.list_(item, 3), nullable=False),
        ]
        table = pq.read_table(tmp_path / "f")
        assert table.schema.equals(pa.schema(expected))
        check_schema(table.schema, dimension=3, dtype=dtype)
        np.testing.assert_array_equal(matrix_of(table.to_batches()[0]), matrix)
        assert table["id"].to_pylist() == values

    def test_embeddings_are_plain_and_texts_are_compressed(self, tmp_path: Path) -> None:
        write(tmp_path / "f", unit_vectors(5, 16))
        footer = pq.read_metadata(tmp_path / "f")
        columns = {
            column.path_in_schema: column
            for column in (footer.row_group(0).column(index) for index in range(footer.num_columns))
        }
        embedding = columns["embedding.list.item"]
        assert (embedding.compression, columns["text"].compression) == ("UNCOMPRESSED", "ZSTD")
        assert not any("DICTIONARY" in encoding for column in columns.values() for encoding in column.encodings)
        assert not any(column.is_stats_set for column in columns.values())

    @pytest.mark.parametrize(("dimension", "rows"), [(16, 70_000), (384, 30_000)])
    def test_row_groups_are_bounded_in_rows_and_bytes(self, tmp_path: Path, dimension: int, rows: int) -> None:
        write(tmp_path / "f", unit_vectors(rows, dimension))
        footer = pq.read_metadata(tmp_path / "f")
        sizes = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        assert len(sizes) > 1
        assert sum(sizes) == rows
        assert max(sizes) == row_group_rows(dimension, 4) <= MAX_ROW_GROUP_ROWS
        assert max(sizes) * dimension * 4 <= 4 * 1024 * 1024

    def test_several_pieces_make_the_same_rows_as_one(self, tmp_path: Path) -> None:
        matrix = unit_vectors(100, 16)
        write(tmp_path / "one", matrix)
        write(tmp_path / "many", matrix, pieces=7)
        assert pq.read_metadata(tmp_path / "many").num_row_groups == 7
        assert pq.read_table(tmp_path / "one").equals(pq.read_table(tmp_path / "many"))

    def test_no_rows_make_a_valid_file(self, tmp_path: Path) -> None:
        written = write(tmp_path / "f", unit_vectors(0, 16))
        assert read_facts(pq.read_metadata(tmp_path / "f")).rows == 0
        table = pq.read_table(tmp_path / "f")
        assert table.num_rows == 0
        assert table.schema.equals(written)

    def test_other_readers_get_plain_lists(self, tmp_path: Path) -> None:
        import polars

        matrix = unit_vectors(4, 3)
        write(tmp_path / "f", matrix)
        frame = polars.read_parquet(tmp_path / "f")
        assert frame["id"].to_list() == [f"id-{row}" for row in range(4)]
        np.testing.assert_array_equal(np.array(frame["embedding"].to_list(), np.float32), matrix)


class TestZeroCopy:
    def test_the_embedding_column_is_the_matrix_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handed_over: list[pa.Table] = []
        monkeypatch.setattr(EmbeddingFileWriter, "append_table", lambda self, table: handed_over.append(table))
        matrix = unit_vectors(1000, 16)
        writer = EmbeddingFileWriter(pa.BufferOutputStream(), pa.string(), 16, "float32", include_text=False)
        writer.append(pa.array([str(row) for row in range(300)]), None, matrix[100:400])
        [chunk] = handed_over[0]["embedding"].chunks
        values = chunk.flatten()
        assert values.buffers()[1].address + values.offset * 4 == matrix[100:].ctypes.data

    def test_what_is_read_is_a_view_too(self, tmp_path: Path) -> None:
        write(tmp_path / "f", unit_vectors(10, 16))
        [batch] = pq.read_table(tmp_path / "f").to_batches()
        view = matrix_of(batch[3:7])  # pyright: ignore[reportArgumentType]
        values = batch.column("embedding").flatten()
        assert view.ctypes.data == values.buffers()[1].address + 3 * 16 * 4


class TestFacts:
    def test_facts_come_back_as_they_were_written(self, tmp_path: Path) -> None:
        write(tmp_path / "f", unit_vectors(5, 16), facts=FACTS)
        assert read_facts(pq.read_metadata(tmp_path / "f")) == FACTS

    def test_the_footer_names_every_fact_of_the_format(self, tmp_path: Path) -> None:
        write(tmp_path / "f", unit_vectors(5, 16), facts=FACTS)
        names = {name.decode() for name in pq.read_metadata(tmp_path / "f").metadata or {}}
        promised = (
            "format partition_key space model precision source_version content_digest desired_version rows dimension "
            "truncated writer"
        )
        assert {f"surge.{name}" for name in promised.split()} <= names

    @pytest.mark.parametrize("name", ["surge.partition_key", "surge.source_version", "surge.truncated", "surge.space"])
    def test_a_changed_fact_is_noticed(self, name: str) -> None:
        entries = FACTS.to_metadata()
        entries[name.encode()] += b"1"
        with pytest.raises(InvalidFile, match="do not match their own digest"):
            read_facts(footer_of(entries))

    def test_a_missing_fact_is_noticed(self) -> None:
        entries = FACTS.to_metadata()
        del entries[b"surge.rows"]
        with pytest.raises(InvalidFile, match="do not match their own digest"):
            read_facts(footer_of(entries))

    def test_another_number_of_rows_is_noticed(self) -> None:
        with pytest.raises(InvalidFile, match="promise 5 rows and it has 3"):
            read_facts(footer_of(FACTS.to_metadata(), rows=3))

    def test_a_file_of_somebody_else_is_no_embedding_file(self) -> None:
        with pytest.raises(InvalidFile, match="name the format None; expected '1'"):
            read_facts(footer_of({}))

    def test_the_desired_version_depends_on_content_and_space(self) -> None:
        made = {desired_version("a", "s"), desired_version("b", "s"), desired_version("a", "t")}
        assert len(made) == 3
        assert all(len(version) == 32 for version in made)


def footer_of(entries: dict[bytes, bytes], rows: int = 5) -> pq.FileMetaData:
    sink = pa.BufferOutputStream()
    table = pa.table({"x": list(range(rows))}).replace_schema_metadata(entries)
    pq.write_table(table, sink)
    return pq.read_metadata(pa.BufferReader(sink.getvalue()))


class TestDamage:
    def test_a_flipped_bit_in_any_page_is_noticed(self, tmp_path: Path) -> None:
        matrix = unit_vectors(200, 16)
        write(tmp_path / "f", matrix)
        good = (tmp_path / "f").read_bytes()
        pages = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
        reference = pq.read_table(tmp_path / "f")
        chance = random.Random(11)
        noticed = 0
        for _ in range(200):
            damaged = bytearray(good)
            damaged[chance.randrange(4, pages)] ^= 1 << chance.randrange(8)
            try:
                found = rows_of(bytes(damaged))
                assert found.equals(reference), "a reader must not get other rows without noticing"
            except InvalidFile:
                noticed += 1
        assert noticed > 180

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
    def test_a_truncated_file_is_noticed(self, tmp_path: Path, share: float) -> None:
        write(tmp_path / "f", unit_vectors(200, 16))
        content = (tmp_path / "f").read_bytes()
        with pytest.raises((InvalidFile, pa.ArrowException, OSError)):
            rows_of(content[: int(len(content) * share)])


def rows_of(content: bytes) -> pa.Table:
    with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as reader:
        read_facts(reader.metadata)
        check_schema(reader.schema_arrow, dimension=16, dtype="float32")
        return pa.Table.from_batches(list(read_rows(reader)))


class TestSchemaCheck:
    @pytest.mark.parametrize(
        ("found", "dimension", "dtype"),
        [
            (schema(pa.string(), 16, "float32", include_text=True), 17, "float32"),
            (schema(pa.string(), 16, "float32", include_text=True), 16, "float16"),
            (schema(pa.string(), 16, "float32", include_text=True).remove(2), 16, "float32"),
            (schema(pa.string(), 16, "float32", include_text=True).remove(0), 16, "float32"),
            (schema(pa.float64(), 16, "float32", include_text=True), 16, "float32"),
            (schema(pa.string(), 16, "float32", include_text=True).append(pa.field("x", pa.int8())), 16, "float32"),
            (pa.schema([("id", pa.string()), ("embedding", pa.list_(pa.float32(), 16))]), 16, "float32"),
        ],
    )
    def test_other_columns_are_refused(self, found: pa.Schema, dimension: int, dtype: str) -> None:
        with pytest.raises(InvalidFile):
            check_schema(found, dimension=dimension, dtype=dtype)


WRITE_IN_A_FRESH_PROCESS = """
import os, sys
import numpy as np, pyarrow as pa
from surge_dagster.engine.files.embedding_file import FileFacts, FileRows, write_parquet_file

class Upload:
    # Drops what is written, and counts the copy that is written with one call.
    sink, copied = pa.OSFile("/dev/null", "wb"), 0
    def write(self, data):
        self.copied = len(data)

rows, dimension, text_bytes, dtype = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
noise = np.random.default_rng(1).bytes(text_bytes).hex()[:text_bytes]  # zstd cannot make it much smaller
texts, ids = pa.array([noise] * rows, pa.large_string()), pa.array([str(row) for row in range(rows)])
matrix = np.random.default_rng(2).standard_normal((rows, dimension)).astype(dtype)
watched = pa.proxy_memory_pool(pa.default_memory_pool())
pa.set_memory_pool(watched)
upload = Upload()
facts = FileFacts("k", "s-1", "m", "fp32", "v1", "0" * 32, "1" * 32, rows, dimension, 0)
write_parquet_file(upload, FileRows([ids], pa.string(), texts, matrix), facts)
print(watched.max_memory() + upload.copied, flush=True)
os._exit(0)  # the pool must not go before what it gave out
"""


class TestMemoryOfWriting:
    @pytest.mark.parametrize(
        ("rows", "dimension", "text_bytes", "dtype"),
        [
            (30_000, 384, 46, "float32"),
            (30_000, 384, 46, "float16"),
            (1_000, 16, 30_000, "float32"),
            (1, 384, 46, "float32"),
            (10, 384, 46, "float32"),
            (35, 384, 46, "float32"),
            (20, 16, 3_000, "float32"),
            (10_000, 14, 200, "float32"),
        ],
    )
    def test_the_estimate_covers_what_arrow_really_takes(
        self, rows: int, dimension: int, text_bytes: int, dtype: str
    ) -> None:
        command = [sys.executable, "-c", WRITE_IN_A_FRESH_PROCESS, *map(str, (rows, dimension, text_bytes)), dtype]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
        window = page_window_bytes(rows * text_bytes, text_bytes)
        estimate = piece_bytes(rows, dimension, np.dtype(dtype).itemsize, window)
        assert 0 < peak <= estimate


class TestVectors:
    def test_good_vectors_pass(self) -> None:
        assert invalid_row(unit_vectors(20_000, 8), normalized=True) is None
        assert invalid_row(unit_vectors(5000, 8, "float16"), normalized=True) is None
        assert invalid_row(np.zeros((0, 8), np.float32), normalized=True) is None
        assert invalid_row(unit_vectors(10, 8) * 7, normalized=False) is None
        assert invalid_row(np.full((2, 8), 3e38, np.float32), normalized=False) is None, (
            "finite, though its square is not"
        )

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("normalized", [True, False])
    def test_a_vector_that_is_not_finite_is_named(self, value: float, normalized: bool, dtype: str) -> None:
        matrix = unit_vectors(20_000, 8, dtype)
        matrix[[17_321, 19_999], 3] = value
        assert invalid_row(matrix, normalized=normalized) == (17_321, "its vector is not finite")

    @pytest.mark.parametrize("row", [0, 16_383, 16_384, 19_999])
    def test_a_vector_of_another_length_is_named(self, row: int) -> None:
        matrix = unit_vectors(20_001, 8)
        matrix[row] *= 1.01
        matrix[20_000] = 0
        assert invalid_row(matrix, normalized=True) == (row, "its vector has length 1.0100; expected 1")
        matrix[20_000, 3] = np.nan
        assert invalid_row(matrix, normalized=True) == (row, "its vector has length 1.0100; expected 1"), "the first"

    @pytest.mark.parametrize(("factor", "good"), [(1.0009, True), (0.9991, True), (1.0011, False), (0.9989, False)])
    def test_a_float32_vector_may_miss_its_length_by_a_thousandth(self, factor: float, good: bool) -> None:
        matrix = unit_vectors(700, 384)
        matrix[699] *= np.float32(factor)
        assert (invalid_row(matrix, normalized=True) is None) == good

    @pytest.mark.parametrize(("factor", "good"), [(1.004, True), (0.996, True), (1.007, False), (0.993, False)])
    def test_a_float16_vector_may_miss_its_length_by_what_it_is_rounded(self, factor: float, good: bool) -> None:
        matrix = (unit_vectors(700, 384) * np.float32(factor)).astype(np.float16)
        assert (invalid_row(matrix, normalized=True) is None) == good

    def test_float16_vectors_of_any_finite_values_pass(self) -> None:
        matrix = np.full((300, 8), 65_504, np.float16)
        matrix[7] = 6e-8  # smaller than any normal number of that type
        assert invalid_row(matrix, normalized=False) is None
