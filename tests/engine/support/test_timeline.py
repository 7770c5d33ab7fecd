"""When the stages of a run worked."""

from __future__ import annotations

from surge_dagster.engine.support.timeline import Lane, Span


def test_lane_sums_all_threads_and_spans_from_the_first_to_the_last() -> None:
    lane = Lane()
    assert lane.span(0) is None
    lane.add(12.0, 13.0)
    lane.add(11.0, 12.5)
    assert lane.span(10.0) == Span(1.0, 3.0)
    assert lane.seconds == 2.5
