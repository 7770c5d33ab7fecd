"""The planner: times, memory, price and machines of a run, from sizes and costs; no clock is
involved."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic import partition_sizes
from surge_dagster.engine.encoder.speed import Call, Speed
from surge_dagster.engine.plan.cost_model import (
    CostConstants,
    Flush,
    IoCosts,
    Recommendation,
    predict_flushes,
)
from surge_dagster.engine.plan.planner import (
    Forecast,
    Goals,
    RunCosts,
    forecast,
    plan,
    size_fleet,
    verdict,
)
from surge_dagster.engine.run.memory import ResultMemory, plan_memory
from surge_dagster.engine.run.report import Prices, RunReport
from surge_dagster.engine.run.thresholds import Bounds, Thresholds

MINILM = Speed.given(call_seconds=0.087, text_seconds=0.149e-3, workers=4)
FREE = IoCosts(np.zeros(4), np.zeros(3), np.zeros(2))
VECTOR = 384 * 4
PAPER = Bounds(100_000, 500_000, 1 << 60, 1 << 60)


def run_costs(
    encode: Speed = MINILM,
    per_superbatch: float = 0.0,
    per_file: float = 0.0,
    per_row: float = 0.0,
    per_reused: float = 0.0,
    host_per_file: float = 0.0,
) -> RunCosts:
    read = np.array([0.0, per_row, per_reused, 0.0])
    publish = np.array([per_superbatch, per_file, 0.0])
    host = np.array([0.0, host_per_file])
    io = replace(FREE, read=read, publish=publish, host=host)
    return RunCosts(encode, io, VECTOR, core_share=0.5)


def test_plan_of_the_papers_run() -> None:
    sizes = partition_sizes(10_000_000, 4_000)
    planned = plan(sizes, 47 * sizes, run_costs(), PAPER, goals=Goals(Prices(per_hour=7.30)))
    assert planned.paper.alpha == pytest.approx(0.934, abs=0.0005)
    assert planned.paper.speedup == pytest.approx(1.89, abs=0.01)
    assert planned.paper.break_even_texts == pytest.approx(2_340, rel=0.005)
    assert planned.paper.paper_recommendation is Recommendation.STRONG
    assert planned.superbatches == len(predict_flushes(sizes, PAPER)) < 100
    assert planned.fill_ratio > 1
    wall = planned.superbatches * 0.087 + 10_000_000 * 0.149e-3 / 4
    assert planned.forecast.wall_seconds == pytest.approx(wall)
    assert planned.paper.partition_by_partition_seconds == pytest.approx(
        planned.paper.speedup * wall
    )
    assert planned.cost_per_million_texts == pytest.approx(7.30 / 3600 * wall / 10)


def test_equal_texts_take_no_time_of_a_worker() -> None:
    encode = replace(Speed.given(1.0, 1.0, 1), equal_share=0.75)
    bounds = Bounds(400, 400, 1 << 60, 1 << 60)
    planned = plan(
        [100] * 4,
        [4_700] * 4,
        run_costs(encode),
        bounds,
        goals=Goals(deadline_seconds=110.0),
    )
    assert planned.forecast.wall_seconds == 1 + 400 * 0.25
    assert planned.tokens == 18_800 * encode.tokens_per_byte
    assert planned.fleet is not None
    assert planned.fleet.workers == 1
    assert planned.fleet.wall_seconds == planned.forecast.wall_seconds
    assert planned.paper.partition_by_partition_seconds == 4 * (1 + 100 * 0.25)
    assert planned.paper.speedup == pytest.approx(104 / 101)
    assert planned.paper.break_even_texts == pytest.approx(4.0)


def test_document_of_a_plan_has_the_names_of_the_report() -> None:
    planned = plan([100, 200], [4_700, 9_400], run_costs(), PAPER, goals=Goals(deadline_seconds=60))
    document = json.loads(json.dumps(planned.as_dict()))
    names = ("wall_seconds", "encode_seconds", "publish_seconds", "time_to_first_output_seconds")
    names += ("texts_per_second", "superbatches", "fill_ratio", "overlap_ratio", "tokens")
    names += ("workers", "texts_encoded", "rows_reused", "cost", "cost_per_million_texts")
    names += ("b_min", "b_max", "call_seconds", "peak_resident_bytes")
    assert set(document) & set(RunReport().as_dict()) == set(names)


def test_plan_of_an_empty_catalog_is_zero() -> None:
    planned = plan([], [], run_costs(), PAPER, goals=Goals(Prices(per_hour=1.0), 60))
    assert planned.texts == 0
    assert planned.superbatches == 0
    assert planned.forecast.wall_seconds == 0.0
    assert planned.cost_per_million_texts is None
    assert planned.fleet is not None
    assert planned.fleet.workers == 1
    planned = plan([0, 0], [0, 0], run_costs(per_file=0.25), PAPER)
    # nothing to encode, two files
    assert planned.superbatches == 1
    assert planned.forecast.wall_seconds == 0.5


class TestForecast:
    """SuperBatches pass the stages in their order, three of them alive at a time."""

    ENCODE = Speed.given(call_seconds=1.0, text_seconds=1.0, workers=1)

    @pytest.mark.parametrize(
        ("flushes", "costs", "wall_seconds"),
        [
            ([Flush(9)] * 5, {"per_superbatch": 4.0}, 5 * 10 + 4),
            ([Flush(9)] * 6, {"per_superbatch": 25.0}, 10 + 6 * 25),
            ([Flush(10)] * 3, {"per_row": 0.5}, 5 + 3 * 11),
            ([Flush(10, reused=5)] * 3, {"per_row": 1.0, "per_reused": 2.0}, 3 * (10 + 10) + 6),
            # two files take half of their processor seconds from the encoder
            # next to the first and the last one there is only half of the other work
            ([Flush(9, partitions=2)] * 5, {"host_per_file": 3.0}, 5 * 10 + 3 * 3 + 2 * 1.5),
            ([Flush(9, partitions=2)], {"host_per_file": 3.0}, 10),
            ([Flush(9, 2, reused=9)] * 5, {"host_per_file": 3.0}, 0),
            # the fourth waits for a slot
            ([Flush(9)] * 4, {"per_row": 1.0, "per_superbatch": 25.0}, 9 + 10 + 4 * 25),
        ],
    )
    def test_slowest_stage_sets_the_pace(
        self, flushes: list[Flush], costs: dict[str, float], wall_seconds: float
    ) -> None:
        found = forecast(flushes, run_costs(self.ENCODE, **costs))
        assert found.wall_seconds == pytest.approx(wall_seconds)

    def test_first_output_comes_after_the_first_superbatch(self) -> None:
        found = forecast([Flush(9)] * 5, run_costs(self.ENCODE, per_superbatch=4.0))
        assert found.time_to_first_output_seconds == pytest.approx(10 + 4)
        assert found.overlap_ratio == 1

    def test_reused_rows_and_equal_texts_are_written_and_not_encoded(self) -> None:
        encode = replace(self.ENCODE, equal_share=0.25)
        found = forecast([Flush(100, 2, 4_700.0, reused=60)], run_costs(encode, per_file=3.0))
        assert found.encode_seconds == 1 + (100 - 60) * 0.75
        assert found.publish_seconds == 6.0
        assert forecast([Flush(100, reused=100)], run_costs(self.ENCODE)).encode_seconds == 0

    def test_equal_texts_count_in_tokens_per_byte(self) -> None:
        """Equal texts are often short: their share of the bytes is not that of the texts."""
        seen = Call(texts=50, text_bytes=1_000, tokens=200, seconds=1.0, equal_texts=50)
        encode = Speed(0.0, 0.0, token_seconds=1.0).of_texts([seen])
        assert forecast([Flush(100, 1, 1_000.0)], run_costs(encode)).encode_seconds == 200
        assert encode.tokens_per_single_byte == 0.4

    def test_interval_is_the_spread_of_earlier_superbatches(self) -> None:
        unsure = replace(self.ENCODE, spread=0.25)
        assert forecast([Flush(9)] * 4, run_costs(unsure)).margin_seconds == 0.25 * 40


class TestFleet:
    """Workers for a deadline, on machines whose way to the store serves a few of them."""

    MODEL = CostConstants(call_seconds=0.1, text_seconds=1e-3, workers=1)

    def test_fewest_workers_that_end_in_time(self) -> None:
        fleet = size_fleet(self.MODEL, 1_000_000, 100, 10.0, 120.0, workers_per_machine=None)
        assert fleet.workers == 10
        assert fleet.machines == 1
        assert fleet.wall_seconds == pytest.approx(120.0)

    def test_machines_get_as_many_workers_as_their_storage_serves(self) -> None:
        """Zero: NG = (U/S)·BW."""
        costs = run_costs(Speed.given(0.0, 1e-3, 1), per_file=125.0)
        goals = Goals(deadline_seconds=100)
        planned = plan([1_000_000], [47_000_000], costs, PAPER, goals=goals)

        # encoding takes 1,000 s; a partition that is divided is written twice in 250
        assert planned.workers_per_machine == 4
        assert planned.fleet is not None
        # ten are enough, each machine has as many
        assert planned.fleet.workers == 12
        assert planned.fleet.machines == 3

    def test_bandwidth_is_what_publishing_showed(self) -> None:
        costs = run_costs(Speed.given(0.0, 1e-3, 1), per_file=25.0)
        planned = plan([100_000], [4_700_000], costs, PAPER)
        assert planned.workers_per_machine == 4  # encoding takes 100 s, publishing 25

    def test_deadline_that_no_number_of_workers_meets_is_not_called_met(self) -> None:
        fleet = size_fleet(self.MODEL, 1_000, 100, 10.0, 15.0, workers_per_machine=None)
        assert fleet.wall_seconds > fleet.deadline_seconds

    @given(
        texts=st.integers(0, 10**8),
        calls=st.integers(0, 1_000),
        deadline=st.floats(1, 1e5),
        served=st.integers(1, 64) | st.none(),
    )
    def test_fleet_meets_every_deadline_that_can_be_met(
        self, texts: int, calls: int, deadline: float, served: int | None
    ) -> None:
        fleet = size_fleet(self.MODEL, texts, calls, 1.0, deadline, served)
        if 1.0 + calls * 0.1 < 0.99 * deadline:
            assert fleet.wall_seconds <= deadline * (1 + 1e-9)
        assert fleet.workers % fleet.machines == 0
        assert served is None or fleet.workers <= served * fleet.machines


def test_memory_of_a_plan_is_that_of_three_superbatches() -> None:
    bounds = Thresholds(b_min=1_000).resolve(1)
    memory = plan_memory(bounds, ResultMemory(384, 4, 4, 0), 1 << 30)
    one = plan([1_000], [47_000], run_costs(), bounds, memory=memory)
    three = plan([1_000] * 3, [47_000] * 3, run_costs(), bounds, memory=memory)
    many = plan([1_000] * 50, [47_000] * 50, run_costs(), bounds, memory=memory)
    assert one.peak_resident_bytes
    assert three.peak_resident_bytes
    assert memory.reader + VECTOR * 1_000 < one.peak_resident_bytes < three.peak_resident_bytes
    assert many.peak_resident_bytes == three.peak_resident_bytes <= memory.limit
    assert many.memory_limit_bytes == memory.limit == 1 << 30


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (2.0, "SuperBatches save 50% of the encoding time here."),
        (1 / 0.98, "SuperBatches save 2% of the encoding time here."),
        (1.009, "SuperBatches make little difference here"),
        (0.9, "SuperBatches make little difference here"),
    ],
)
def test_verdict_states_what_superbatches_gain_here(gain: float, expected: str) -> None:
    assert verdict(gain).startswith(expected)


def test_verdict_follows_the_measured_gain_and_not_the_papers_table() -> None:
    """Few small partitions of very different sizes: the table advises SuperBatches, and calls cost
    nothing here."""
    free_calls = Speed.given(1e-6, 1e-3, 1)
    sizes = [100] * 20 + [10_000]

    planned = plan(sizes, [47 * size for size in sizes], run_costs(free_calls), PAPER)

    assert planned.paper.paper_recommendation is Recommendation.MODERATE
    assert planned.paper.verdict.startswith("SuperBatches make little difference here")


@pytest.mark.parametrize(
    ("goals", "seconds"),
    [
        (Goals(tokens_per_minute=1e9), 5.0),
        (Goals(tokens_per_minute=600.0), 100.0),
        (Goals(texts_per_minute=30.0), 400.0),
        (Goals(tokens_per_minute=600.0, texts_per_minute=30.0), 400.0),
    ],
)
def test_limits_per_minute_hold_up_a_run(goals: Goals, seconds: float) -> None:
    times = goals.limited(Forecast(wall_seconds=5.0, texts_per_second=40.0), 200, 1_000)

    assert times.wall_seconds == seconds
    assert times.texts_per_second == pytest.approx(200 / seconds)
