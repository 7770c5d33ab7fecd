"""Partitions that a requested run left undone are requested again, after waits that grow."""

from __future__ import annotations

from datetime import timedelta

import dagster as dg
import pytest

from surge_dagster.orchestration.runs import due_after
from tests.dagster.conftest import Workbench, requested

QUEUED, STARTED = dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.STARTED
FAILURE, CANCELED = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED


def test_waits_double_up_to_a_day() -> None:
    minutes = [due_after(attempt, 0.0).timestamp() / 60 for attempt in (1, 2, 3, 4, 11, 12, 1000)]
    assert minutes == [1, 2, 4, 8, 1024, 1440, 1440]


def test_partition_whose_run_failed_is_requested_again_after_a_minute(bench: Workbench) -> None:
    bench.write("a")
    bench.pretend(bench.tick(), FAILURE)

    waiting = bench.tick()

    assert requested(waiting) == []

    waits = "1 waiting after a failure until 2"
    assert waits in waiting.skip_message
    assert requested(bench.later(seconds=30)) == []

    found = bench.later(seconds=31)
    assert requested(found) == [["a"]]
    assert found.run_requests[0].tags["surge/attempt"] == "2"


def test_other_partitions_do_not_wait_with_one_that_failed(bench: Workbench) -> None:
    bench.write("a")

    bench.pretend(bench.tick(), FAILURE)

    assert requested(bench.tick()) == []

    bench.write("b")
    assert requested(bench.tick()) == [["b"]]


def test_wait_begins_when_the_run_has_ended(bench: Workbench) -> None:
    bench.write("a")

    [run] = bench.pretend(bench.tick(), STARTED)

    assert requested(bench.later(hours=3)) == []

    bench.ahead = timedelta()

    bench.instance.report_run_failed(run)

    assert requested(bench.tick()) == []
    assert requested(bench.later(seconds=30)) == []
    assert requested(bench.later(seconds=31)) == [["a"]]


def test_run_that_dagster_launches_again_counts_as_the_same_attempt(bench: Workbench) -> None:
    bench.write("a")
    found = bench.tick()

    bench.pretend(found, FAILURE)

    assert requested(bench.tick()) == []

    [again] = bench.pretend(found, STARTED)
    assert requested(bench.later(hours=1)) == []

    bench.ahead = timedelta()
    bench.instance.report_run_failed(again)

    waiting = bench.tick()

    assert requested(waiting) == []
    [request] = bench.later(minutes=1).run_requests
    assert request.tags["surge/attempt"] == "2"


@pytest.mark.parametrize("deleted", [False, True])
def test_run_that_is_not_on_record_keeps_no_partition_waiting(
    bench: Workbench, deleted: bool
) -> None:
    bench.write("a")
    found = bench.tick()
    if deleted:
        [run] = bench.pretend(found, FAILURE)
        bench.tick()
        bench.instance.delete_run(run.run_id)

    assert requested(bench.tick()) == [["a"]]


def test_partitions_of_a_canceled_run_wait_until_their_source_changes(bench: Workbench) -> None:
    bench.fill("ab")
    [run] = bench.pretend(bench.tick(), STARTED)
    bench.instance.report_run_canceled(run)

    quiet = bench.later(days=2)

    assert requested(quiet) == []
    assert "2 left alone after a canceled run" in quiet.skip_message
    assert requested(bench.later(days=2)) == [], "the canceled run is still on record"

    bench.write("a", 4, version="v2")

    bench.tick()

    assert requested(bench.tick()) == [["a"]], "b has not changed"


def test_partitions_of_a_terminated_run_of_an_operator_are_left_alone(
    bench: Workbench, terminated: None
) -> None:
    bench.settings |= {"b_min": 3, "b_max": 3}
    bench.fill("abcd")
    bench.tick()

    assert not bench.refresh().success

    assert requested(bench.later(days=2)) == []

    bench.write("new")
    bench.tick()
    assert requested(bench.tick()) == [["new"]]


@pytest.mark.parametrize(
    ("setting", "other"), [("model", "hash://24"), ("text", "id"), ("max_text_bytes", 100)]
)
def test_partition_does_not_wait_after_a_setting_changed(
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
