"""Tests of active runs: which are declared lost, and the tag with their process."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import dagster as dg
import pytest

from surge_dagster.orchestration import active_runs as active_runs_module
from surge_dagster.orchestration.active_runs import PROCESS_TAG, _place, _process, active_runs, process_tag
from surge_dagster.orchestration.heartbeats import HEARTBEAT_TAG
from surge_dagster.orchestration.names import LOST_RUNS
from tests.dagster.conftest import NAMES, Workbench, requested

ENDS = {"SUCCESS": dg.DagsterEventType.RUN_SUCCESS, "CANCELED": dg.DagsterEventType.RUN_CANCELED}


def test_process_that_ended_and_was_not_waited_for_counts_as_ended() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert _process(process.pid) == ""


@pytest.mark.parametrize("end", ENDS)
def test_run_that_ends_while_runs_are_listed_is_not_declared_lost(bench: Workbench, end: str) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        ends = started(bench, _process(process.pid))
        newer = started(bench, _process(os.getpid()))
        listed = active_runs(bench.instance, lambda run: True)
        assert next(listed).run_id == newer.run_id, "the newest one first"
        bench.instance.report_dagster_event(dg.DagsterEvent(ENDS[end].value, NAMES.refresh_job), ends.run_id)
        process.kill()
    assert list(listed) == []
    assert status(bench, ends) == end


def status(bench: Workbench, run: dg.DagsterRun) -> str:
    [found] = bench.instance.get_runs(dg.RunsFilter([run.run_id]))
    return found.status.value


def started(bench: Workbench, process: str, status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED) -> dg.DagsterRun:
    """A run that a process of this machine executes, or executed."""
    run = bench.pretend_run(NAMES.refresh_job, status)
    bench.instance.add_run_tags(run.run_id, {PROCESS_TAG: f"{run.run_id} {_place()} {process}"})
    return run


def test_run_whose_process_has_ended_holds_nothing_and_is_declared_failed(bench: Workbench) -> None:
    bench.write("a")
    with subprocess.Popen(["sleep", "1000"]) as process:
        gone = [
            started(bench, _process(process.pid)),
            started(bench, _process(process.pid), dg.DagsterRunStatus.CANCELING),
        ]
        process.kill()
    alive = started(bench, _process(os.getpid()))
    sensor = bench.definitions.get_repository_def().get_sensor_def(LOST_RUNS)
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
    assert "1 active run" in (bench.tick(LOST_RUNS).skip_message or "")
    assert [status(bench, run) for run in (*gone, alive)] == ["FAILURE", "CANCELED", "STARTED"]
    assert requested(bench.tick()) == [], "the living one may touch everything"
    bench.instance.report_run_failed(alive)
    assert requested(bench.tick()) == [["a"]]


def test_process_with_a_reused_id_is_not_taken_for_the_earlier_one(bench: Workbench) -> None:
    before = started(bench, f"{os.getpid()}@1")
    bench.tick(LOST_RUNS)
    assert status(bench, before) == "FAILURE"


def test_run_whose_living_process_the_system_hides_is_not_declared_lost(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `hidepid`, /proc has no folder for a process of another user; the kernel still refuses to signal it."""
    hidden = started(bench, "4194304@1")  # above the highest id that Linux gives

    def refuse(pid: int, number: int) -> None:
        assert (pid, number) == (4_194_304, 0)
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", refuse)
        bench.tick(LOST_RUNS)
        assert status(bench, hidden) == "STARTED"
    bench.tick(LOST_RUNS)
    assert status(bench, hidden) == "FAILURE"


def test_run_of_another_machine_is_not_declared_lost(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    retry, other, untagged = (bench.pretend_run(NAMES.refresh_job, dg.DagsterRunStatus.STARTED) for _ in range(3))
    bench.instance.add_run_tags(retry.run_id, {PROCESS_TAG: f"the-run-before {_place()} 0@0"})  # Dagster copies tags
    bench.instance.add_run_tags(other.run_id, {PROCESS_TAG: f"{other.run_id} another-{_place()} 0@0"})
    bench.tick(LOST_RUNS)
    assert [status(bench, run) for run in (retry, other, untagged)] == ["STARTED"] * 3
    container = started(bench, "0@0")
    launcher = SimpleNamespace(supports_check_run_worker_health=True)  # Dagster's run monitoring asks it
    with monkeypatch.context() as patch:
        patch.setattr(dg.DagsterInstance, "run_launcher", launcher)
        bench.tick(LOST_RUNS)
        assert status(bench, container) == "STARTED"
    bench.tick(LOST_RUNS)
    assert status(bench, container) == "FAILURE"


@pytest.mark.parametrize("namespace", [active_runs_module._FIRST_NAMESPACE, 4026532200])
def test_run_of_another_machine_with_the_same_host_name_is_not_declared_lost(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, namespace: int
) -> None:
    read = active_runs_module._line
    other = read("/proc/sys/kernel/random/boot_id")[::-1]
    with monkeypatch.context() as patch:
        patch.setattr(active_runs_module, "_line", lambda path: other)
        patch.setattr(active_runs_module, "_namespace", lambda: namespace)
        elsewhere = started(bench, "0@0")
    bench.tick(LOST_RUNS)
    assert status(bench, elsewhere) == "STARTED"


@pytest.mark.parametrize(("job", "module"), [(NAMES.check_job, "catalog_check"), (NAMES.switch_job, "current_space")])
def test_run_of_a_check_or_switch_is_tagged_with_its_process(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, job: str, module: str
) -> None:
    bench.write("a")
    seen: list[bool] = []

    def existing_space(*_: object) -> None:
        [run] = bench.instance.get_runs()
        assert run.tags[HEARTBEAT_TAG] == f"{run.run_id} 0"
        seen.append(run.tags.get(PROCESS_TAG) == process_tag(run.run_id, os.getpid()))

    monkeypatch.setattr(f"surge_dagster.assets.{module}.existing_space", existing_space)
    bench.run(job)
    assert seen == [True]


def test_an_embedding_run_is_tagged_with_its_process(bench: Workbench) -> None:
    bench.write("a")
    ran = bench.refresh()
    [run] = bench.instance.get_runs()
    assert ran.success and run.tags[PROCESS_TAG] == process_tag(run.run_id, os.getpid())
    assert run.tags[HEARTBEAT_TAG] == f"{run.run_id} 0"
