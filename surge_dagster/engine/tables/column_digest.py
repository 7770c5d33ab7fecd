"""The digest of a partition's raw columns; it does not depend on how the rows are batched."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.support.columns import value_parts
from surge_dagster.engine.support.values import value_streams

_NULL = np.uint32(0xFFFFFFFF)  # the length of a null; no value is that long


class ColumnDigest:
    """SHA-256 over names, types and values of the columns of consecutive rows.

    Two tables whose digests are equal have equal rows in equal order. Lengths, values and validity of each column are
    hashed as streams of their own. Arrow's buffers are hashed in place.
    """

    def __init__(self) -> None:
        self._streams: list[hashlib._Hash] = []
        self._names = b""
        self._rows = 0

    def update(self, columns: pa.RecordBatch) -> None:
        """Add the next rows; every batch has the same columns, without dictionaries."""
        if not self._streams:
            self._streams = [hashlib.sha256() for _ in range(2 * columns.num_columns)]
            self._names = columns.schema.to_string(show_schema_metadata=False).encode("utf-8", "surrogateescape")
        self._rows += len(columns)
        for place, column in enumerate(columns.columns):
            first, second = self._streams[2 * place : 2 * place + 2]
            if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
                offsets, values = value_parts(_filled(column, b"" if pa.types.is_binary(column.type) else ""))
                lengths = (offsets[1:] - offsets[:-1]).astype("<u4", copy=False)
                first.update(np.where(_is_null(column), _NULL, lengths).data if column.null_count else lengths.data)
                second.update(values)
            elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
                first.update(_is_null(column).data)
                second.update(_filled(column, 0).to_numpy(zero_copy_only=False).view(np.uint8).data)
            else:  # rare, and slow: values of nested types have no canonical buffers
                for row in range(len(column)):
                    first.update(_shown(column, row) + b"\0")

    def hexdigest(self) -> str:
        """The digest so far, 32 hex digits."""
        head = b"surge.columns.1\0" + self._names + b"\0" + self._rows.to_bytes(8, "little")
        return hashlib.sha256(head + b"".join(stream.digest() for stream in self._streams)).hexdigest()[:32]


def _shown(column: pa.Array, row: int) -> bytes:
    try:
        return repr(column[row].as_py()).encode("utf-8", "surrogatepass")
    except (OverflowError, ValueError):  # a time that Python does not have, such as one of year 20,000
        return b"".join(map(bytes, value_streams(column.slice(row, 1))))


def _filled(column: pa.Array, value: object) -> pa.Array:
    return pc.fill_null(column, value) if column.null_count else column


def _is_null(column: pa.Array) -> np.ndarray:
    if not column.null_count:
        return np.zeros(len(column), np.bool_)
    return column.is_null().to_numpy(zero_copy_only=False)
