"""The promise follows its formula, rests on the slowest passes that were timed, and is refused
where none can hold."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.promise import (
    MARGIN,
    QUERY_NICENESS,
    Promise,
    bulk_niceness,
    kept_share,
)

P = Promise(1_000.0, 100, 1.0)


@pytest.mark.parametrize(("waiting", "passes"), [(0, 1), (1, 2), (100, 2), (101, 3), (950, 11)])
def test_expected_time_is_that_of_the_passes(waiting: int, passes: int) -> None:
    assert P.expected_seconds(waiting) == pytest.approx(0.1 * passes)


def test_expected_time_follows_a_newer_rate() -> None:
    assert P.expected_seconds(100, 500.0) == pytest.approx(0.4)


def test_pass_under_way_counts_with_the_time_it_has_taken() -> None:
    assert P.expected_seconds(100, under_way_seconds=5.0) == pytest.approx(5.1)


@given(st.integers(2, 40), st.floats(0, 0.1))
def test_largest_request_is_the_last_that_is_accepted_alone(passes: int, more: float) -> None:
    promise = P.promising(MARGIN * 0.1 * passes + more)
    assert (
        MARGIN * promise.expected_seconds(promise.largest_tokens) <= promise.promised_seconds + 1e-6
    )
    assert MARGIN * promise.expected_seconds(promise.largest_tokens + 1) > promise.promised_seconds
    assert promise.as_dict()["largest_tokens"] == promise.largest_tokens


def test_promise_without_a_request_has_room_for_two_full_passes() -> None:
    assert P.promising(None).largest_tokens == 200


def test_promise_that_no_request_could_keep_is_refused_with_the_smallest() -> None:
    with pytest.raises(ConfigError, match=r"a promise of 40 ms cannot be kept here") as why:
        P.promising(0.040)
    found = re.search(r"smallest promise is (\d+) ms", str(why.value))
    assert found
    smallest = int(found[1]) / 1000
    assert P.promising(smallest).largest_tokens == 100
    for never in (smallest - 0.001, math.inf, math.nan):
        with pytest.raises(ConfigError, match="--promise-ms"):
            P.promising(never)


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


@pytest.mark.parametrize(
    ("devices", "share"), [("cuda:0", 0.5), ("cuda:0,cuda:1", 0.5), ("cuda:0,cuda:0", 2 / 3)]
)
def test_bulk_work_keeps_the_slices_that_a_gpu_gives_its_process(
    devices: str, share: float
) -> None:
    assert kept_share(devices, 0.1) == share
