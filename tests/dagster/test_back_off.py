"""What was asked for and is still to be done: asked for again, after waits that grow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.orchestration.sensor_cursor import Gone, Request, SensorCursor, digest
from tests.dagster.conftest import Workbench, requested

MOMENT = datetime(2026, 1, 31, 12, tzinfo=UTC)
_OF_BEFORE = '{"version": 2, "requests": [], "gone": [{"since": "2026-01-31T11:00:00+00:00", "looks": 3, "keys": "a"}]}'


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


@pytest.mark.parametrize("versions", [range(15), [0, 1] * 8], ids=["moves", "flaps"])
def test_what_changes_after_each_failure_waits_as_long_and_the_tick_says_so(
    bench: Workbench, versions: Sequence[int]
) -> None:
    bench.write("still")
    asked: list[int] = []
    for number, version in enumerate(versions[:15]):
        bench.write("moving", version=f"v{version}")
        found = bench.later(seconds=31)
        if found.run_requests:
            assert requested(found) == [["moving", "still"]]
            bench.pretend_run("embed_partitions", dg.DagsterRunStatus.FAILURE, tags=found.run_requests[0].tags)
            asked.append(number)
        else:
            assert f"2 asked for and not done (attempt {len(asked)})" in (found.skip_message or "")
    assert asked == [0, 2, 6, 14], "after more than 1, 2 and 4 minutes"
    assert len(json.loads(bench.cursor or "")["requests"]) == 1


def test_what_is_mended_is_tried_within_the_hour(bench: Workbench) -> None:
    for key in "ab":
        bench.write(key)
    assert all(requested(bench.later(days=1)) for _ in range(8))
    bench.write("a", version="v2")
    waiting = bench.later(minutes=59)
    assert requested(waiting) == [] and "2 asked for and not done (attempt 8)" in (waiting.skip_message or "")
    assert requested(bench.later(minutes=1)) == [["a"]], "what is as it was waits for two hours"
    assert requested(bench.later(minutes=68)) == [["b"]]
    assert requested(bench.later(minutes=188)) == [["a"]], "and then as any other"


def test_a_change_after_a_success_is_asked_for_at_once(bench: Workbench) -> None:
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


def test_a_change_while_the_run_goes_on_that_fails_waits_from_its_end(bench: Workbench) -> None:
    bench.write("a")
    [request] = bench.tick().run_requests or []
    run = bench.pretend_run(
        "embed_partitions", dg.DagsterRunStatus.STARTED, tags=request.tags, run_config=request.run_config
    )
    bench.write("a", version="v2")
    held = bench.later(hours=3)
    assert requested(held) == [] and "asked for and not done" not in (held.skip_message or "")
    bench.instance.report_run_failed(run)
    assert requested(bench.later(seconds=59)) == []
    assert requested(bench.later(seconds=1)) == [["a"]]


@pytest.mark.parametrize(("setting", "other"), [("model", "hash://24"), ("text_column", "id"), ("max_text_bytes", 100)])
def test_what_is_to_be_made_by_other_settings_is_asked_for_at_once(
    bench: Workbench, setting: str, other: str | int
) -> None:
    bench.write("a")
    assert requested(bench.tick()) == [["a"]] and requested(bench.tick()) == []
    bench.settings[setting] = other
    assert requested(bench.tick()) == [["a"]] and requested(bench.tick()) == []


def test_what_was_never_tried_comes_before_what_fails_again_and_again(bench: Workbench) -> None:
    bench.settings["max_partitions_per_run"] = 2
    for key in "ab":
        bench.write(key)
    assert requested(bench.tick()) == [["a", "b"]]
    for key in "cd":
        bench.write(key)
    assert requested(bench.later(hours=1)) == [["c", "d"]]
    assert requested(bench.tick()) == [["a", "b"]]


@pytest.mark.parametrize("cursor", ["", "[]", "1", '{"version": 3}', _OF_BEFORE, '{"asked": "12345678"}'])
def test_what_is_not_a_cursor_counts_as_none(cursor: str) -> None:
    assert SensorCursor.read(cursor) == SensorCursor()


moments = st.datetimes(timezones=st.just(UTC)).map(lambda moment: moment.replace(microsecond=0))
digests = st.sets(st.text(max_size=5).map(digest), min_size=1)


requests = st.builds(
    Request, st.text(max_size=3), st.integers(1, 50), moments, digests, st.booleans(), st.booleans(), st.integers(-1)
)


@given(
    st.lists(requests, max_size=3),
    st.dictionaries(st.text(max_size=5).map(digest), st.builds(Gone, moments, st.integers(1, 3))),
    st.none() | moments,
)
def test_a_cursor_reads_back_as_it_was_written(
    requests: list[Request], gone: dict[str, Gone], looked: datetime | None
) -> None:
    cursor = SensorCursor(requests, gone, looked, digest("a spec"))
    assert SensorCursor.read(cursor.write()) == cursor
