"""What is said of a column's values does not depend on how its rows were batched, nor on what lies
under nulls."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.support.values import (
    same_values,
    stored_type,
    value_sizes,
    value_streams,
)

STRUCT = pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string()))])
COLUMNS: list[pa.Array] = [
    pa.array(["a", None, "", "été"]),
    pa.array([b"a", None, b"", b"\0"], pa.large_binary()),
    pa.array([1, None, -3, 0], pa.int64()),
    pa.array([1.5, None, float("nan"), -0.0], pa.float32()),
    pa.array([True, None, False, True]),
    pa.array([b"12345", None, b"abcde", b"\0" * 5], pa.binary(5)),
    pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("-2.25"), decimal.Decimal("0.00")]),
    pa.array(
        [datetime.datetime(2020, 1, 1), None, datetime.datetime(1960, 1, 1), None],
        pa.timestamp("us", "UTC"),
    ),
    pa.array([[1, 2], None, [2, None], [0, 0]], pa.list_(pa.int64(), 2)),
    pa.array([["x"], None, [], ["yy", None]], pa.list_(pa.string())),
    pa.array([{"a": 1, "b": ["x"]}, None, {"a": None, "b": None}, {"a": 0, "b": []}], STRUCT),
]


def joined(*columns: pa.Array) -> list[bytes]:
    return [b"".join(map(bytes, parts)) for parts in zip(*map(value_streams, columns), strict=True)]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: str(column.type))
def test_streams_do_not_depend_on_batches_and_tell_every_value_apart(column: pa.Array) -> None:
    pieces: list[Any] = [column[:1], column[1:1], column[1:3], column[3:]]
    assert joined(*pieces) == joined(column)
    found = {tuple(map(bytes, value_streams(column.slice(row, 1)))) for row in range(4)}
    assert len(found) == len(set(map(repr, column.to_pylist())))


def test_bytes_under_a_null_do_not_change_the_digest() -> None:
    valid = pa.py_buffer(bytes([0b101]))
    for kind, width in ((pa.int64(), 8), (pa.date32(), 4), (pa.float64(), 8)):
        one, other = (
            pa.Array.from_buffers(
                kind,
                3,
                [valid, pa.py_buffer(bytes(width) + bytes([hidden]) * width + bytes(width))],
            )
            for hidden in (1, 2)
        )
        assert joined(one) == joined(other)


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: str(column.type))
def test_sizes_cover_the_bytes_in_memory_and_do_not_depend_on_batches(column: pa.Array) -> None:
    sizes = value_sizes(column)
    np.testing.assert_array_equal(
        np.concatenate([value_sizes(column[:2]), value_sizes(column[2:])]), sizes
    )
    bitmaps = 16  # a bit per row and level
    assert sizes.sum() + bitmaps >= column.nbytes


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        (pa.timestamp("s", "UTC"), pa.timestamp("ms", "UTC")),
        (pa.date64(), pa.date32()),
        (pa.list_(pa.time32("s")), pa.list_(pa.time32("ms"))),
        (STRUCT, STRUCT),
    ],
)
def test_stored_type_is_what_parquet_gives_back(kind: pa.DataType, stored: pa.DataType) -> None:
    assert stored_type(kind) == stored


@pytest.mark.parametrize(
    "kind",
    [
        pa.dense_union([pa.field("a", pa.int8())]),
        pa.month_day_nano_interval(),
        pa.map_(pa.string(), pa.int8()),
        pa.list_(pa.dictionary(pa.int8(), pa.string())),
        pa.struct([]),
    ],
    ids=str,
)
def test_type_that_cannot_be_carried_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(TypeError):
        stored_type(kind)


COMPARED = [
    *COLUMNS,
    pa.array([1.5, None, float("nan"), -0.0], pa.float16()),
    pa.array([[float("nan")], None, [], [0.0]], pa.list_(pa.float64())),
    pa.array([[None], None, [0.0, 1.0], [-0.0]], pa.list_(pa.float64())),
]


@pytest.mark.parametrize("column", COMPARED, ids=lambda column: str(column.type))
def test_every_value_is_the_same_as_itself_and_no_other(column: pa.Array) -> None:
    for shift in range(4):
        places = pa.array([(row + shift) % 4 for row in range(4)])
        moved = column.take(places)
        same = [repr(a) == repr(b) for a, b in zip(column, moved, strict=True)]
        assert same_values(column, moved).tolist() == same


def test_numbers_are_compared_by_their_bits() -> None:
    numbers = pa.array([0.0, float("nan"), 1.0])
    others = pa.array([-0.0, float("nan"), 1.0])
    assert same_values(numbers, others).tolist() == [False, True, True]


def test_what_lies_under_nulls_is_not_compared() -> None:
    valid = pa.py_buffer(bytes([0b01]))
    one = pa.Array.from_buffers(pa.int8(), 2, [valid, pa.py_buffer(bytes([1, 2]))])
    other = pa.Array.from_buffers(pa.int8(), 2, [valid, pa.py_buffer(bytes([1, 3]))])
    assert same_values(one, other).tolist() == [True, True]
