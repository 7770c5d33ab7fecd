"""Offsets and bytes of Arrow's string and binary columns, without Python objects for the values."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

_OFFSETS = {kind.id: np.dtype("<i4") for kind in (pa.string(), pa.binary())}
_OFFSETS |= {kind.id: np.dtype("<i8") for kind in (pa.large_string(), pa.large_binary())}


def value_parts(column: pa.Array) -> tuple[np.ndarray, memoryview]:
    """Return where each value starts, one entry more than values, int32 or int64; and their bytes,
    one behind the other.

    The offsets count from the beginning of the column's data buffer, the first one too.
    """
    width = _OFFSETS[column.type.id]
    count = len(column)
    if not count:
        return np.zeros(1, width), memoryview(b"")
    _, starts, data = column.buffers()
    offsets = np.frombuffer(starts, width, count + 1, column.offset * width.itemsize)
    return offsets, memoryview(b"" if data is None else data)[offsets.item(0) : offsets.item(-1)]


def value_lengths(column: pa.Array) -> np.ndarray:
    """Return the bytes of each value, int64."""
    offsets, _ = value_parts(column)
    return np.subtract(offsets[1:], offsets[:-1], dtype=np.int64)
