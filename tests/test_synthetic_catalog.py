"""Tests of the synthetic catalog, which benchmarks and tests of many partitions build."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic import draw_texts, partition_sizes


@given(
    partitions=st.integers(1, 300),
    surplus=st.integers(0, 100_000),
    sigma=st.floats(0, 5),
    seed=st.integers(0, 2**70),
)
def test_sizes_sum_to_the_number_of_texts(
    partitions: int, surplus: int, sigma: float, seed: int
) -> None:
    sizes = partition_sizes(partitions + surplus, partitions, sigma, seed)

    assert len(sizes) == partitions
    assert sizes.sum() == partitions + surplus
    assert sizes.min() >= 1


@pytest.mark.parametrize("sigma", [1.0, 1.72, 2.5])
def test_sizes_are_log_normal_with_the_given_sigma(sigma: float) -> None:
    logs = np.log(partition_sizes(400_000_000, 4_000, sigma))

    assert np.std(logs) == pytest.approx(sigma, rel=0.05)


def test_sizes_and_texts_are_the_same_on_every_machine() -> None:
    assert partition_sizes(1_000, 8, seed=1).tolist() == [19, 154, 512, 74, 4, 161, 37, 39]
    assert draw_texts(1, 3, np.arange(2, dtype=np.uint64)).to_pylist() == [
        "outdoor soft gold cushion spare digital velvet",
        "narrow velvet plate 250ml adjustable leather backpack spare adjustable",
    ]


@pytest.mark.parametrize("mean_bytes", [16, 47, 200, 5_000])
def test_mean_text_length_is_the_requested_one(mean_bytes: int) -> None:
    rows = np.arange(max(200, 400_000 // mean_bytes), dtype=np.uint64)

    lengths = [len(text) for text in draw_texts(0, 1, rows, mean_bytes).to_pylist()]

    assert np.mean(lengths) == pytest.approx(mean_bytes, rel=0.03)


def test_text_depends_only_on_seed_partition_and_row() -> None:
    rows = np.arange(1_000, dtype=np.uint64)

    whole = draw_texts(5, 2, rows)

    assert draw_texts(5, 2, rows[400:700]).equals(whole[400:700])
