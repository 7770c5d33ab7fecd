"""Bytes and sizes of the values of Arrow columns, of all types that output files can carry, without
Python objects.

Lists and structs are taken apart down to their plain values.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

Buffer = bytes | memoryview
_OFFSET_BYTES = 8
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


@lru_cache(maxsize=256)
def stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of such a column once it was written to Parquet; raises `TypeError` if files
    cannot carry it."""
    sink = pa.BufferOutputStream()
    try:
        with pq.ParquetWriter(sink, pa.schema([("c", kind)]), use_compliant_nested_type=False):
            pass
        stored = pq.read_schema(pa.BufferReader(sink.getvalue())).field(0).type
        value_streams(pa.array([], stored))
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise TypeError(str(error)) from error
    return stored


def value_streams(column: pa.Array) -> list[Buffer]:
    """Return buffers that together define a column's values and which of them are null; always the
    same number for a type.

    The buffers of consecutive columns, one behind the other, are those of the concatenated column.
    What lies under a null does not count.
    """
    kind = column.type
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    streams: list[Buffer] = [valid.view(np.uint8).data]
    if _is_list(kind):
        return [*streams, _lengths(column).astype("<i8").data, *value_streams(_items(column))]
    if pa.types.is_struct(kind):
        for child in column.flatten():
            streams += value_streams(child)
        return streams
    if _is_variable(kind):
        nothing = "" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else b""
        offsets, values = value_parts(column.fill_null(nothing) if column.null_count else column)
        return [*streams, np.diff(offsets).astype("<i8").data, values]
    if pa.types.is_boolean(kind):
        return [*streams, column.fill_null(False).cast(pa.uint8()).to_numpy().data]
    raw = _fixed(column)
    if not valid.all():
        raw = np.where(valid[:, None], raw, 0)
    return [*streams, np.ascontiguousarray(raw).data]


def same_values(one: pa.Array, other: pa.Array) -> np.ndarray:
    """Return which values of two columns of one type and length are the same bit for bit, bool
    [rows]: NaN is NaN, null is null, and 0.0 is not -0.0."""
    kind = one.type
    if _is_list(kind) or pa.types.is_struct(kind):
        return _same_nested(one, other)
    one_valid = one.is_valid().to_numpy(zero_copy_only=False)
    other_valid = other.is_valid().to_numpy(zero_copy_only=False)
    is_same = one_valid == other_valid
    if _is_variable(kind) or pa.types.is_boolean(kind):
        equal = pc.fill_null(pc.equal(one, other), True)  # pyright: ignore[reportAttributeAccessIssue]
        is_same &= equal.to_numpy(zero_copy_only=False)
    else:
        is_same &= (_fixed(one) == _fixed(other)).all(axis=1) | ~one_valid
    return is_same


def _same_nested(one: pa.Array, other: pa.Array) -> np.ndarray:
    """Return `same_values` of lists or structs; halves that differ are divided again."""
    is_same = list(map(bytes, value_streams(one))) == list(map(bytes, value_streams(other)))
    middle = len(one) // 2
    if is_same or not middle:
        return np.full(len(one), is_same)
    first = _same_nested(one[:middle], other[:middle])
    return np.concatenate([first, _same_nested(one[middle:], other[middle:])])


def _lengths(column: pa.Array) -> np.ndarray:
    """Return the lengths of lists; a null has none."""
    return pc.fill_null(pc.list_value_length(column), 0).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]


def value_sizes(column: pa.Array) -> np.ndarray:
    """Return the bytes that each value takes in memory, int64 [rows]; nulls count as empty or any
    value of a fixed size."""
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        inside = value_sizes(column.values.slice(column.offset * size, len(column) * size))
        return inside.reshape(len(column), kind.list_size).sum(axis=1)
    if _is_list(kind):
        ends = np.concatenate([[0], np.cumsum(value_sizes(_items(column)))])
        places = np.concatenate([[0], np.cumsum(_lengths(column))])
        return np.diff(ends[places]) + _OFFSET_BYTES
    if pa.types.is_struct(kind):
        sizes = np.ones(len(column), np.int64)
        for child in column.flatten():
            sizes = sizes + value_sizes(child)
        return sizes
    if _is_variable(kind):
        return value_lengths(column) + _OFFSET_BYTES
    return np.full(len(column), max(8, _width(kind)) // 8, np.int64)


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _items(column: pa.Array) -> pa.Array:
    return column.flatten() if len(column) else pa.array([], column.type.value_type)


def _is_variable(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _width(kind: pa.DataType) -> int:
    """Bits of a value."""
    is_plain = (
        pa.types.is_primitive(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_fixed_size_binary(kind)
    )
    if not is_plain or pa.types.is_interval(kind):
        raise TypeError(f"columns of type {kind} cannot be carried")
    return kind.bit_width


def _fixed(column: pa.Array) -> np.ndarray:
    """The values of a column of a fixed width as bytes, uint8 [rows, width]."""
    width = _width(column.type) // 8
    count = len(column)
    if not count:
        return np.empty((0, width), np.uint8)
    raw = np.frombuffer(column.buffers()[1], np.uint8, count * width, column.offset * width)
    return raw.reshape(count, width)
