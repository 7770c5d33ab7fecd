"""The measures of a result, against cases that are computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from surge_dagster.engine.compare.metrics import (
    overlap,
    paired_interval,
    quality,
    rank_correlation,
)

LETTERS = "abcdefghijkl"


@pytest.mark.parametrize(
    ("relevant", "k", "recall", "reciprocal_rank", "ndcg"),
    [
        pytest.param("a", 10, 1, 1, 1, id="first"),
        pytest.param("c", 10, 1, 1 / 3, 1 / math.log2(4), id="third"),
        pytest.param("c", 2, 0, 0, 1 / math.log2(4), id="after k"),
        pytest.param("z", 10, 0, 0, 0, id="not found"),
        pytest.param(
            "bz", 10, 0.5, 0.5, (1 / math.log2(3)) / (1 + 1 / math.log2(3)), id="one of two"
        ),
        pytest.param("k", 11, 1, 1 / 11, 0, id="after ten"),
        pytest.param(LETTERS, 12, 1, 1, 1, id="more than ten"),
    ],
)
def test_quality_of_a_result(
    relevant: str, k: int, recall: float, reciprocal_rank: float, ndcg: float
) -> None:
    *metrics, share = quality(LETTERS, set(relevant), k)

    assert metrics == pytest.approx([recall, reciprocal_rank, ndcg])
    assert share == len(set(relevant) & set(LETTERS[:10])) / 10


@pytest.mark.parametrize(
    ("one", "other", "share", "correlation"),
    [
        pytest.param("abc", "abc", 1, 1, id="the same"),
        pytest.param("abc", "cba", 1, -1, id="reversed"),
        pytest.param("", "", 0, 1, id="empty"),
        pytest.param("a", "b", 0, -1, id="one other row"),
        # ranks of a, b, c, d: 0, 1, 2, 3 and 0, 1, 3, 2
        pytest.param("abc", "abd", 2 / 3, 0.8, id="the last one differs"),
    ],
)
def test_likeness_of_two_results(one: str, other: str, share: float, correlation: float) -> None:
    assert overlap(one, other) == pytest.approx(share)
    assert rank_correlation(one, other) == pytest.approx(correlation)


def test_interval_is_that_of_the_normal_distribution_for_many_queries() -> None:
    differences = np.random.default_rng(3).normal(0.1, 0.5, (2_000, 1))
    half = 1.96 * differences.std() / math.sqrt(len(differences))

    low, high = paired_interval(differences)[:, 0]

    assert low == pytest.approx(differences.mean() - half, abs=0.002)
    assert high == pytest.approx(differences.mean() + half, abs=0.002)


def test_interval_is_the_same_each_time() -> None:
    differences = np.random.default_rng(4).normal(0.1, 0.5, (40, 3))

    np.testing.assert_array_equal(paired_interval(differences), paired_interval(differences))
