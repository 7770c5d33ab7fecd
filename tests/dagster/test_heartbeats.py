"""Heartbeats: a run of a dead machine is declared failed, whatever its launcher says of it, and a living one is not."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from surge_dagster.engine.support.waiting import rest
from surge_dagster.orchestration import heartbeats
from surge_dagster.orchestration.active_runs import PROCESS_TAG
from surge_dagster.orchestration.heartbeats import HEARTBEAT_TAG, declare_silent_runs, executing
from surge_dagster.orchestration.launch import job_of
from surge_dagster.orchestration.names import LOST_RUNS
from tests.dagster.conftest import NAMES, Workbench, execute

STARTED, CANCELING, QUEUED = (dg.DagsterRunStatus[name] for name in ("STARTED", "CANCELING", "QUEUED"))


def beating(instance: dg.DagsterInstance, run: dg.DagsterRun, value: object, of: str = "") -> dg.DagsterRun:
    process = f"{run.run_id} gpu-7/0123456789abcdef/4026531836 12@34"
    instance.add_run_tags(run.run_id, {PROCESS_TAG: process, HEARTBEAT_TAG: f"{of or run.run_id} {value}"})
    [found] = instance.get_runs(dg.RunsFilter([run.run_id]))
    return found


def statuses(instance: dg.DagsterInstance, runs: list[dg.DagsterRun]) -> list[str]:
    found = {run.run_id: run.status.value for run in instance.get_runs()}
    return [found[run.run_id] for run in runs]


def test_run_renews_its_heartbeat_while_it_works_though_the_database_is_away_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeats, "_BEAT_SECONDS", 0.01)
    store, refused, back = dg.DagsterInstance.add_run_tags, threading.Event(), threading.Event()

    def add_run_tags(instance: dg.DagsterInstance, run_id: str, tags: Any) -> None:
        if tags[HEARTBEAT_TAG].endswith(" 1") or (refused.is_set() and not back.is_set()):
            refused.set()
            raise OSError("no connection")
        store(instance, run_id, tags)

    monkeypatch.setattr(dg.DagsterInstance, "add_run_tags", add_run_tags)
    seen: list[str] = []

    @dg.op
    def work(context) -> None:
        def heartbeat() -> str:
            [run] = context.instance.get_runs()
            assert run.tags[PROCESS_TAG].startswith(run.run_id)
            return run.tags[HEARTBEAT_TAG].removeprefix(f"{run.run_id} ")

        with executing(context):
            assert refused.wait(60)
            seen.append(heartbeat())
            back.set()
            rest(60, lambda: int(heartbeat()) >= 3)
            seen.append(heartbeat())
        seen.append(heartbeat())

    with dg.DagsterInstance.ephemeral() as instance:
        assert execute(instance, job_of("work", work, "")).success
    assert seen[0] == "0" and int(seen[1]) >= 3 and int(seen[2]) >= 3


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with another step"])
def test_run_whose_machine_dies_after_its_work_is_declared_failed_unless_other_steps_may_go_on(others: bool) -> None:
    @dg.op
    def work(context) -> None:
        with executing(context):
            pass
        [run] = context.instance.get_runs()  # as it is when the machine dies here
        cursor = None
        for now in range(0, 301, 100):
            cursor = declare_silent_runs(context.instance, [run], cursor, now)
        [run] = context.instance.get_runs()
        assert run.status.value == ("STARTED" if others else "FAILURE")

    other = dg.op(name="other")(lambda: None)
    job = dg.GraphDefinition(name="work", node_defs=[work, other] if others else [work]).to_job()
    with dg.DagsterInstance.ephemeral() as instance:
        assert execute(instance, job).success


def test_run_whose_heartbeat_stands_still_for_five_minutes_is_declared_failed(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Such a launcher may call the run of a dead host alive.
    trusting = SimpleNamespace(supports_check_run_worker_health=True)
    monkeypatch.setattr(dg.DagsterInstance, "run_launcher", trusting)
    runs = [
        bench.pretend_run(NAMES.refresh_job, status)
        for status in (STARTED, CANCELING, STARTED, STARTED, STARTED, STARTED, QUEUED)
    ]
    dead, canceling, alive, ended, retry, _, queued = runs
    for run, beat in ((dead, 3), (canceling, 3), (alive, 0), (ended, "ended"), (queued, 0)):
        beating(bench.instance, run, beat)
    beating(bench.instance, retry, 3, of="the-run-before")  # Dagster copies tags
    before, cursor = statuses(bench.instance, runs), None
    for minute in range(6):
        assert statuses(bench.instance, runs) == before
        beating(bench.instance, alive, minute)
        found = bench.tick(LOST_RUNS, cursor)
        cursor = found.cursor
        bench.ahead += timedelta(minutes=1)
    assert statuses(bench.instance, runs) == ["FAILURE", "CANCELED", *before[2:]]
    [failed] = bench.instance.all_logs(dead.run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
    assert failed.dagster_event
    assert "on the host gpu-7, has shown no sign of life for five minutes" in (failed.dagster_event.message or "")


@pytest.mark.parametrize(
    ("jump", "left"), [(timedelta(hours=1), 1), (-timedelta(hours=1), 2)], ids=["paused or set", "set back"]
)
def test_pause_of_the_sensor_counts_as_a_minute_and_a_clock_that_was_set_back_as_none(
    bench: Workbench, jump: timedelta, left: int
) -> None:
    """The machine may have slept or the database have been away: then no run could renew its heartbeat either."""
    run = bench.pretend_run(NAMES.refresh_job, STARTED)
    beating(bench.instance, run, 3)
    cursor = None
    for minutes in (0, 1.5, 1.5):
        bench.ahead += timedelta(minutes=minutes)
        cursor = bench.tick(LOST_RUNS, cursor).cursor
    for pause in (jump, *[timedelta(minutes=1)] * left):
        assert statuses(bench.instance, [run]) == ["STARTED"]
        bench.ahead += pause
        cursor = bench.tick(LOST_RUNS, cursor).cursor
    assert statuses(bench.instance, [run]) == ["FAILURE"]


def test_run_of_a_dead_machine_is_found_though_the_sensor_is_always_late() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        job = job_of("job", dg.op(name="nothing")(lambda: None), "")
        dead, alive = (instance.create_run_for_job(job, status=STARTED) for _ in range(2))
        cursor = None
        for tick in range(6):
            assert statuses(instance, [dead, alive]) == ["STARTED", "STARTED"]
            runs = [beating(instance, dead, 3), beating(instance, alive, tick)]
            cursor = declare_silent_runs(instance, runs, cursor, 180 * tick)
        assert statuses(instance, [dead, alive]) == ["FAILURE", "STARTED"]


@pytest.mark.parametrize("renewed", [True, False])
def test_heartbeat_that_is_renewed_while_runs_are_listed_counts(renewed: bool) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        run = instance.create_run_for_job(job_of("job", dg.op(name="nothing")(lambda: None), ""), status=STARTED)
        listed = beating(instance, run, 3)
        cursor = declare_silent_runs(instance, [listed], None, 0.0)
        for now in (100.0, 200.0):
            cursor = declare_silent_runs(instance, [listed], cursor, now)
        if renewed:
            beating(instance, run, 4)
        declare_silent_runs(instance, [listed], cursor, 300.0)
        assert statuses(instance, [run]) == ["STARTED" if renewed else "FAILURE"]
