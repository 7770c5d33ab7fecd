"""The cost model gives the paper's published numbers; where these contradict each other, the tests
say which hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.plan.cost_model import (
    CostConstants,
    Recommendation,
    predict_flushes,
    recommend,
    speedup,
)
from surge_dagster.engine.run.thresholds import Bounds
from tests.engine.run.test_aggregator import Gathering, Incoming
from tests.small_catalogs import numbered_catalog

TEXTS = 10_000_000
PARTITIONS = 4_000
FLUSHES = 100
MINILM = CostConstants(call_seconds=0.087, text_seconds=0.149e-3, workers=4)


def predicted(constants: CostConstants) -> tuple[float, float]:
    """Alpha and speedup of the paper's run."""
    alpha = constants.alpha(PARTITIONS, TEXTS)
    return alpha, speedup(alpha, FLUSHES, PARTITIONS)


@pytest.mark.parametrize(
    ("constants", "alpha", "gain", "measured"),
    [
        (MINILM, 0.934, 1.89, 1.92),
        # the sigma sweep
        (CostConstants(call_seconds=0.067, text_seconds=0.110e-3, workers=2), 0.487, 1.469, 1.469),
        # bge-base
        (CostConstants(call_seconds=0.081, text_seconds=0.215e-3, workers=2), 0.301, 1.29, 1.29),
        # The paper's text gives alpha 0.603 and 1.31 for it, which do not fit each other: 0.603
        # belongs to 4 GPUs.
        (CostConstants(call_seconds=0.081, text_seconds=0.215e-3, workers=4), 0.603, 1.58, None),
    ],
)
def test_model_gives_the_published_alphas_and_speedups(
    constants: CostConstants, alpha: float, gain: float, measured: float | None
) -> None:
    alpha_of_model, gain_of_model = predicted(constants)
    assert alpha_of_model == pytest.approx(alpha, abs=0.0005)
    assert gain_of_model == pytest.approx(gain, abs=0.005)
    assert measured is None or gain_of_model == pytest.approx(measured, rel=0.02)
    assert gain_of_model == pytest.approx(
        constants.seconds(PARTITIONS, TEXTS) / constants.seconds(FLUSHES, TEXTS)
    )


@pytest.mark.parametrize(
    ("phi", "cv", "expected"),
    [
        (0.6, 1.5, Recommendation.STRONG),
        (0.6, 0.5, Recommendation.BENEFICIAL),
        (0.4, 1.5, Recommendation.MODERATE),
        (0.4, 0.5, Recommendation.OPTIONAL),
        (0.5, 1.0, Recommendation.OPTIONAL),  # the borders belong to the smaller side
        (0.5, 1.5, Recommendation.MODERATE),
        (0.6, 1.0, Recommendation.BENEFICIAL),
    ],
)
def test_recommendations_follow_the_decision_table(
    phi: float, cv: float, expected: Recommendation
) -> None:
    assert recommend(phi, cv) is expected


@given(
    sizes=st.lists(st.integers(0, 40), max_size=25),
    b_min=st.integers(1, 15),
    extra=st.integers(0, 20),
    first=st.integers(1, 15) | st.none(),
)
def test_prediction_equals_the_flushes_of_the_aggregator(
    sizes: list[int], b_min: int, extra: int, first: int | None
) -> None:
    bounds = Bounds(b_min, b_min + extra, 1 << 20, 1 << 20, first)
    gathering = Gathering(bounds)
    catalog = numbered_catalog(sizes)
    gathering.run([Incoming(key, rows, 100) for key, rows in catalog.items()])
    for flush, pieces in zip(predict_flushes(sizes, bounds), gathering.emitted, strict=True):
        assert flush.partitions == len(pieces)
        assert flush.texts == sum(stop - start for _, start, stop in pieces)


@pytest.mark.parametrize(
    ("sizes", "text_length"),
    [
        ([1] * 60, 10),
        ([0] * 60, 10),  # their overhead ends SuperBatches
        ([40, 3, 1, 90, 2], 100),
        ([700, 100], 60),  # in segments
    ],
)
def test_prediction_follows_the_thresholds_in_bytes(sizes: list[int], text_length: int) -> None:
    bounds = Bounds(500, 1_000, 8 << 10, 16 << 10)
    gathering = Gathering(bounds)
    catalog = {
        f"p{key}": [(f"{row:4}", "x" * text_length) for row in range(size)]
        for key, size in enumerate(sizes)
    }
    gathering.run([Incoming(key, rows, 100) for key, rows in catalog.items()])

    flushes = predict_flushes(sizes, bounds, 4.0 + text_length)

    assert len(flushes) > 2
    assert [flush.partitions for flush in flushes] == [len(each) for each in gathering.emitted]


@given(
    alpha=st.floats(0, 100),
    more=st.floats(0, 100),
    partitions=st.integers(1, 10_000),
    flushes=st.integers(1, 10_000),
    fewer=st.integers(0, 10_000),
)
def test_speedup_grows_with_alpha_and_with_fewer_flushes(
    alpha: float, more: float, partitions: int, flushes: int, fewer: int
) -> None:
    flushes = min(flushes, partitions)
    gain = speedup(alpha, flushes, partitions)
    assert gain * (1 + 1e-9) >= 1
    assert gain <= partitions / flushes * (1 + 1e-9)  # corollary 2
    assert speedup(alpha + more, flushes, partitions) >= gain * (1 - 1e-9)
    assert speedup(alpha, max(1, flushes - fewer), partitions) >= gain * (1 - 1e-9)
