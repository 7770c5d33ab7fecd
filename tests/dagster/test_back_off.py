"""What was asked for and is still to be done: asked for again, after waits that grow."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.assets.sensor_cursor import Gone, Request, SensorCursor, digest
from tests.dagster.conftest import Workbench, requested

MOMENT = datetime(2026, 1, 31, 12, tzinfo=UTC)


def test_waits_double_up_to_a_day() -> None:
    waits = [Request("", attempt, MOMENT, set()).due - MOMENT for attempt in (1, 2, 3, 4, 11, 12, 1000)]
    minutes = [1, 2, 4, 8, 1024, 1440, 1440]
    assert waits == [timedelta(minutes=n) for n in minutes]


def test_what_no_run_has_done_is_asked_for_again_and_the_tick_says_when(bench: Workbench) -> None:
    bench.write("a")
    assert requested(bench.tick()) == [["a"]]
    waiting = bench.later(seconds=59)
    assert requested(waiting) == []
    assert "1 asked for and not done (attempt 1)" in (waiting.skip_message or "")
    assert "from 2026-01-31 12:01:00+00:00" in (waiting.skip_message or "")
    assert requested(bench.later(seconds=1)) == [["a"]]
    assert requested(bench.later(seconds=119)) == []
    bench.write("b")
    assert requested(bench.tick()) == [["b"]], "others do not wait with it"
    assert requested(bench.later(seconds=1)) == [["a"]], "the third attempt; b has a minute still"


def test_the_wait_begins_when_the_run_has_ended(bench: Workbench) -> None:
    bench.write("a")
    [request] = bench.tick().run_requests or []
    run = bench.pretend_run(
        "embed_partitions", dg.DagsterRunStatus.STARTED, tags=request.tags, run_config=request.run_config
    )
    assert requested(bench.later(hours=3)) == []
    bench.instance.report_run_failed(run)
    assert requested(bench.later(seconds=59)) == []
    assert requested(bench.later(seconds=1)) == [["a"]]


def test_what_a_person_canceled_stays_canceled_until_the_source_changes(bench: Workbench) -> None:
    bench.write("a")
    [request] = bench.tick().run_requests or []
    run = bench.pretend_run(
        "embed_partitions", dg.DagsterRunStatus.STARTED, tags=request.tags, run_config=request.run_config
    )
    bench.instance.report_run_canceled(run)
    quiet = bench.later(days=2)
    assert requested(quiet) == [] and "1 left alone because their run was canceled" in (quiet.skip_message or "")
    assert requested(bench.later(days=2)) == [], "and it is remembered"
    bench.write("a", 4, version="v2")
    assert requested(bench.tick()) == [["a"]]


def test_what_a_run_of_somebody_else_leaves_undone_is_asked_for_once_that_is_canceled(bench: Workbench) -> None:
    bench.write("a")
    run = bench.pretend_run("catalog_refresh", dg.DagsterRunStatus.STARTED)
    assert requested(bench.tick()) == []
    bench.instance.report_run_canceled(run)
    assert requested(bench.tick()) == [["a"]]


def test_what_was_never_tried_comes_before_what_fails_again_and_again(bench: Workbench) -> None:
    bench.settings["max_partitions_per_run"] = 2
    for key in "ab":
        bench.write(key)
    assert requested(bench.tick()) == [["a", "b"]]
    for key in "cd":
        bench.write(key)
    assert requested(bench.later(hours=1)) == [["c", "d"]]
    assert requested(bench.tick()) == [["a", "b"]]


def test_a_cursor_of_the_first_version_is_understood(bench: Workbench) -> None:
    bench.write("a")
    bench.tick()
    states = json.loads(bench.cursor or "")["requests"][0]["states"]
    bench.cursor = json.dumps({"asked": states})
    assert requested(bench.tick()) == [], "asked for before"
    assert requested(bench.later(minutes=1)) == [["a"]]


@pytest.mark.parametrize("cursor", ["", "[]", "1", '{"version": 3}', '{"version": 2}', '{"asked": 1}'])
def test_what_is_not_a_cursor_counts_as_none(cursor: str) -> None:
    assert SensorCursor.read(cursor, MOMENT) == SensorCursor()


moments = st.datetimes(timezones=st.just(UTC)).map(lambda moment: moment.replace(microsecond=0))
digests = st.sets(st.text(max_size=5).map(digest), min_size=1)


@given(
    st.lists(st.builds(Request, st.text(max_size=3), st.integers(1, 50), moments, digests, st.booleans()), max_size=3),
    st.dictionaries(st.text(max_size=5).map(digest), st.builds(Gone, moments, st.integers(1, 3))),
    st.none() | moments,
)
def test_a_cursor_reads_back_as_it_was_written(
    requests: list[Request], gone: dict[str, Gone], looked: datetime | None
) -> None:
    cursor = SensorCursor(requests, gone, looked)
    assert SensorCursor.read(cursor.write(), MOMENT) == cursor
