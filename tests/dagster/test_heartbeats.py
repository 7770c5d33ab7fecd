"""Heartbeats: a run of a dead machine is declared failed, whatever its launcher says of it, and a
living one is not."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from surge_dagster.assets import catalog_check
from surge_dagster.orchestration.heartbeats import (
    HEARTBEAT_TAG,
    HeartbeatTimes,
    declare_silent_runs,
    executing,
)
from surge_dagster.orchestration.launch import job_of
from tests.dagster.conftest import NAMES, Workbench, execute, run_op, tick_for_a_minute
from tests.waiting import until

STARTED = dg.DagsterRunStatus.STARTED
CANCELING = dg.DagsterRunStatus.CANCELING
QUEUED = dg.DagsterRunStatus.QUEUED


def beating(
    instance: dg.DagsterInstance, run: dg.DagsterRun, value: object, of: str = ""
) -> dg.DagsterRun:
    instance.add_run_tags(run.run_id, {HEARTBEAT_TAG: f"{of or run.run_id} gpu-7 {value}"})
    [found] = instance.get_runs(dg.RunsFilter([run.run_id]))
    return found


def look(
    instance: dg.DagsterInstance, run: dg.DagsterRun, *ticks: int, cursor: str | None = None
) -> str | None:
    """Look at these seconds whether a run that was listed before is silent; return the cursor."""
    times = HeartbeatTimes(lost_seconds=60, longest_gap_seconds=30)
    for now in ticks:
        cursor = declare_silent_runs(instance, [run], cursor, now, times)
    return cursor


def statuses(instance: dg.DagsterInstance, runs: list[dg.DagsterRun]) -> list[str]:
    found = {run.run_id: run.status.value for run in instance.get_runs()}
    return [found[run.run_id] for run in runs]


def test_run_renews_its_heartbeat_though_the_database_was_away(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dg.DagsterInstance.add_run_tags
    refused = threading.Event()

    def refuse_once(instance: dg.DagsterInstance, run_id: str, tags: Any) -> None:
        if tags[HEARTBEAT_TAG].endswith(" 1") and not refused.is_set():
            refused.set()
            raise OSError("no connection")
        store(instance, run_id, tags)

    monkeypatch.setattr(dg.DagsterInstance, "add_run_tags", refuse_once)
    values: list[int] = []

    @dg.op
    def work(context) -> None:
        def heartbeat() -> int:
            [run] = context.instance.get_runs()
            return int(run.tags[HEARTBEAT_TAG].split()[-1])

        with executing(context, HeartbeatTimes(beat_seconds=0.01)):
            assert refused.wait(60)
            until(lambda: heartbeat() >= 3)
        values.append(heartbeat())

    assert run_op(bench, work).success
    assert values[0] >= 3


def test_run_whose_machine_dies_after_its_work_is_declared_failed() -> None:
    @dg.op
    def work(context) -> None:
        with executing(context):
            pass
        [run] = context.instance.get_runs()  # as it is when the machine dies here
        look(context.instance, run, *range(0, 61, 15))
        [run] = context.instance.get_runs()
        assert run.status is dg.DagsterRunStatus.FAILURE

    with dg.DagsterInstance.ephemeral() as instance:
        assert execute(instance, job_of("work", work, "")).success


def test_run_whose_heartbeat_stands_still_for_a_minute_is_declared_failed(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Such a launcher may call the run of a dead host alive.
    trusting = SimpleNamespace(supports_check_run_worker_health=True)
    monkeypatch.setattr(dg.DagsterInstance, "run_launcher", trusting)
    dead = bench.pretend_run(NAMES.refresh_job, STARTED)
    ended = bench.pretend_run(NAMES.refresh_job, STARTED)
    queued = bench.pretend_run(NAMES.refresh_job, QUEUED)
    for run, beat in ((dead, 3), (ended, "ended"), (queued, 0)):
        beating(bench.instance, run, beat)

    tick_for_a_minute(bench)

    assert statuses(bench.instance, [dead, ended, queued]) == ["FAILURE", "STARTED", "QUEUED"]

    [failed] = bench.instance.all_logs(dead.run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
    assert failed.dagster_event

    message = failed.dagster_event.message or ""
    assert "on the host gpu-7, has shown no sign of life for 60 seconds" in message


def test_heartbeat_that_dagster_copied_to_a_retry_does_not_count(bench: Workbench) -> None:
    retry = bench.pretend_run(NAMES.refresh_job, STARTED)
    beating(bench.instance, retry, 3, of="the-run-before")

    tick_for_a_minute(bench)

    assert statuses(bench.instance, [retry]) == ["STARTED"]


def test_silent_run_that_is_being_canceled_ends_as_canceled(bench: Workbench) -> None:
    run = bench.pretend_run(NAMES.refresh_job, CANCELING)
    beating(bench.instance, run, 3)

    tick_for_a_minute(bench)

    assert statuses(bench.instance, [run]) == ["CANCELED"]


def test_sensor_that_finds_lost_runs_is_on_from_the_start(bench: Workbench) -> None:
    sensor = bench.definitions.get_repository_def().get_sensor_def(NAMES.lost_runs)
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """An instance in memory."""
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def begun(instance: dg.DagsterInstance) -> dg.DagsterRun:
    """A run with a heartbeat that stands still."""
    job = job_of("job", dg.op(name="nothing")(lambda: None), "")
    return beating(instance, instance.create_run_for_job(job, status=STARTED), 3)


@pytest.mark.parametrize(
    ("ticks", "expected"),
    [
        ([0, 30, 59], "STARTED"),
        ([0, 30, 60], "FAILURE"),
        ([0, 3_600], "STARTED"),
        ([0, 3_600, 7_200], "FAILURE"),
        ([3_600, 0, 30], "STARTED"),
        ([3_600, 0, 30, 60], "FAILURE"),
    ],
    ids=["soon", "in time", "after a pause", "always late", "clock set back", "set back, and then"],
)
def test_time_between_two_ticks_counts_as_half_a_minute_at_most(
    instance: dg.DagsterInstance, ticks: list[int], expected: str
) -> None:
    """The machine may have slept or the database have been away: then no run could renew its
    heartbeat either."""
    run = begun(instance)

    look(instance, run, *ticks)

    assert statuses(instance, [run]) == [expected]


def test_heartbeat_that_is_renewed_while_runs_are_listed_counts(
    instance: dg.DagsterInstance,
) -> None:
    listed = begun(instance)
    cursor = look(instance, listed, 0, 30)
    beating(instance, listed, 4)

    look(instance, listed, 60, cursor=cursor)

    assert statuses(instance, [listed]) == ["STARTED"]


@pytest.mark.parametrize(
    ("event", "end"),
    [(dg.DagsterEventType.RUN_SUCCESS, "SUCCESS"), (dg.DagsterEventType.RUN_CANCELED, "CANCELED")],
)
def test_run_that_ends_while_runs_are_listed_is_not_declared_lost(
    instance: dg.DagsterInstance, event: dg.DagsterEventType, end: str
) -> None:
    listed = begun(instance)
    cursor = look(instance, listed, 0, 30)
    instance.report_dagster_event(dg.DagsterEvent(event.value, "job"), listed.run_id)

    look(instance, listed, 60, cursor=cursor)

    assert statuses(instance, [listed]) == [end]


def test_run_of_a_check_has_a_heartbeat(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write("a")
    seen: list[str] = []

    def existing_space(*_: object) -> None:
        [run] = bench.instance.get_runs()
        seen.append(run.tags[HEARTBEAT_TAG])

    monkeypatch.setattr(catalog_check, "existing_space", existing_space)

    ran = bench.run(NAMES.check_job)

    assert seen == [f"{ran.run_id} {socket.gethostname()} 0"]


ENGINE = logging.getLogger("surge_dagster.engine.encoder.dispatcher")


@dg.op
def work(context) -> None:
    with executing(context):
        ENGINE.info("worker %d started", 7)
        ENGINE.warning("worker %d died", 7)
    ENGINE.warning("worker %d died later", 7)


def test_warning_of_the_engine_is_in_the_log_of_the_run(bench: Workbench) -> None:
    lines = run_op(bench, work).logged()
    assert "worker 7 died" in lines
    assert "worker 7 started" not in lines
    assert "worker 7 died later" not in lines
