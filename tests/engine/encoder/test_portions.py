"""Portions and quarantine: every row is encoded once, workers share rows by speed, failing texts
are found."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.encoder.metrics import NO_COSTS
from surge_dagster.engine.encoder.quarantine import Quarantine
from surge_dagster.engine.encoder.schedule import (
    PORTIONS,
    QUEUED_PORTIONS,
    EncodeCall,
    PortionSizes,
    Schedule,
    portion_end,
)


@given(
    sizes=st.lists(st.integers(0, 6_000_000), min_size=1, max_size=50),
    workers=st.integers(1, 4),
    limits=st.sampled_from([PORTIONS, QUEUED_PORTIONS]),
)
def test_portions_cover_all_rows_within_their_size_limits(
    sizes: list[int], workers: int, limits: PortionSizes
) -> None:
    ends = np.concatenate([[0], np.cumsum(sizes)])
    start = 0
    while start < len(sizes):
        stop = portion_end(ends, start, workers, limits)
        assert start < stop <= min(len(sizes), start + limits.texts)
        assert ends[stop] - ends[start] <= limits.largest or stop == start + 1
        start = stop


def _call(rows: int, borders: list[int] | None = None, workers: int = 1) -> EncodeCall:
    slot: Any = type(
        "Slot", (), {"offsets": 47 * np.arange(rows + 1), "__len__": lambda self: rows}
    )()
    starts = None if borders is None else np.array(borders)
    return EncodeCall(slot, workers, lambda _: None, starts)


@pytest.mark.parametrize("speeds", [(1, 1), (4, 1), (4, 2, 1, 1)])
def test_workers_of_different_speeds_finish_together(speeds: tuple[int, ...]) -> None:
    """Simulates workers that pull portions: rows of 79 weighted bytes, speeds in texts per tick."""
    call = _call(100_000, workers=len(speeds))
    idle_since = [(0.0, worker) for worker in range(len(speeds))]
    ended = [0.0] * len(speeds)
    while idle_since:
        now, worker = heapq.heappop(idle_since)
        portion = call.take(PORTIONS)
        if portion is not None:
            ended[worker] = now + (portion.stop - portion.start) / speeds[worker]
            heapq.heappush(idle_since, (ended[worker], worker))
    assert max(ended) <= 1.05 * 100_000 / sum(speeds)


def test_portions_shrink_towards_the_end() -> None:
    call = _call(100_000, workers=4)
    sizes = []
    while (portion := call.take(PORTIONS)) is not None:
        sizes.append(portion.stop - portion.start)
    assert sum(sizes) == 100_000
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 512


def test_workers_that_queue_get_larger_portions() -> None:
    """A GPU would be done with 8,192 short texts before it has heard of the next ones."""
    schedule = Schedule()
    schedule.calls.append(_call(400_000))
    sizes = []
    for is_queue in (False, True):
        portion = schedule.next_portion(idle=True, is_queue=is_queue)
        assert portion is not None
        sizes.append(portion.stop - portion.start)
    assert sizes == [8_192, 106_184]


def test_time_of_a_call_that_ends_before_the_one_ahead_of_it_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small last call is encoded while another worker is still busy with the call before."""
    now = 100.0
    monkeypatch.setattr("surge_dagster.engine.encoder.schedule.time.monotonic", lambda: now)
    schedule = Schedule()
    first = _call(300, workers=2)
    small = _call(1, workers=2)
    schedule.calls += [first, small]
    assert schedule.next_portion(idle=True) is not None
    now = 110.0
    assert schedule.next_portion(idle=True) is not None
    now = 111.0
    schedule.end(small)
    now = 130.0
    schedule.end(first)
    assert [call.encode_seconds for call in (first, small)] == [29.0, 1.0]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9_000),
    bad=st.lists(st.integers(0, 8_999), max_size=5),
    groups=st.one_of(st.none(), st.lists(st.integers(0, 8_999), max_size=30)),
)
def test_only_groups_with_failing_texts_fail_and_every_other_row_is_encoded(
    rows: int, bad: list[int], groups: list[int] | None
) -> None:
    harmful = {row for row in bad if row < rows}
    borders = None if groups is None else sorted({0, *(row for row in groups if row < rows)})
    call = _call(rows, borders)
    call.quarantine.add(0, rows)
    call.next_row = rows
    encoded = np.zeros(rows, bool)
    losses = 0
    while (portion := call.take_quarantined()) is not None:
        if any(portion.start <= row < portion.stop for row in harmful):
            call.lose(portion, "ended")
            losses += 1
        else:
            assert not encoded[portion.start : portion.stop].any()
            encoded[portion.start : portion.stop] = True
            call.add(portion, NO_COSTS, ended_at=0.0)
    assert call.finished_rows >= call.rows

    def group(row: int) -> int:
        return row if borders is None else int(np.searchsorted(borders, row, side="right"))

    failed_groups = {group(row) for row in harmful}
    assert {group(failed.row) for failed in call.quarantine.failed} == failed_groups
    assert {failed.row for failed in call.quarantine.failed} <= harmful
    assert len(call.quarantine.failed) == len(failed_groups)
    assert all(encoded[row] or group(row) in failed_groups for row in range(rows))
    assert losses <= 6 * len(failed_groups)


def test_text_that_loses_one_worker_has_not_failed() -> None:
    quarantine = Quarantine(None, 10)
    quarantine.add(3, 4)
    rows, _ = quarantine.next()
    assert rows is not None
    assert quarantine.narrow(rows, "killed from outside") == 0
    assert quarantine.failed == []
    assert quarantine.next() == (rows, 0)
