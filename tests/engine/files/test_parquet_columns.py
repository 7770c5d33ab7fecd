"""Columns in Parquet's encoding PLAIN, whatever is the fastest way to make them."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.files.parquet_columns import plain_values


def by_hand(column: pa.Array) -> bytes:
    values = column.cast(pa.large_binary()).to_pylist()
    return b"".join(len(value).to_bytes(4, "little") + value for value in values)


@settings(derandomize=True, deadline=None)
@given(
    values=st.lists(st.text(max_size=12), max_size=30),
    cut=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    kind=st.sampled_from([pa.string(), pa.large_string()]),
)
def test_strings_stand_behind_their_lengths(values: list[str], cut: tuple[int, int], kind: pa.DataType) -> None:
    column = pa.array(values, kind).slice(*cut)
    assert plain_values(column).to_pybytes() == by_hand(column)


@pytest.mark.parametrize("size", [32 * 1024 - 1, 32 * 1024, 32 * 1024 + 1, 100_000])
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_string()])
def test_many_strings_and_long_ones_do_too(size: int, kind: pa.DataType) -> None:
    for values in (["x" * size], ["x"] * size, ["", "x" * (size - 1), "", "y"]):
        column = pa.array(["left out", *values], pa.large_string()).cast(kind)[1:]
        assert plain_values(column).to_pybytes() == by_hand(column)


def test_numbers_are_as_they_lie() -> None:
    column = pa.array([1, -2, 3, 4], pa.int64())[1:3]
    assert plain_values(column).to_pybytes() == (-2).to_bytes(8, "little", signed=True) + (3).to_bytes(8, "little")
