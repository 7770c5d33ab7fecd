"""Looking into Arrow's string and binary columns through their offsets, without making Python objects of the values."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def value_offsets(column: pa.Array) -> np.ndarray:
    """Where each value starts in the column's data buffer, one entry more than values; int32 or int64."""
    large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    width = np.dtype("<i8") if large else np.dtype("<i4")
    if not len(column):
        return np.zeros(1, width)
    return np.frombuffer(column.buffers()[1], dtype=width)[column.offset : column.offset + len(column) + 1]


def value_lengths(column: pa.Array) -> np.ndarray:
    """Bytes of each value, int64."""
    return np.diff(value_offsets(column)).astype(np.int64)


def value_bytes(column: pa.Array) -> memoryview:
    """The values' bytes, one behind the other, as they lie."""
    offsets = value_offsets(column)
    data = column.buffers()[2]
    return memoryview(b"" if data is None else data)[int(offsets[0]) : int(offsets[-1])]
