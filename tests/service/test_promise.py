"""The promise follows from the rate of full passes, and is never below what can be kept."""

from __future__ import annotations

import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from surge_dagster.engine.encoder.speed import Speed
from surge_dagster.service.lane import MARGIN, promise_of
from surge_dagster.service.spaces import LaneSettings, _promise


@pytest.mark.parametrize(
    ("wanted", "promised"),
    [(None, MARGIN * 0.3), (0.01, MARGIN * 0.2), (1.0, 1.0)],
    ids=["default", "too small", "large"],
)
def test_promise_is_the_wanted_one_or_what_passes_need(
    wanted: float | None, promised: float
) -> None:
    assert promise_of(1_000.0, 100, wanted).promised_seconds == pytest.approx(promised)


def test_default_promise_is_at_least_a_tenth_of_a_second() -> None:
    assert promise_of(1e6, 100).promised_seconds == pytest.approx(0.1)


def test_largest_request_keeps_the_promise_with_its_margin() -> None:
    promise = promise_of(1_000.0, 100, 1.0)
    assert promise.largest_tokens == math.floor(1_000 / MARGIN)


@pytest.mark.parametrize(
    ("wanted", "measured", "rate"),
    [(0.1, 1_000.0, 1_000.0), (0.1, 50.0, 100.0), (10.0, 1_000.0, 100.0), (None, 1_000.0, 1_000.0)],
    ids=["quick", "slow", "kept", "default"],
)
def test_only_quick_passes_lower_a_promise_and_only_one_that_was_raised(
    wanted: float | None, measured: float, rate: float
) -> None:
    promise = promise_of(100.0, 100, wanted, share=0.5)
    assert promise.measured(measured) == promise_of(rate, 100, wanted, share=0.5)


def test_default_promise_of_the_least_time_is_not_measured_again() -> None:
    assert not promise_of(1e6, 100).is_raised


def test_clients_see_what_the_promise_follows_from() -> None:
    assert asdict(promise_of(1_000.0, 100, 1.0)) == {
        "tokens_per_second": 1_000.0,
        "pass_tokens": 100,
        "wanted_seconds": 1.0,
        "share": 1.0,
        "promised_seconds": 1.0,
        "smallest_seconds": pytest.approx(0.3),
        "largest_tokens": 666,
    }


def test_model_that_counts_no_tokens_gets_a_promise() -> None:
    speed = Speed(call_seconds=1e-3, text_seconds=1e-4, tokens_per_text=0.0)
    pool: Any = SimpleNamespace(speed=speed, device="cpu")

    assert _promise(pool, 512, LaneSettings("cpu")).tokens_per_second > 0
