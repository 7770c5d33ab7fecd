"""Partitions that a requested run left undone are requested again, after waits that grow."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.orchestration.sensor_cursor import Request, SensorCursor
from tests.dagster.conftest import Workbench, requested

MOMENT = datetime(2026, 1, 31, 12, tzinfo=UTC)
QUEUED, STARTED = dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.STARTED
FAILURE, CANCELED = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED


def test_waits_double_up_to_a_day() -> None:
    waits = []
    for attempt in (1, 2, 3, 4, 11, 12, 1000):
        due = Request("", attempt, 0, MOMENT.isoformat()).due
        assert due
        waits.append(due - MOMENT)
    assert waits == [timedelta(minutes=n) for n in (1, 2, 4, 8, 1024, 1440, 1440)]


def test_a_partition_whose_run_failed_is_requested_again_and_the_tick_says_when(bench: Workbench) -> None:
    bench.write("a")
    bench.pretend(bench.tick(), FAILURE)
    waiting = bench.tick()
    assert requested(waiting) == []
    assert "1 waiting after a failure (attempt 1)" in (waiting.skip_message or "")
    assert "until 2026-01-31 12:01:00+00:00" in (waiting.skip_message or "")
    assert requested(bench.later(seconds=59)) == []
    found = bench.later(seconds=1)
    assert requested(found) == [["a"]]
    bench.pretend(found, FAILURE)
    assert requested(bench.tick()) == []
    assert requested(bench.later(seconds=119)) == []
    bench.write("b")
    found = bench.tick()
    assert requested(found) == [["b"]], "others do not wait with it"
    bench.pretend(found, FAILURE)
    assert requested(bench.later(seconds=1)) == [["a"]], "the third attempt; b waits for another minute"


def test_the_wait_begins_when_the_run_has_ended(bench: Workbench) -> None:
    bench.write("a")
    [run] = bench.pretend(bench.tick(), STARTED)
    assert requested(bench.later(hours=3)) == []
    bench.instance.report_run_failed(run)
    assert requested(bench.tick()) == []
    assert requested(bench.later(seconds=59)) == []
    assert requested(bench.later(seconds=1)) == [["a"]]


def test_a_run_that_dagster_launches_again_holds_its_partitions_and_counts_as_the_same_attempt(
    bench: Workbench,
) -> None:
    bench.write("a")
    found = bench.tick()
    bench.pretend(found, FAILURE)
    assert requested(bench.tick()) == []
    [again] = bench.pretend(found, STARTED)
    assert requested(bench.later(hours=1)) == []
    bench.instance.report_run_failed(again)
    waiting = bench.tick()
    assert requested(waiting) == [] and "(attempt 1)" in (waiting.skip_message or "")
    assert requested(bench.later(minutes=1)) == [["a"]]


@pytest.mark.parametrize("deleted", [False, True])
def test_a_run_that_was_never_created_or_was_deleted_keeps_no_partition_waiting(
    bench: Workbench, deleted: bool
) -> None:
    bench.write("a")
    found = bench.tick()
    if deleted:
        [run] = bench.pretend(found, FAILURE)
        bench.tick()
        bench.instance.delete_run(run.run_id)
    assert requested(bench.tick()) == [["a"]]


def test_partitions_of_a_canceled_run_are_left_alone_until_their_source_changes(bench: Workbench) -> None:
    for key in "ab":
        bench.write(key)
    [run] = bench.pretend(bench.tick(), STARTED)
    bench.instance.report_run_canceled(run)
    quiet = bench.later(days=2)
    assert requested(quiet) == [] and "2 left alone because their run was canceled" in (quiet.skip_message or "")
    assert requested(bench.later(days=2)) == [], "the cursor keeps it"
    bench.write("a", 4, version="v2")
    bench.tick()
    assert requested(bench.tick()) == [["a"]], "b has not changed"


def test_partitions_of_a_canceled_run_that_the_sensor_did_not_request_are_requested(bench: Workbench) -> None:
    bench.write("a")
    run = bench.pretend_run("catalog_refresh", STARTED)
    assert requested(bench.tick()) == []
    bench.instance.report_run_canceled(run)
    assert requested(bench.tick()) == [["a"]]


def test_a_partition_that_changes_after_each_failure_waits_as_long(bench: Workbench) -> None:
    asked: list[int] = []
    for number in range(15):
        bench.write("moving", version=f"v{number}")
        found = bench.later(seconds=31)
        if found.run_requests:
            bench.pretend(found, FAILURE)
            asked.append(number)
            bench.tick()  # sees the run ended
    assert asked == [0, 2, 6, 14], "after more than 1, 2 and 4 minutes"
    assert len(json.loads(bench.cursor or "")["requests"]) == 1


def test_change_after_a_success_is_requested_immediately(bench: Workbench) -> None:
    bench.settings["refresh_stale"] = True
    bench.write("a")
    found = bench.tick()
    for version in ("v2", "v4"):
        assert requested(found) == [["a"]]
        bench.write("a", version=version)  # while the run waits for its turn
        [ran] = bench.launch(found)
        assert set(ran.materialized()) == {"a"}
        bench.write("a", version=f"after {version}")
        found = bench.tick()
    [request] = json.loads(bench.cursor or "")["requests"]
    assert requested(found) == [["a"]] and request["attempt"] == 1


def test_completed_requests_leave_the_cursor(bench: Workbench) -> None:
    bench.write("a")
    bench.launch(bench.tick())
    bench.tick()
    assert json.loads(bench.cursor or "")["requests"] == []


@pytest.mark.parametrize(("setting", "other"), [("model", "hash://24"), ("text_column", "id"), ("max_text_bytes", 100)])
def test_waiting_partition_is_requested_immediately_with_other_settings(
    bench: Workbench, setting: str, other: str | int
) -> None:
    bench.write("a")
    bench.pretend(bench.tick(), FAILURE)
    assert requested(bench.tick()) == []
    bench.settings[setting] = other
    found = bench.tick()
    assert requested(found) == [["a"]]
    bench.pretend(found, FAILURE)
    assert requested(bench.tick()) == []


def test_new_partitions_are_requested_before_failing_ones(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surge_dagster.automation.new_partitions._KEYS_PER_RUN", 2)
    for key in "ab":
        bench.write(key)
    found = bench.tick()
    assert requested(found) == [["a", "b"]]
    bench.pretend(found, FAILURE)
    bench.tick()
    for key in "cd":
        bench.write(key)
    found = bench.later(hours=1)
    assert requested(found) == [["c", "d"]]
    bench.pretend(found, STARTED)
    assert requested(bench.tick()) == [["a", "b"]]


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "[]",
        "1",
        "edited by hand",
        '{"version": 3}',
        '{"version": 4}',
        '{"version": 4, "settings": "s", "requests": [1]}',
    ],
)
def test_unreadable_cursor_counts_as_none(cursor: str) -> None:
    assert SensorCursor.read(cursor, "s") == SensorCursor("s")


moments = st.datetimes(timezones=st.just(UTC)).map(lambda moment: moment.isoformat(timespec="seconds"))
requests = st.builds(Request, st.text(max_size=3), st.integers(1, 50), st.integers(-1), st.none() | moments)


@given(st.lists(requests, max_size=3))
def test_a_cursor_reads_back_as_it_was_written(requests: list[Request]) -> None:
    cursor = SensorCursor("s", tuple(requests))
    assert SensorCursor.read(cursor.write(), "s") == cursor
    assert SensorCursor.read(cursor.write(), "other settings").requests == ()
