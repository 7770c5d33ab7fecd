"""When an encode call is slow: it is compared with calls of about its size, by what the pool's
costs expect of each."""

from __future__ import annotations

import pytest

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.run.encoding import Pace
from surge_dagster.engine.run.report import RunReport, SuperBatchReport


def pace_after(*calls: tuple[float, float]) -> Pace:
    """A pace that has seen calls of so many seconds, and so many expected ones."""
    pace = Pace()
    for seconds, expected_seconds in calls:
        pace.ratio(seconds, expected_seconds)
    return pace


def superbatch(encode_seconds: float, pace_ratio: float | None) -> SuperBatchReport:
    costs = Costs(texts_computed=1_000, encode_seconds=encode_seconds)
    return SuperBatchReport(4, 2, 1_000, 50_000, costs, pace_ratio=pace_ratio)


def test_the_first_calls_have_no_pace() -> None:
    pace = Pace()
    for _ in range(3):
        assert pace.ratio(1.0, 1.0) is None


def test_pace_is_relative_to_the_earlier_calls_of_the_run() -> None:
    """Costs that expect a third of the time, or of another day, do not make every call slow."""
    pace = pace_after((3.0, 1.0), (3.0, 1.0), (3.0, 1.0))
    assert pace.ratio(9.0, 1.0) == pytest.approx(3.0)


def test_longer_texts_do_not_look_slow() -> None:
    pace = pace_after((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    assert pace.ratio(3.0, 3.0) == pytest.approx(1.0)


def test_one_earlier_call_that_was_stalled_hides_no_slow_one() -> None:
    pace = pace_after((1.0, 1.0), (90.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    assert pace.ratio(3.0, 1.0) == pytest.approx(3.0)


def test_calls_of_another_size_are_not_compared() -> None:
    """A small call takes mostly what any call takes, which says little of a large one."""
    pace = pace_after((0.01, 0.05), (0.01, 0.05), (0.01, 0.05))
    assert pace.ratio(5.0, 5.0) is None


def test_costs_that_runs_have_taught_judge_the_first_calls_too() -> None:
    """A short run has no three calls of about one size."""
    assert Pace(is_learned=True).ratio(3.0, 1.0) == pytest.approx(3.0)


def test_call_that_computed_nothing_has_no_pace() -> None:
    assert pace_after((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)).ratio(0.0, 0.0) is None


@pytest.mark.parametrize(
    ("seconds", "pace_ratio", "is_slow"), [(6.0, 2.5, True), (6.0, 1.9, False), (0.5, 9.0, False)]
)
def test_slow_is_twice_as_long_as_usual_and_over_a_second(
    seconds: float, pace_ratio: float, is_slow: bool
) -> None:
    assert superbatch(seconds, pace_ratio).is_slow == is_slow


def test_report_of_a_run_counts_its_slow_superbatches() -> None:
    report = RunReport()
    for pace_ratio in (None, 1.0, 3.0):
        report.count(superbatch(6.0, pace_ratio), 0.0)
    assert report.slow_superbatches == 1


def test_message_of_a_slow_superbatch_names_it_and_what_to_look_for() -> None:
    message = superbatch(6.0, 3.0).slow_message
    assert message.startswith(
        "SuperBatch 4: its 1,000 texts took 6.0 s, 3.0 times as long as usual."
    )
