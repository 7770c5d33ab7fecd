"""Columns of a table as the pages that pyarrow would make of them: where each begins, and its bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.files.parquet_proof import PAGE_BYTES, WRITE_BATCH_ROWS
from surge_dagster.engine.support.columns import value_lengths, value_parts

_NOTHING = pa.py_buffer(b"")
_LENGTH_BYTES = 4
_INT64 = pa.int64()
_FEW_BYTES = 32 * 1024


class PlainColumn(Protocol):
    """Ids or texts in Parquet's encoding PLAIN."""

    def page_ends(self, start: int, stop: int) -> Iterator[int]:
        """The row behind the last one of each page of a row group, which has the rows start..stop."""
        ...

    def page(self, start: int, stop: int) -> pa.Buffer:
        """The rows start..stop; cheapest from first to last."""
        ...

    def string_bytes(self, start: int, stop: int) -> int | None:
        """Bytes of the strings in these rows; None where they are numbers."""
        ...


def plain_column(column: pa.ChunkedArray) -> PlainColumn:
    """Ids or texts, none of them null.

    Raises:
        pyarrow.ArrowInvalid: one is null.
    """
    if column.null_count:
        raise pa.ArrowInvalid(f"{column.null_count:,} ids or texts are null; expected none")
    return _Numbers(column) if pa.types.is_int64(column.type) else _Strings(column)


class _Numbers:
    """64-bit integers: a row group of them is one page."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._values = np.ascontiguousarray(column.to_numpy(), "<i8")

    def page_ends(self, start: int, stop: int) -> Iterator[int]:
        yield stop

    def page(self, start: int, stop: int) -> pa.Buffer:
        return pa.py_buffer(self._values[start:stop])

    def string_bytes(self, start: int, stop: int) -> int | None:
        return None


class _Strings:
    """Each string behind its length, made for as many rows at a time as a page has bytes, or for one page."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column
        sizes = np.concatenate([[0], *(value_lengths(piece) for piece in column.chunks)])
        sizes[1:] += _LENGTH_BYTES
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._made = _NOTHING
        self._first = self._behind = 0

    def page_ends(self, start: int, stop: int) -> Iterator[int]:
        begun = self._ends[start]
        for end in range(start + WRITE_BATCH_ROWS, stop, WRITE_BATCH_ROWS):
            if self._ends[end] - begun >= PAGE_BYTES:
                yield end
                begun = self._ends[end]
        yield stop

    def page(self, start: int, stop: int) -> pa.Buffer:
        if not self._first <= start <= stop <= self._behind:
            fits = int(np.searchsorted(self._ends, self._ends[start] + PAGE_BYTES, side="right")) - 1
            self._first, self._behind = start, max(stop, fits)
            self._made = _NOTHING  # not held while the next one is made
            column = self._column.slice(start, self._behind - start)
            self._made = plain_values(column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks))
        begin, end = int(self._ends[start] - self._ends[self._first]), int(self._ends[stop] - self._ends[self._first])
        return self._made.slice(begin, end - begin)

    def string_bytes(self, start: int, stop: int) -> int | None:
        return int(self._ends[stop] - self._ends[start]) - _LENGTH_BYTES * (stop - start)


def plain_values(column: pa.Array) -> pa.Buffer:
    """Values without nulls in Parquet's encoding PLAIN: 64-bit integers, or each string behind its length."""
    if column.type == _INT64:
        return pa.py_buffer(column.to_numpy(zero_copy_only=True))
    rows, (offsets, values) = len(column), value_parts(column)
    if not rows:
        return _NOTHING
    if 0 < len(values) <= _FEW_BYTES:
        return pa.py_buffer(_page_of_few(offsets, values))
    lengths = _binary(
        np.arange(0, _LENGTH_BYTES * rows + 1, _LENGTH_BYTES), pa.py_buffer(np.diff(offsets).astype("<u4"))
    )
    strings = _binary((offsets - offsets[0]).astype(np.int64, copy=False), pa.py_buffer(values))
    return pc.binary_join_element_wise(lengths, strings, _separator()).buffers()[2]  # pyright: ignore[reportAttributeAccessIssue]


def _page_of_few(offsets: np.ndarray, values: memoryview) -> np.ndarray:
    """The same in half of the time that Arrow takes for a hundred short strings."""
    starts = np.arange(0, _LENGTH_BYTES * len(offsets), _LENGTH_BYTES)
    starts += offsets
    starts -= offsets[0]
    size, starts = starts.item(-1), starts[:-1]
    page, is_value = np.empty(size, np.uint8), np.ones(size, bool)
    _words(page)[starts] = offsets[1:] - offsets[:-1]
    _words(is_value)[starts] = 0
    page[is_value] = np.frombuffer(values, np.uint8)
    return page


def _words(raw: np.ndarray) -> np.ndarray:
    """Bytes as the numbers of four bytes that begin at each of them."""
    return np.ndarray(len(raw) - _LENGTH_BYTES + 1, "<u4", raw.data, 0, (1,))


def _binary(offsets: np.ndarray, values: pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), values])


class Vectors:
    """Embeddings as they lie in memory, page by page.

    Raises:
        pyarrow.ArrowInvalid: one of them or of their values is null.
    """

    def __init__(self, column: pa.ChunkedArray, dimension: int, itemsize: int) -> None:
        self._dimension = dimension
        self._itemsize = itemsize
        self._pieces = (_bytes_of(piece, dimension, itemsize) for piece in column.chunks)
        self._left = memoryview(b"")

    def page_rows(self, rows: int) -> list[int]:
        """Rows of each page of a row group that has so many."""
        return vector_page_rows(rows, self._dimension, self._itemsize)

    def next_page(self, rows: int) -> tuple[list[memoryview], int]:
        """The next rows, in as many parts as they lie in, and their bytes."""
        left = size = rows * self._dimension * self._itemsize
        parts = []
        while left:
            self._left = self._left or next(self._pieces)
            parts.append(self._left[:left])
            self._left = self._left[left:]
            left -= len(parts[-1])
        return parts, size


def vector_page_rows(rows: int, dimension: int, itemsize: int) -> list[int]:
    """Rows of each page of a row group's vectors.

    Pyarrow writes batches of 1,024 values, filled up to whole rows, and ends a page when it has its size after a batch;
    it looks once more before the last row.
    """
    batch = -(-WRITE_BATCH_ROWS // dimension)
    enough = -(-PAGE_BYTES // (dimension * itemsize))
    full = -(-enough // batch) * batch
    pages = [full] * ((rows - 1) // full)
    last = rows - full * len(pages)
    return [*pages, last - 1, 1] if last > enough else [*pages, last]


def _bytes_of(piece: pa.FixedSizeListArray, dimension: int, itemsize: int) -> memoryview:
    values = piece.flatten()
    if piece.null_count or values.null_count:
        raise pa.ArrowInvalid("an embedding or one of its values is null; expected none")
    start = values.offset * itemsize
    return memoryview(values.buffers()[1])[start : start + len(piece) * dimension * itemsize]


@functools.cache
def _separator() -> pa.Scalar:
    # Not when this is imported: the first scalar that Arrow makes has it import pandas, if that is installed.
    return pa.scalar(b"", pa.large_binary())
