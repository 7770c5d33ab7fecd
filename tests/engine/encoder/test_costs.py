"""Costs of encode calls: fitted to timed calls, kept with the calibration; B_min and the ramp
follow from them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from surge_dagster.engine.encoder.calibration import Calibration
from surge_dagster.engine.encoder.costs import (
    Call,
    EncodeCosts,
    Fit,
    derived_b_min,
    fit_costs,
    time_calls,
    timed_calls,
)
from surge_dagster.engine.run.thresholds import Thresholds

C_IPC, C_LENGTH, C_TEXT, C_TOKEN = 0.004, 0.0003, 0.0002, 0.00005


def simulated(texts: list[str]) -> tuple[float, float]:
    """Tokens and seconds of a call that costs exactly what the constants say."""
    tokens = sum(2 + len(text) // 4 for text in texts)
    return tokens, C_IPC + C_LENGTH * min(32, len(texts)) + C_TEXT * len(texts) + C_TOKEN * tokens


def call(texts: int, tokens_each: float = 12.0, pace: float = 1.0) -> Call:
    tokens = texts * tokens_each
    seconds = C_IPC + C_LENGTH * min(32, texts) + C_TEXT * texts + C_TOKEN * tokens
    return Call(texts, 4 * tokens, tokens, pace * seconds)


def test_costs_of_a_call_a_text_and_a_token_are_found_from_timed_calls() -> None:
    costs = EncodeCosts.of(time_calls(simulated), [], workers=2)
    assert costs.call_seconds == pytest.approx(C_IPC)
    assert costs.superbatch_seconds == pytest.approx(C_IPC + 32 * C_LENGTH)
    # on one of two workers
    assert costs.text_seconds(10) == pytest.approx(2 * (C_TEXT + 10 * C_TOKEN))
    assert costs.text_seconds(300) == pytest.approx(2 * (C_TEXT + 300 * C_TOKEN))
    assert costs.call_margin == pytest.approx(0, abs=1e-9)


def test_slow_model_is_measured_with_few_texts_that_still_tell_a_call_from_its_texts() -> None:
    calls: list[int] = []

    def encode(texts: list[str]) -> tuple[float, float]:
        calls.append(len(texts))
        tokens, seconds = simulated(texts)
        return tokens, 1_000 * seconds

    costs = EncodeCosts.of(time_calls(encode), [], workers=1)
    assert max(calls) == 4 and len(calls) == 10
    assert costs.seconds(np.array([2]), np.array([20])) == pytest.approx(
        1_000 * call(2, 10).seconds
    )


@pytest.mark.parametrize("first", range(0, 40, 2))
def test_machine_that_is_stopped_or_busy_for_a_moment_does_not_make_b_min_run_away(
    first: int,
) -> None:
    count = itertools.count()

    def encode(texts: list[str]) -> tuple[float, float]:
        tokens, seconds = simulated(texts)
        number = next(count)
        return tokens, 5 * seconds + (
            1.0 if number == first else 0.3 if first < number <= first + 3 else 0.0
        )

    costs, exact = EncodeCosts.of(time_calls(encode), [], workers=1), 5 * (C_IPC + 32 * C_LENGTH)
    assert costs.superbatch_seconds <= 2 * exact
    assert costs.b_min <= 2 * 5 / (5 * (C_TEXT + 10 * C_TOKEN))


def test_calls_grow_until_later_texts_share_the_passes_of_the_first() -> None:
    def encode(texts: list[str]) -> tuple[float, float]:
        tokens, seconds = simulated(texts)
        return tokens, 20 * seconds  # over a tenth of a second from four texts on

    calls = time_calls(encode)
    assert max(call.texts for call in calls) == 64
    large = EncodeCosts.of(calls, [], workers=1).seconds(np.array([10_000]), np.array([120_000]))
    assert large == pytest.approx(20 * call(10_000).seconds)


def test_confidence_interval_holds_the_true_costs_in_nineteen_of_twenty_fits() -> None:
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(200):
        exact = [
            call(texts, tokens) for texts in (1, 8, 64, 512, 4_096) for tokens in (10, 200)
        ] * 2
        seconds = np.array([one.seconds for one in exact])
        noisy = seconds + rng.normal(0, 0.01 * np.sqrt(seconds))
        calls = [
            Call(one.texts, one.text_bytes, one.tokens, time)
            for one, time in zip(exact, noisy, strict=True)
        ]
        costs = EncodeCosts.of(calls, [], workers=1)
        margin = costs.text_margin(100)
        assert margin is not None
        held += abs(costs.text_seconds(100) - C_TEXT - 100 * C_TOKEN) <= margin
    assert 180 <= held <= 198


def test_costs_are_never_negative_and_unobserved_ones_are_zero() -> None:
    falling = fit_costs(np.array([[1.0, 1.0], [1.0, 100.0]]), np.array([1.0, 0.5]))
    assert (falling.values >= 0).all() and falling.values[0] > 0
    assert fit_costs(np.zeros((0, 3)), np.zeros(0)).values.tolist() == [0, 0, 0]
    assert EncodeCosts.of([], [], workers=1).text_seconds() > 0  # speeds stay finite


def test_long_runs_outweigh_the_short_measurement() -> None:
    costs = EncodeCosts.of(
        time_calls(simulated), [call(2_000, pace=1.2) for _ in range(50)], workers=1
    )
    predicted = costs.seconds(np.array([2_000]), np.array([24_000]))
    assert predicted == pytest.approx(call(2_000, pace=1.2).seconds, rel=0.01)


def test_calls_of_a_machine_that_changes_its_speed_add_up_to_what_they_took() -> None:
    calls = [
        call(1_000 + 10 * number, pace=pace)
        for number, pace in enumerate((0.2, 1.8, 0.02, 1.98) * 3)
    ]
    costs = EncodeCosts.of(calls, [], workers=1)
    texts, tokens = (
        np.array([getattr(each, name) for each in calls]) for name in ("texts", "tokens")
    )
    assert costs.seconds(texts, tokens).sum() == pytest.approx(
        sum(each.seconds for each in calls), rel=0.01
    )


@pytest.mark.parametrize("stalled_seconds", [5.0, 600.0])
def test_one_stalled_call_does_not_make_plans_much_longer(stalled_seconds: float) -> None:
    measured = [
        call(texts, tokens)
        for texts, tokens in itertools.product((1, 4, 16, 64, 256), (10.0, 80.0))
    ]
    of_runs = [call(5_000 + 10 * number) for number in range(8)]
    of_runs[3] = replace(of_runs[3], seconds=of_runs[3].seconds + stalled_seconds)
    costs = EncodeCosts.of(measured, of_runs, workers=1)
    assert costs.seconds(np.array([20_000]), np.array([240_000])) <= 1.6 * call(20_000).seconds


def test_new_calls_outweigh_those_of_minutes_ago() -> None:
    slow, fast = (
        [call(20_000, pace=pace) for _ in range(count)] for count, pace in ((6, 2.0), (12, 1.0))
    )
    for runs, pace in ((slow + fast, 1.0), (fast + slow, 2.0)):  # as many seconds of each
        [predicted] = EncodeCosts.of([], runs, workers=1).seconds(
            np.array([20_000]), np.array([240_000])
        )
        assert predicted / call(20_000).seconds == pytest.approx(pace, abs=0.3)


def test_mean_length_is_that_of_the_texts_of_runs() -> None:
    costs = EncodeCosts.of([call(100, 12)], [call(100, 40)], workers=1)
    assert costs.tokens_per_text == 40
    assert costs.tokens_per_byte == 0.25


def test_bytes_that_the_model_does_not_read_do_not_make_its_tokens_dear() -> None:
    """Texts of 1 MB, cut at 256 tokens, are copied and hashed whole."""
    of_byte = 1e-9
    cut = [
        Call(n, n * 1e6, n * 256.0, call(n, 256).seconds + n * (1e6 - 16 * 256) * of_byte)
        for n in (20, 60)
    ]
    costs = EncodeCosts.of(time_calls(simulated), cut, workers=1)
    assert costs.text_seconds(60) == pytest.approx(C_TEXT + 60 * C_TOKEN)
    assert costs.seconds(np.array([20]), np.array([20 * 256]), np.array([2e7])) == pytest.approx(
        cut[0].seconds
    )


@pytest.mark.parametrize(
    ("texts_per_second", "b_min"), [(1, 1_000), (300, 1_500), (19_000, 95_000), (1e9, 100_000)]
)
def test_b_min_is_the_texts_of_five_seconds_within_limits(
    texts_per_second: float, b_min: int
) -> None:
    assert derived_b_min(texts_per_second) == b_min


@pytest.mark.parametrize(
    ("texts_per_second", "b_min"), [(1.0, 5_000), (1_500.0, 7_500), (1e9, 20_000)]
)
def test_b_min_at_most_halves_or_doubles_from_run_to_run(
    texts_per_second: float, b_min: int
) -> None:
    assert derived_b_min(texts_per_second, previous=10_000) == b_min


def test_one_record_that_took_no_time_does_not_move_b_min() -> None:
    of_runs = [
        Call(texts, 40.0 * texts, 10.0 * texts, texts / 300) for texts in (1_000, 1_200, 900, 1_100)
    ]
    untrue = Call(1_000, 40_000.0, 10_000.0, 1e-6)

    costs = EncodeCosts.of([call(100)], [*of_runs, untrue], workers=1)

    assert costs.b_min == 1_500


def test_b_min_follows_the_newest_superbatches() -> None:
    slow = [Call(1_000, 40_000.0, 10_000.0, 10.0)] * 9
    fast = [Call(1_000, 40_000.0, 10_000.0, 2.0)] * 9

    costs = EncodeCosts.of([call(100)], [*slow, *fast], workers=1, previous_b_min=2_000)

    assert costs.b_min == 2_500


def test_small_superbatches_say_nothing_of_b_min() -> None:
    """Their time is that of a call: a night with few changes must not make SuperBatches smaller."""
    full = [Call(10_000, 400_000.0, 100_000.0, 4.0)] * 3
    small = [Call(5, 200.0, 50.0, 0.5)] * 20

    costs = EncodeCosts.of([call(100)], [*full, *small], workers=1, previous_b_min=12_500)

    assert costs.b_min == 12_500


def test_without_superbatches_b_min_follows_from_the_timed_calls() -> None:
    costs = EncodeCosts.of(time_calls(simulated), [], workers=1)
    assert costs.b_min == round(5 * costs.texts_per_second)


def test_break_even_is_where_the_call_costs_as_much_as_its_texts() -> None:
    for call_seconds, length_seconds in ((0.1, 0.0), (0.1, 0.003), (0.01, 0.001)):
        costs = EncodeCosts(
            Fit(np.array([call_seconds, length_seconds, 0.001, 0.0001, 0.0])), workers=2
        )
        found = costs.break_even_texts(10)
        assert call_seconds + length_seconds * min(32, found) == pytest.approx(0.002 * found)


def test_b_min_and_its_ramp_can_be_set() -> None:
    assert Thresholds().resolve(3_200).first_b_min == 200
    assert Thresholds(first_b_min=500).resolve(3_200).first_b_min == 500
    # no larger than what follows
    assert Thresholds(first_b_min=9_000).resolve(3_200).first_b_min == 3_200
    assert Thresholds(b_min=4_000).resolve(3_200).first_b_min == 4_000
    assert Thresholds(b_min=4_000, first_b_min=10).resolve(3_200).b_min_of(2) == 40


class TestWhatIsKept:
    """Timed calls live in the document that also holds the answer of the parity check."""

    @pytest.fixture(autouse=True)
    def own_cache(
        self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))

    def test_calls_are_timed_once(self) -> None:
        calibration = Calibration("calibration/one.json")
        calibration.write(lowest_cosine=1.0)
        measured, _ = timed_calls(calibration, "cpu", simulated)
        again, _ = timed_calls(calibration, "cpu", lambda texts: pytest.fail("measured again"))
        assert [one.texts for one in again] == [one.texts for one in measured]
        assert EncodeCosts.of(again, [], 1).call_seconds == pytest.approx(C_IPC, rel=1e-4)
        assert calibration.read("lowest_cosine") == 1.0

    def test_other_devices_are_timed_apart(self) -> None:
        calibration = Calibration("calibration/two.json")
        timed_calls(calibration, "cuda:0", simulated)
        measured, _ = timed_calls(calibration, "cuda:0,cuda:1", lambda texts: (len(texts), 1.0))
        assert {one.seconds for one in measured} == {1.0}

    @pytest.mark.parametrize(("devices", "largest"), [("cpu", 16_384), ("cuda:0,cuda:1", 262_144)])
    def test_gpu_is_timed_with_calls_as_large_as_its_superbatches(
        self, devices: str, largest: int
    ) -> None:
        speedy, _ = timed_calls(
            Calibration("calibration/five.json"), devices, lambda texts: (len(texts), 1e-9)
        )
        assert max(one.texts for one in speedy) == largest
        slow, _ = timed_calls(
            Calibration("calibration/six.json"), devices, lambda texts: (1, len(texts) / 100_000)
        )
        assert max(one.texts for one in slow) == 16_384

    def test_measuring_anew_forgets_what_runs_have_shown(self) -> None:
        calibration = Calibration("calibration/three.json")
        timed_calls(calibration, "cpu", lambda texts: (1, 9.0))
        calibration.observe("runs cpu", [[1, 1, 1, 9.0, 0]])
        assert timed_calls(calibration, "cpu", simulated)[1]
        measured, of_runs = timed_calls(calibration, "cpu", simulated, anew=True)
        assert not of_runs and max(one.seconds for one in measured) < 9.0

    def test_only_the_newest_observations_are_kept(self) -> None:
        calibration = Calibration("calibration/four.json")
        for start in range(0, 500, 100):
            calibration.observe(
                "runs cpu", [[float(number)] for number in range(start, start + 100)]
            )
        kept = calibration.observations("runs cpu")
        assert len(kept) == 256 and kept[-1] == [499.0]
