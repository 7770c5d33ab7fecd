"""What is said of a column's values does not depend on how its rows were batched, nor on what lies
under nulls."""

from __future__ import annotations

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
from tests.engine.carried_values import VALUES

STRUCT = pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string()))])
# Those of other types are cast when a source is read. Three different values each.
COLUMNS: dict[str, Any] = {
    name: VALUES[name] for name in VALUES.keys() - {"category", "uuid", "json"}
}
COLUMNS["list of floats"] = pa.array([[float("nan")], [0.0], [-0.0]], pa.list_(pa.float64()))
COLUMNS["list with nulls"] = pa.array([[None], None, []], pa.list_(pa.float64()))
every_type = pytest.mark.parametrize("name", sorted(COLUMNS))


def joined(*columns: pa.Array) -> list[bytes]:
    return [b"".join(map(bytes, parts)) for parts in zip(*map(value_streams, columns), strict=True)]


@every_type
def test_streams_do_not_depend_on_batches_and_tell_every_value_apart(name: str) -> None:
    column = COLUMNS[name]
    assert joined(column[:1], column[1:1], column[1:]) == joined(column)
    first, second, third = joined(column[:1]), joined(column[1:2]), joined(column[2:])
    assert first != second
    assert second != third
    assert first != third


def test_bytes_under_a_null_do_not_change_the_digest() -> None:
    valid = pa.py_buffer(bytes([0b101]))
    for kind, width in ((pa.int64(), 8), (pa.date32(), 4), (pa.float64(), 8)):
        found: list[list[bytes]] = []
        for hidden in (b"\1", b"\2"):
            content = pa.py_buffer(bytes(width) + hidden * width + bytes(width))
            found.append(joined(pa.Array.from_buffers(kind, 3, [valid, content])))
        assert found[0] == found[1]


@every_type
def test_sizes_cover_the_bytes_in_memory_and_do_not_depend_on_batches(name: str) -> None:
    column = COLUMNS[name]
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


@every_type
def test_every_value_is_the_same_as_itself_and_no_other(name: str) -> None:
    column = COLUMNS[name]
    assert same_values(column, column).tolist() == [True] * 3
    for places in ([1, 2, 0], [2, 0, 1]):
        moved = column.take(pa.array(places))
        assert same_values(column, moved).tolist() == [False] * 3


def test_numbers_are_compared_by_their_bits() -> None:
    numbers = pa.array([0.0, float("nan"), 1.0])
    others = pa.array([-0.0, float("nan"), 1.0])
    assert same_values(numbers, others).tolist() == [False, True, True]


def test_what_lies_under_nulls_is_not_compared() -> None:
    valid = pa.py_buffer(bytes([0b01]))
    one = pa.Array.from_buffers(pa.int8(), 2, [valid, pa.py_buffer(bytes([1, 2]))])
    other = pa.Array.from_buffers(pa.int8(), 2, [valid, pa.py_buffer(bytes([1, 3]))])
    assert same_values(one, other).tolist() == [True, True]
