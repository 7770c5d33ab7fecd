"""Vectors are checked before they are published: finite, and of length 1 where the space is
normalized."""

from __future__ import annotations

import numpy as np
import pytest

from surge_dagster.engine.files.rows import invalid_row
from tests.engine.files.test_parquet import unit_vectors


def test_valid_vectors_pass() -> None:
    assert invalid_row(unit_vectors(20_000, 8), normalized=True) is None
    assert invalid_row(unit_vectors(5000, 8, "float16"), normalized=True) is None
    assert invalid_row(np.zeros((0, 8), np.float32), normalized=True) is None
    assert invalid_row(unit_vectors(10, 8) * 7, normalized=False) is None
    assert invalid_row(np.full((2, 8), 3e38, np.float32), normalized=False) is None, (
        "finite, though its square is not"
    )
    largest = np.full((300, 8), 65_504, np.float16)
    largest[7] = 6e-8  # smaller than any normal number of that type
    assert invalid_row(largest, normalized=False) is None


def test_only_rows_that_may_be_zero_are_valid_zeros() -> None:
    matrix = unit_vectors(3_000, 8)
    matrix[[5, 2_000]] = 0
    both = {5, 2_000}
    assert invalid_row(matrix, normalized=True, may_be_zero=both.__contains__) is None
    found = invalid_row(matrix, normalized=True, may_be_zero={5}.__contains__)
    assert found == (2_000, "its vector has length 0.0000; expected 1")
    matrix[5, 0] = 0.5
    found = invalid_row(matrix, normalized=True, may_be_zero=both.__contains__)
    assert found == (5, "its vector has length 0.5000; expected 1")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("normalized", [True, False])
def test_vector_that_is_not_finite_is_found(value: float, normalized: bool, dtype: str) -> None:
    matrix = unit_vectors(20_000, 8, dtype)
    matrix[[17_321, 19_999], 3] = value
    assert invalid_row(matrix, normalized=normalized) == (17_321, "its vector is not finite")


@pytest.mark.parametrize("row", [0, 16_383, 16_384, 19_999])
def test_first_vector_of_wrong_length_is_found(row: int) -> None:
    matrix = unit_vectors(20_001, 8)
    matrix[row] *= 1.01
    matrix[20_000] = 0
    assert invalid_row(matrix, normalized=True) == (row, "its vector has length 1.0100; expected 1")
    matrix[20_000, 3] = np.nan
    assert invalid_row(matrix, normalized=True) == (
        row,
        "its vector has length 1.0100; expected 1",
    ), "the first"


@pytest.mark.parametrize(
    ("dtype", "allowed", "refused"), [("float32", 9e-4, 1.1e-3), ("float16", 4e-3, 7e-3)]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_length_may_differ_by_the_rounding_of_the_type(
    dtype: str, allowed: float, refused: float, sign: int
) -> None:
    for difference in (allowed, refused):
        matrix = unit_vectors(700, 384)
        matrix[699] *= 1 + sign * difference
        valid = invalid_row(matrix.astype(dtype), normalized=True) is None
        assert valid == (difference == allowed)
