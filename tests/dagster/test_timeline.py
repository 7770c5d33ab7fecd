"""The timeline of a run: correct, and small for a run of any length."""

from __future__ import annotations

import pytest

from surge_dagster.engine.support.timeline import Span
from surge_dagster.orchestration.timeline import MOST_ENTRIES, Entry, Timeline


def entry(number: int) -> Entry:
    return Entry(
        1, 10, 0.5, Span(number, number + 0.5, 0.5), None, Span(number + 0.5, number + 1, 0.25)
    )


@pytest.mark.parametrize("count", [1, MOST_ENTRIES, MOST_ENTRIES + 1, 1_000, 30_001])
def test_long_timeline_is_shortened_without_losing_time_or_texts(count: int) -> None:
    timeline = Timeline()
    for number in range(count):
        timeline.add(entry(number))
        assert len(timeline.entries) <= MOST_ENTRIES
    entries = timeline.entries
    assert len(entries) > MOST_ENTRIES // 2 or count <= MOST_ENTRIES // 2
    assert (
        sum(one.superbatches for one in entries) == count
        and sum(one.texts for one in entries) == 10 * count
    )
    assert {one.superbatches for one in entries[:-1]} <= {timeline.per_entry}
    encode = [one.encode for one in entries if one.encode]
    assert (encode[0].begun, encode[-1].ended) == (0, count - 0.5)
    assert sum(span.busy_seconds for span in encode) == pytest.approx(0.5 * count)
    assert all(one.serialize is None for one in entries)
