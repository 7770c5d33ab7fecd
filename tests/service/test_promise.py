"""The promise follows its formula, rests on the slowest passes that were timed, and is refused where none can hold."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.promise import (
    HANDLING_SECONDS,
    QUERY_NICENESS,
    Promise,
    bulk_niceness,
    full_pass,
    kept_share,
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


def test_passes_are_timed_at_three_sizes_and_no_smaller_than_a_text() -> None:
    assert (SIZES, pass_sizes(4_000, 512)) == ([250, 1_000, 4_000], [512, 1_000, 4_000])


@given(st.floats(0, 1), st.floats(1e-6, 1e-2), st.integers(1, 500), st.lists(st.integers(1, 5_000), min_size=2))
def test_full_pass_is_the_smallest_that_is_nearly_as_fast_as_the_largest(
    pass_seconds: float, token_seconds: float, least: int, sizes: list[int]
) -> None:
    def rate(tokens: int) -> float:
        return tokens / (pass_seconds + token_seconds * tokens)

    assume(len(set(sizes)) > 1)
    tokens = full_pass([(size, size / rate(size)) for size in sizes], least)
    assert least <= tokens <= max(least, *sizes)
    assert tokens >= max(sizes) or rate(tokens) >= 0.8 * rate(max(sizes)) * (1 - 1e-6)
    assert tokens == least or rate(tokens - 1) < 0.8 * rate(max(sizes)) * (1 + 1e-6)


def test_one_pass_that_was_late_makes_no_full_pass_larger() -> None:
    rounds = [(tokens, 0.003 + 2e-4 * tokens) for tokens in (250, 256, 1_000, 1_020, 4_000, 4_090)] * 3
    for late in range(len(rounds)):
        passes = [(tokens, seconds + 0.4 * (place == late)) for place, (tokens, seconds) in enumerate(rounds)]
        assert full_pass(passes, 256) == full_pass(rounds, 256)


def test_full_pass_of_a_model_that_was_timed_with_less_or_takes_no_time_has_the_least() -> None:
    assert full_pass([(240, 0.3), (200, 0.25)], 250) == full_pass([(240, 0.3)], 250) == 250
    assert full_pass([(100, 0.0), (100, 0.0)], 50) == 50


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


@given(st.floats(0.035, 0.5))
def test_bulk_work_keeps_its_share_of_a_core_beside_queries_or_a_little_more(share: float) -> None:
    steps = bulk_niceness(share) - QUERY_NICENESS
    assert 0 <= steps <= 19 - QUERY_NICENESS, "19 is the most that the kernel knows"
    assert share * (1 - 1e-9) <= 1 / (1 + 1.25**steps) < 1.25 * share


@pytest.mark.parametrize(("own", "steps"), [(0, 9), (6, 9), (10, 5), (15, 0)])
def test_share_of_bulk_work_is_what_a_service_of_some_niceness_leaves_it(
    own: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getpriority", lambda *_: own)
    assert bulk_niceness(0.1) - QUERY_NICENESS == 9
    assert kept_share("cpu", 0.1) == 1 / (1 + 1.25**steps)


@pytest.mark.parametrize("steps", range(1, 15))
def test_share_that_a_step_of_niceness_gives_is_met_by_that_step(steps: int) -> None:
    assert bulk_niceness(1 / (1 + 1.25**steps)) == QUERY_NICENESS + steps


@pytest.mark.parametrize("share", [0.034, 0.51, math.nan])
def test_share_that_the_scheduler_cannot_give_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"share of bulk work, is 0\.035 .* to 0\.5, not"):
        bulk_niceness(share)


@pytest.mark.parametrize(("devices", "share"), [("cuda:0", 0.5), ("cuda:0,cuda:1", 0.5), ("cuda:0,cuda:0", 2 / 3)])
def test_bulk_work_keeps_the_slices_that_a_gpu_gives_its_process(devices: str, share: float) -> None:
    assert kept_share(devices, 0.1) == share
