"""The promise follows its formula, rests on the slowest passes that were timed, and is refused where none can hold."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.promise import (
    HANDLING_SECONDS,
    Promise,
    full_pass,
    kept_share,
    niceness_of,
    pass_sizes,
    time_passes,
    upper_envelope,
)

P = Promise(0.010, 0.0001, 100, 0.004, 0.1, 1.0)
S = 0.010 + 0.0001 * 100


@pytest.mark.parametrize(("share", "waits"), [(0.0, 1), (0.1, 2), (0.5, 2)])
@pytest.mark.parametrize(("waiting", "passes"), [(0, 1), (1, 2), (100, 2), (101, 3), (950, 11)])
def test_bound_is_that_of_the_formula(share: float, waits: int, waiting: int, passes: int) -> None:
    promise = Promise(0.010, 0.0001, 100, 0.004, share, 1.0)
    expected = waits * 0.004 + passes * S / (1 - share) + HANDLING_SECONDS
    assert promise.bound(waiting) == pytest.approx(expected, rel=1e-12)


def test_request_is_accepted_while_the_bound_is_within_the_promise_and_else_told_when_to_come_back() -> None:
    promise = P.promising(P.bound(500))
    assert [promise.retry_after(waiting) for waiting in (1, 401, 500)] == [None, None, None]
    assert promise.retry_after(501) == pytest.approx(S / 0.9)
    assert promise.retry_after(500, late_seconds=0.25) == pytest.approx(0.25)


@given(st.integers(1, 40), st.floats(0, 0.02))
def test_largest_request_is_the_last_that_is_accepted_alone(passes: int, more: float) -> None:
    promise = P.promising(P.bound(100 * passes) + more)
    assert promise.retry_after(promise.largest_tokens) is None
    assert promise.retry_after(promise.largest_tokens + 1) is not None
    assert promise.as_dict()["largest_tokens"] == promise.largest_tokens


def test_promise_without_a_request_has_room_for_two_full_passes() -> None:
    promise = P.promising(None)
    assert promise.promised_seconds == P.bound(200)
    assert promise.largest_tokens == 200


def test_promise_that_no_request_could_keep_is_refused_with_the_smallest_that_holds() -> None:
    with pytest.raises(
        ConfigError, match=r"a promise of 40 ms cannot be kept here.*smallest promise that holds"
    ) as why:
        P.promising(0.040)
    found = re.search(r"that holds is (\d+) ms", str(why.value))
    assert found
    smallest = int(found[1]) / 1000
    assert P.promising(smallest).largest_tokens == 100
    for never in (smallest - 0.001, math.inf, math.nan):
        with pytest.raises(ConfigError, match="--promise-ms"):
            P.promising(never)


@given(st.lists(st.tuples(st.integers(1, 5_000), st.floats(1e-5, 10)), min_size=1, max_size=12))
def test_no_timed_pass_lies_above_the_envelope(passes: list[tuple[int, float]]) -> None:
    at_none, per_token = upper_envelope(passes)
    tokens, seconds = np.array(passes, float).T
    assert at_none >= 0 and per_token >= 0
    assert (at_none + per_token * tokens >= seconds * (1 - 1e-9)).all()


def test_envelope_of_passes_on_a_line_is_that_line() -> None:
    assert upper_envelope([(1, 0.12), (10, 0.3), (100, 2.1)]) == pytest.approx((0.1, 0.02))
    assert upper_envelope([(10, 0.2), (10, 0.3), (50, 0.1)]) == pytest.approx((0.3, 0))


SIZES = pass_sizes(4_000, 90)


def test_full_pass_is_the_smallest_at_which_tokens_take_hardly_longer_than_at_the_best() -> None:
    assert (SIZES, pass_sizes(4_000, 512)) == ([250, 1_000, 4_000], [512, 1_000, 4_000])
    for of_pass, most in ((0.0, 250), (0.1, 1_000), (1.0, 4_000)):
        passes = [(size - less, of_pass + 0.001 * (size - less)) for size in SIZES for less in (0, 10)]
        assert full_pass(passes, SIZES) == most
    assert full_pass([(240, 0.3)], SIZES) == 250, "what a slow model was timed with"


class Encoding:
    """A device that takes so many seconds per character, by a clock of its own."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0
        self.encoded: list[int] = []

    def encode(self, texts: list[str]) -> None:
        self.encoded.append(sum(map(len, texts)))
        self.now += self.seconds * self.encoded[-1]

    def passes(self) -> list[tuple[int, float]]:
        """Of a model whose tokens are characters."""
        return time_passes(self.encode, lambda texts: np.array([*map(len, texts)]), SIZES, 90, lambda: self.now)


def test_passes_are_timed_up_to_the_saturation_point_after_a_round_that_warms_up() -> None:
    device = Encoding(1e-6)
    passes = device.passes()
    each = len(device.encoded) // 4
    assert device.encoded == 4 * device.encoded[:each]
    assert [tokens for tokens, _ in passes] == device.encoded[each:]
    assert max(tokens for tokens, _ in passes) > 3_500
    assert all(tokens <= 4_000 and seconds == pytest.approx(1e-6 * tokens) for tokens, seconds in passes)


def test_slow_model_is_timed_in_fewer_and_smaller_passes() -> None:
    device = Encoding(4e-3)
    passes = device.passes()
    assert len(passes) == len(device.encoded) < 12
    assert 20 < device.now < 40
    assert upper_envelope(passes) == pytest.approx((0, 4e-3))


@pytest.mark.parametrize(("share", "niceness"), [(0.5, 0), (0.2, 6), (0.1, 10), (0.0145, 19)])
def test_niceness_gives_bulk_work_its_share_of_a_core(share: float, niceness: int) -> None:
    if share >= 0.015:
        assert niceness_of(share) == niceness
        assert 1 / (1 + 1.25**niceness) == pytest.approx(share, rel=0.1)
    else:
        with pytest.raises(ConfigError, match="share of bulk work"):
            niceness_of(share)
    assert math.isclose(1 / (1 + 1.25**19), 0.0142, abs_tol=1e-4)


@pytest.mark.parametrize(
    ("devices", "share"), [("cpu", 0.1), ("cuda:0", 0.5), ("cuda:0,cuda:1", 0.5), ("cuda:0,cuda:0", 2 / 3)]
)
def test_bulk_work_keeps_the_slices_that_a_gpu_gives_its_process(devices: str, share: float) -> None:
    assert kept_share(devices, 0.1) == share
