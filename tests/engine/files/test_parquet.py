"""Parquet output files: exactly format 2, written by reference without a copy, and no damage passes
unnoticed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.files.facts import FileFacts, InvalidFile
from surge_dagster.engine.files.parquet import OutputFile, read_facts, write_file
from surge_dagster.engine.files.rows import (
    MAX_ROW_GROUP_ROWS,
    check_schema,
    matrix_of,
    row_group_rows,
    schema,
    table_of,
)
from tests.small_catalogs import narrow, row_groups, tamper

FACTS = FileFacts("Köln", "hash-16-abc", "hash://16", "fp32", "v1", "0" * 32, "1" * 32, 5, 16, 2)
HASHED = schema(pa.string(), 16, "float32", include_text=True)


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
    column: Any = (
        pa.array([f"id-{row}" for row in range(rows)], pa.string()) if ids is None else ids
    )
    texts = pa.array([f"text {row} of many" for row in range(rows)], pa.large_string())
    columns = schema(column.type, dimension, str(matrix.dtype), include_text=include_text)
    groups: list[pa.Table] = []
    for part in np.array_split(np.arange(rows), pieces):
        if len(part):
            cut = slice(int(part[0]), int(part[-1]) + 1)
            groups.append(table_of(columns, [column[cut]], texts[cut], matrix[cut]))
    with pa.OSFile(str(path), "wb") as sink:
        write_file(sink, columns, facts or replace(FACTS, rows=rows, dimension=dimension), groups)
    return columns


class TestFormat:
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    @pytest.mark.parametrize("id_type", [pa.string(), pa.int64(), pa.binary()])
    @pytest.mark.parametrize("include_text", [True, False])
    def test_columns_are_those_of_format_2(
        self, tmp_path: Path, dtype: str, id_type: pa.DataType, include_text: bool
    ) -> None:
        values: list[Any] = {
            pa.string(): ["a", "b"],
            pa.int64(): [1, 2],
            pa.binary(): [b"a", b"b"],
        }[id_type]
        matrix = unit_vectors(2, 3, dtype)
        write(tmp_path / "f", matrix, ids=pa.array(values, id_type), include_text=include_text)
        item = pa.field(
            "item", pa.float32() if dtype == "float32" else pa.float16(), nullable=False
        )
        expected = [
            pa.field("id", id_type, nullable=False),
            *([pa.field("text", pa.large_string(), nullable=False)] if include_text else []),
            pa.field("text_hash", pa.binary(16), nullable=False),
            pa.field("truncated", pa.bool_(), nullable=False),
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
        compressions: dict[str, str] = {}
        for index in range(footer.num_columns):
            column = footer.row_group(0).column(index)
            compressions[column.path_in_schema] = column.compression
            assert "DICTIONARY" not in str(column.encodings)
            assert not column.is_stats_set
        assert compressions["embedding.list.item"] == "UNCOMPRESSED"
        assert compressions["text"] == "ZSTD"
        assert compressions["text_hash"] == "UNCOMPRESSED"

    @pytest.mark.parametrize(("dimension", "rows"), [(16, 70_000), (384, 30_000)])
    def test_row_groups_are_bounded_in_rows_and_bytes(
        self, tmp_path: Path, dimension: int, rows: int
    ) -> None:
        write(tmp_path / "f", unit_vectors(rows, dimension))
        footer = pq.read_metadata(tmp_path / "f")
        sizes = row_groups(footer)
        assert len(sizes) > 1
        assert sum(sizes) == rows
        assert max(sizes) == row_group_rows(dimension, 4) <= MAX_ROW_GROUP_ROWS
        assert max(sizes) * dimension * 4 <= 4 * 1024 * 1024


class TestDamage:
    def test_wrong_number_of_rows_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "f", unit_vectors(3, 16), facts=FACTS)
        with pytest.raises(InvalidFile, match="promise 5 rows and it has 3") as error:
            read_facts(pq.read_metadata(tmp_path / "f"))
        assert error.value.flaw == "rows"

    @pytest.mark.parametrize("dimension", [8, -1])
    def test_vectors_of_another_dimension_than_stated_are_refused(
        self, tmp_path: Path, dimension: int
    ) -> None:
        write(tmp_path / "f", unit_vectors(5, 16))
        tamper(tmp_path / "f", lambda table: narrow(table, dimension))

        with pytest.raises(InvalidFile, match="expected 16 numbers per row") as error:
            read_facts(pq.read_metadata(tmp_path / "f"))

        assert error.value.flaw == "dimension"

    def test_file_without_vectors_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "f", unit_vectors(5, 16))
        tamper(tmp_path / "f", lambda table: table.drop_columns(["embedding"]))

        with pytest.raises(InvalidFile, match="no column embedding"):
            read_facts(pq.read_metadata(tmp_path / "f"))

    def test_flipped_bit_never_gives_other_rows(self, tmp_path: Path) -> None:
        """Page checksums cover neither the headers of pages nor the rows that the footer counts."""
        columns = write(tmp_path / "whole", unit_vectors(200, 4), pieces=3)
        content = (tmp_path / "whole").read_bytes()
        pages = 8 * (len(content) - 8 - int.from_bytes(content[-8:-4], "little"))
        expected = OutputFile(pa.OSFile(str(tmp_path / "whole"))).read(batch_rows=64)
        table, noticed, chosen = pa.Table.from_batches(expected), [0, 0], random.Random(7)
        for bit in (40, *chosen.sample(range(8 * len(content)), 3_000)):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            try:
                file = OutputFile(pa.BufferReader(bytes(damaged)))  # pyright: ignore[reportArgumentType]
                found = pa.Table.from_batches(file.read(batch_rows=64), file.columns)
            except (InvalidFile, OSError, pa.ArrowException, ValueError):
                noticed[bit < pages] += 1
                continue
            if found.schema.equals(columns):
                assert found.equals(table), f"bit {bit}"
        assert noticed[True] > 2_200 and noticed[False] > 200, (
            "of 2,400 in pages and 600 in the footer"
        )


@pytest.mark.parametrize(
    ("columns", "dimension", "dtype"),
    [
        (HASHED, 17, "float32"),
        (HASHED, 16, "float16"),
        (HASHED.remove(3), 16, "float32"),
        (HASHED.remove(0), 16, "float32"),
        (HASHED.set(2, pa.field("text_hash", pa.binary(16))), 16, None),
        (schema(pa.float64(), 16, "float32", include_text=True), 16, "float32"),
        (HASHED.append(pa.field("x", pa.int8())), 16, "float32"),
        (
            pa.schema([("id", pa.string()), ("embedding", pa.list_(pa.float32(), 16))]),
            16,
            "float32",
        ),
    ],
)
def test_other_columns_are_refused(columns: pa.Schema, dimension: int, dtype: str | None) -> None:
    with pytest.raises(InvalidFile):
        check_schema(columns, dimension=dimension, dtype=dtype)
