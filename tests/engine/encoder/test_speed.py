"""The speed of a pool: from the calls of a start and of runs; B_min and the ramp follow from it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from surge_dagster.engine.encoder.calibration import Calibration
from surge_dagster.engine.encoder.speed import (
    Call,
    Speed,
    SpeedRecord,
    derived_b_min,
    speed_of,
    time_start,
)

C_IPC = 0.004
C_TEXT = 0.0002
C_TOKEN = 0.00005


def simulated(texts: list[str]) -> tuple[float, float]:
    """Tokens and seconds of a call that costs exactly what the constants say."""
    tokens = sum(2 + len(text) // 4 for text in texts)
    return tokens, C_IPC + C_TEXT * len(texts) + C_TOKEN * tokens


def call(texts: int, tokens_each: float = 12.0, pace: float = 1.0) -> Call:
    tokens = texts * tokens_each
    return Call(texts, 4 * tokens, tokens, pace * (C_IPC + C_TEXT * texts + C_TOKEN * tokens))


START = time_start(simulated)


def test_costs_of_a_call_a_text_and_a_token_follow_from_the_start() -> None:
    speed = speed_of(START, workers=2)

    assert speed.call_seconds == pytest.approx(C_IPC, rel=0.05)
    assert speed.worker_seconds(10) == pytest.approx(2 * (C_TEXT + 10 * C_TOKEN), rel=0.02)
    assert speed.worker_seconds(300) == pytest.approx(2 * (C_TEXT + 300 * C_TOKEN), rel=0.02)


def test_texts_of_a_distant_server_take_their_part_of_its_latency() -> None:
    start = [Call(20, 960, 240, 0.5), Call(80, 3_840, 960, 0.5), Call(8, 3_840, 960, 0.5)]

    speed = speed_of(start, texts_at_once=200)

    assert speed.call_seconds == pytest.approx(0.5, rel=0.05)
    assert speed.seconds(4_000.0, 48_000.0) == pytest.approx(0.5 + 4_000 / 200 * 0.5, rel=0.05)


def test_slow_model_is_measured_with_few_texts() -> None:
    sizes: list[int] = []

    def encode(texts: list[str]) -> tuple[float, float]:
        sizes.append(len(texts))
        tokens, seconds = simulated(texts)
        return tokens, 1_000 * seconds

    speed = speed_of(time_start(encode))

    assert sizes == [1, 20, 20, 20, 2]
    assert speed.seconds(100.0, 1_000.0) == pytest.approx(1_000 * call(100, 10).seconds, rel=0.5)


@pytest.mark.parametrize("stalled", range(1, 30))
def test_stalled_call_of_the_start_does_not_make_b_min_run_away(stalled: int) -> None:
    count = itertools.count()

    def encode(texts: list[str]) -> tuple[float, float]:
        tokens, seconds = simulated(texts)
        return tokens, 5 * seconds + (1.0 if next(count) == stalled else 0.0)

    assert speed_of(time_start(encode)).b_min <= 2 * 5 / (5 * (C_TEXT + 10 * C_TOKEN))


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_costs_are_never_negative(seconds: float) -> None:
    """Whatever the noise of the start makes of them."""
    start = [Call(16, 800, 160, 1.0), Call(64, 3_200, 640, seconds), Call(2, 900, 200, 0.0)]
    start = [replace(each, seconds=max(each.seconds, 1e-9 * each.texts)) for each in start]

    speed = speed_of(start)

    assert min(speed.call_seconds, speed.text_seconds, speed.token_seconds) >= 0
    assert np.isfinite(speed.texts_per_second)


def test_newest_superbatches_set_the_pace() -> None:
    slow = [call(20_000, pace=3.0)] * 20
    usual = [call(20_000, pace=1.5)] * 9

    speed = speed_of(START, [*slow, *usual])

    assert speed.is_learned
    assert speed.seconds(20_000.0, 240_000.0) == pytest.approx(call(20_000, pace=1.5).seconds)


@pytest.mark.parametrize("stalled_seconds", [5.0, 600.0])
def test_one_stalled_superbatch_does_not_make_plans_longer(stalled_seconds: float) -> None:
    of_runs = [*map(call, range(5_000, 5_080, 10))]
    of_runs[3] = replace(of_runs[3], seconds=of_runs[3].seconds + stalled_seconds)

    seconds = speed_of(START, of_runs).seconds(20_000.0, 240_000.0)

    assert seconds == pytest.approx(call(20_000).seconds)


def test_large_superbatches_outweigh_small_ones() -> None:
    of_runs = [call(1_500, pace=2.0)] * 5 + [call(20_000)] * 2

    seconds = speed_of(START, of_runs).seconds(20_000.0, 240_000.0)

    assert seconds == pytest.approx(call(20_000).seconds)


def test_mean_length_is_that_of_the_texts_of_runs() -> None:
    speed = speed_of(START, [call(2_000, 40)])

    assert speed.tokens_per_text == 40
    assert speed.tokens_per_byte == 0.25


def test_spread_is_how_far_superbatches_differ() -> None:
    assert speed_of(START, [call(2_000)]).spread is None
    assert speed_of(START, [call(2_000)] * 3).spread == pytest.approx(0, abs=1e-9)
    paces = [call(2_000, pace=0.9), call(2_000), call(2_000, pace=1.1)]
    assert speed_of(START, paces).spread == pytest.approx(1.96 * 1.4826 * 0.1)


def test_one_stalled_superbatch_does_not_widen_the_spread() -> None:
    paces = (0.99, 1.01, 0.98, 1.02, 1.0, 1.0, 0.99, 1.01, 10.0)

    spread = speed_of(START, [call(2_000, pace=pace) for pace in paces]).spread

    assert spread is not None
    assert spread < 0.05


@pytest.mark.parametrize(
    ("texts_per_second", "b_min"), [(1, 1_000), (300, 1_500), (19_000, 95_000), (1e9, 100_000)]
)
def test_b_min_is_the_texts_of_five_seconds_within_limits(
    texts_per_second: float, b_min: int
) -> None:
    assert derived_b_min(texts_per_second) == b_min


def test_one_record_that_took_no_time_does_not_move_b_min() -> None:
    sizes = (1_000, 1_200, 900, 1_100)
    of_runs = [Call(texts, 40.0 * texts, 10.0 * texts, texts / 300) for texts in sizes]
    untrue = Call(1_000, 40_000.0, 10_000.0, 1e-6)

    assert speed_of(START, [*of_runs, untrue]).b_min == 1_500


def test_b_min_follows_the_newest_superbatches() -> None:
    slow = [Call(1_000, 40_000.0, 10_000.0, 10.0)] * 9
    fast = [Call(1_000, 40_000.0, 10_000.0, 2.0)] * 9

    assert speed_of(START, [*slow, *fast]).b_min == 2_500


def test_small_superbatches_do_not_count_while_there_are_larger_ones() -> None:
    """A night with few changes must not make SuperBatches smaller."""
    full = [Call(10_000, 400_000.0, 100_000.0, 4.0)] * 3
    small = [Call(5, 200.0, 50.0, 0.5)] * 20

    speed = speed_of(START, [*full, *small])

    assert speed.b_min == 12_500
    assert speed.seconds(10_000.0, 100_000.0) == pytest.approx(4.0)


def test_first_b_min_is_for_texts_of_32_tokens() -> None:
    speed = speed_of(START)
    texts_per_second = speed.workers / speed.worker_seconds(tokens=32)
    assert speed.b_min == pytest.approx(5 * texts_per_second, rel=0.05)


def test_break_even_is_where_the_call_costs_as_much_as_its_texts() -> None:
    speed = Speed(0.1, 0.001, 0.0001, workers=2)
    assert speed.break_even_texts(10) * (0.001 + 10 * 0.0001) == pytest.approx(0.1)


@pytest.mark.usefixtures("own_cache")
class TestRecord:
    """Timed calls live in the document that also holds the answer of the parity check."""

    def record(self, devices: str = "cpu") -> SpeedRecord:
        return SpeedRecord(Calibration("calibration/one.json"), devices, workers=1)

    def test_start_is_timed_once(self) -> None:
        Calibration("calibration/one.json").write(lowest_cosine=1.0)
        self.record().measure(simulated)

        again = self.record()
        again.measure(lambda texts: pytest.fail("measured again"))

        assert again.read().call_seconds == pytest.approx(C_IPC, rel=0.05)
        assert Calibration("calibration/one.json").read("lowest_cosine") == 1.0

    def test_other_devices_are_timed_apart(self) -> None:
        self.record("cuda:0").measure(simulated)
        two = self.record("cuda:0,cuda:1")

        two.measure(lambda texts: (len(texts), 1.0))

        assert two.read().texts_per_second == pytest.approx(20, rel=0.1)

    @pytest.mark.parametrize(("devices", "largest"), [("cpu", 5_120), ("cuda:0,cuda:1", 81_920)])
    def test_gpu_is_timed_with_calls_as_large_as_its_superbatches(
        self, devices: str, largest: int
    ) -> None:
        sizes: list[int] = []

        def encode(texts: list[str]) -> tuple[float, float]:
            sizes.append(len(texts))
            return len(texts), 1e-9

        self.record(devices).measure(encode)

        assert max(sizes) == largest

    def test_measuring_anew_forgets_what_runs_have_shown(self) -> None:
        record = self.record()
        record.measure(lambda texts: (len(texts), 9.0))
        record.learn([Call(100, 400.0, 100.0, 9.0)])

        record.measure(simulated, anew=True)

        assert not record.read().is_learned
        assert record.read().b_min == speed_of(START).b_min

    def test_nights_with_few_changes_do_not_push_out_large_calls(self) -> None:
        record = self.record()
        record.measure(simulated)
        record.learn([call(20_000)] * 9)
        b_min = record.read().b_min

        for _ in range(10):
            record.learn([call(1)] * 30)

        assert record.read().b_min == b_min

    def test_speed_follows_runs_that_are_smaller_for_good(self) -> None:
        record = self.record()
        record.measure(simulated)
        record.learn([call(20_000)] * 9)

        record.learn([call(1_200, pace=2.0)] * 9)

        seconds = record.read().seconds(1_200.0, 14_400.0)
        assert seconds == pytest.approx(call(1_200, pace=2.0).seconds)

    def test_without_a_cache_the_start_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        record = self.record()
        monkeypatch.setenv("SURGE_CACHE_DIR", "/dev/null/none")
        record.measure(simulated)

        record.learn([call(2_000)])

        assert record.read().call_seconds == pytest.approx(C_IPC, rel=0.05)

    def test_only_the_newest_observations_are_kept(self) -> None:
        calibration = Calibration("calibration/four.json")
        for start in range(0, 500, 100):
            calibration.observe("io", [[float(number)] for number in range(start, start + 100)])

        kept = calibration.observations("io")

        assert len(kept) == 256
        assert kept[-1] == [499.0]
