"""Footers that older programs wrote, which lack facts that bound what a read decodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.sources.batching import BATCH_ROWS
from surge_dagster.engine.sources.parquet_files import _rows_of_group, rows_per_read
from tests.small_catalogs import write_partition

COLUMNS = ["id", "text"]
DECODED_BYTES = 16 << 20  # most that one read may decode to


def i64(value: int, width: int) -> bytes:
    """A number as Thrift's compact protocol stores it, in so many bytes."""
    rest = (value << 1) ^ (value >> 63)
    digits: list[int] = []
    for _ in range(width):
        digits.append(rest & 0x7F | 0x80)
        rest >>= 7
    digits[-1] &= 0x7F
    assert not rest
    return bytes(digits)


def shortest(value: int) -> bytes:
    return i64(value, max(1, -(-(2 * value).bit_length() // 7)))


def replace_once(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert content.count(old) == 1
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new))


def hide_dictionary(path: Path) -> None:
    """Change the footer of the texts to that of parquet-mr before 1.12: their dictionary's page is
    where data begins."""
    chunk = pq.read_metadata(path).row_group(0).column(1)
    data = shortest(chunk.data_page_offset)
    dictionary = shortest(chunk.dictionary_page_offset)
    moved = i64(chunk.dictionary_page_offset, len(data))
    # Both fields are the second after the one before them; an unknown field replaces the other.
    replace_once(
        path, b"\x26" + data + b"\x26" + dictionary, b"\x26" + moved + b"\xf6" + dictionary
    )


def hide_size(path: Path) -> None:
    """Change the size of the row group to 0, as DuckDB before 2023 wrote it."""
    group = pq.read_metadata(path).row_group(0)
    size = shortest(group.total_byte_size)
    rows = b"\x16" + shortest(group.num_rows)
    replace_once(path, b"\x16" + size + rows, b"\x16" + i64(0, len(size)) + rows)


@contextmanager
def opened(path: Path) -> Iterator[tuple[pq.ParquetFile, pa.NativeFile]]:
    with pa.OSFile(str(path)) as source, pq.ParquetFile(source) as reader:
        yield reader, source


def batch_sizes(path: Path) -> list[int]:
    with opened(path) as (reader, source):
        return [len(batch) for batch in _rows_of_group(reader, source, COLUMNS, 0)]


def write_shared(root: Path, length: int, rows: int = 3_000, **options: Any) -> Path:
    """Write rows of which every second one has the same long text."""
    texts = ["x" * length, "short"]
    all_rows = [(str(row), texts[row % 2]) for row in range(rows)]
    return write_partition(root, "k", all_rows, use_dictionary=["text"], **options)


@pytest.mark.parametrize("length", [100_000, 400_000])
def test_dictionary_without_a_stated_place_bounds_a_read(tmp_path: Path, length: int) -> None:
    path = write_shared(tmp_path, length)
    hide_dictionary(path)

    with opened(path) as (reader, source):
        assert not reader.metadata.row_group(0).column(1).has_dictionary_page
        assert rows_per_read(reader, source, COLUMNS, 0) * length <= DECODED_BYTES


@pytest.mark.parametrize("length", [100_000, 400_000])
def test_row_group_without_a_size_is_read_in_bounded_pieces(tmp_path: Path, length: int) -> None:
    path = write_shared(tmp_path, length)
    hide_size(path)

    assert pq.read_metadata(path).row_group(0).total_byte_size == 0
    assert max(batch_sizes(path)) * length <= DECODED_BYTES


@pytest.mark.parametrize("has_size", [True, False])
def test_row_group_of_short_texts_is_read_in_few_batches(tmp_path: Path, has_size: bool) -> None:
    rows = [(str(row), f"text {row}") for row in range(30_000)]
    path = write_partition(tmp_path, "k", rows, use_dictionary=False)
    if not has_size:
        hide_size(path)

    sizes = batch_sizes(path)

    assert sum(sizes) == len(rows)
    assert max(sizes) <= BATCH_ROWS
    assert len(sizes) <= 5
