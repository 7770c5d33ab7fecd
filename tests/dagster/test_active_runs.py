"""Which runs are taken for lost, and which never are."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import dagster as dg
import pytest

from surge_dagster.orchestration import active_runs as active_runs_module
from surge_dagster.orchestration import heartbeats
from surge_dagster.orchestration.active_runs import (
    _MACHINE_TAG,
    _PROCESS_TAG,
    _process,
    active_runs,
    is_elsewhere,
    process_tags,
)
from surge_dagster.orchestration.heartbeats import _BEAT_TAG, signed
from tests.dagster.conftest import NAMES, Workbench
from tests.dagster.dev_server import eventually

ENDS = {"SUCCESS": dg.DagsterEventType.RUN_SUCCESS, "CANCELED": dg.DagsterEventType.RUN_CANCELED}


@contextmanager
def tags_of_another_process() -> Iterator[dict[str, str]]:
    """Tags of a run that a process of this machine executes, which lives until the end of the block."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            yield process_tags() | {_PROCESS_TAG: _process(process.pid)}
        finally:
            process.kill()


def test_a_process_that_nobody_has_asked_for_its_end_counts_as_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert _process(process.pid) == ""


@pytest.mark.parametrize("status", ENDS)
def test_a_run_that_ends_while_runs_are_looked_at_is_not_declared_lost(bench: Workbench, status: str) -> None:
    with tags_of_another_process() as tags:
        ends = bench.pretend_run(NAMES.refresh_job, dg.DagsterRunStatus.STARTED, tags=tags)
        newer = bench.pretend_run(NAMES.refresh_job, dg.DagsterRunStatus.STARTED, tags=process_tags())
        looked_at = active_runs(bench.instance, lambda run: True)
        assert next(looked_at).run_id == newer.run_id, "of all those on the list, the newest first"
        bench.instance.report_dagster_event(dg.DagsterEvent(ENDS[status].value, NAMES.refresh_job), ends.run_id)
    assert list(looked_at) == []
    [run] = bench.instance.get_runs(dg.RunsFilter([ends.run_id]))
    assert run.status.value == status


@dataclass(frozen=True, slots=True)
class Machine:
    """What a process sees of the machine or the container that it is in; all of them have one name."""

    id: str
    start: str
    namespace: int = active_runs_module._FIRST_NAMESPACE

    @contextmanager
    def here(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Be there, for the block."""
        lines = {"/etc/machine-id": self.id, "/proc/sys/kernel/random/boot_id": self.start}
        with monkeypatch.context() as patch:
            patch.setattr("socket.gethostname", lambda: "localhost")
            patch.setattr(active_runs_module, "_namespace", lambda: self.namespace)
            patch.setattr(active_runs_module, "_line", lines.__getitem__)
            yield


@pytest.mark.parametrize(
    ("where", "status"),
    [
        (Machine("a", "second"), "FAILURE"),
        (Machine("b", "of another"), "STARTED"),
        (Machine("", "of another"), "STARTED"),
        (Machine("a", "of another", namespace=4026532281), "STARTED"),
    ],
    ids=["it was started again", "it is another", "nobody can tell", "it is a container"],
)
def test_a_run_is_lost_with_its_machine_and_not_on_another_of_its_name(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, where: Machine, status: str
) -> None:
    first = replace(where, id=where.id and "a", start="first")
    with first.here(monkeypatch):
        run = bench.pretend_run(NAMES.refresh_job, dg.DagsterRunStatus.STARTED, tags=process_tags())
        assert [found.run_id for found in active_runs(bench.instance, lambda run: True)] == [run.run_id]
        assert not is_elsewhere(run)
    with where.here(monkeypatch):
        found = list(active_runs(bench.instance, lambda run: True))
        assert [is_elsewhere(run) for run in found] == ([True] if status == "STARTED" else [])
    [run] = bench.instance.get_runs()
    assert run.status.value == status


def test_a_run_that_did_not_sign_its_machine_is_lost_with_its_process(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signed_by_an_older_version(process: str) -> dg.DagsterRun:
        tags = process_tags() | {_PROCESS_TAG: process}
        del tags[_MACHINE_TAG]
        return bench.pretend_run(NAMES.refresh_job, dg.DagsterRunStatus.STARTED, tags=tags)

    with Machine("a", "first").here(monkeypatch):
        alive, gone = signed_by_an_older_version(_process(os.getpid())), signed_by_an_older_version("0@0/first")
        assert [run.run_id for run in active_runs(bench.instance, lambda run: True)] == [alive.run_id]
    assert Looking(bench).status(gone) == "FAILURE"
    with Machine("a", "second").here(monkeypatch):
        [alive] = active_runs(bench.instance, lambda run: True)
        assert is_elsewhere(alive), "its signs of life tell"


class Looking:
    """The sensor that looks for lost runs, tick after tick."""

    def __init__(self, bench: Workbench) -> None:
        self.bench, self.cursor = bench, None

    def look(self, times: int = 1) -> None:
        repository = self.bench.definitions.get_repository_def()
        for _ in range(times):
            with dg.build_sensor_context(self.bench.instance, self.cursor, repository_def=repository) as context:
                self.cursor = repository.get_sensor_def(NAMES.lost_runs_sensor).evaluate_tick(context).cursor

    def status(self, run: dg.DagsterRun) -> str:
        [found] = self.bench.instance.get_runs(dg.RunsFilter([run.run_id]))
        return found.status.value


@pytest.fixture
def gone(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dg.DagsterRun]:
    """Puts runs on record that a process in another container executes, or did until that was started again."""

    def pretend(sign: str = "7", status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED) -> dg.DagsterRun:
        run = bench.pretend_run(NAMES.refresh_job, status)
        with monkeypatch.context() as patch:
            patch.setattr(active_runs_module, "_host", lambda: "the container/1")
            bench.instance.add_run_tags(run.run_id, process_tags(run_id=run.run_id) | {_BEAT_TAG: sign})
        return run

    return pretend


def test_a_run_in_a_container_that_is_gone_is_lost_after_ten_looks(
    bench: Workbench, gone: Callable[..., dg.DagsterRun]
) -> None:
    looking, lost, canceled = Looking(bench), gone(), gone(status=dg.DagsterRunStatus.CANCELING)
    looking.look(10)
    assert (looking.status(lost), looking.status(canceled)) == ("STARTED", "CANCELING")
    looking.look()
    assert (looking.status(lost), looking.status(canceled)) == ("FAILURE", "CANCELED")
    looking.look()
    assert looking.cursor == "{}"


def test_a_run_elsewhere_that_may_live_is_never_lost(
    bench: Workbench, gone: Callable[..., dg.DagsterRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, slow, retired, retried = Looking(bench), gone("0"), gone(""), gone()
    bench.instance.add_run_tags(retried.run_id, process_tags(run_id="of the run before") | {_BEAT_TAG: "9"})
    for number in range(3):  # one sign in nine looks is enough
        bench.instance.add_run_tags(slow.run_id, {_BEAT_TAG: str(number)})
        looking.look(9)
    assert [looking.status(run) for run in (slow, retired, retried)] == ["STARTED"] * 3
    monkeypatch.setattr(dg.DagsterInstance, "run_launcher", object())  # it looks after its runs itself
    looking.look(20)
    assert looking.status(slow) == "STARTED"


def test_a_run_gives_signs_of_life_until_its_work_is_done(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "_BEAT_SECONDS", 0.01)
    signs: list[str] = []

    def seen(run_id: str) -> str:
        [run] = bench.instance.get_runs(dg.RunsFilter([run_id]))
        return run.tags[_BEAT_TAG]

    @dg.op
    def work(context) -> None:
        with signed(context):
            eventually("two more signs", lambda: int(seen(context.run_id)) > 2)
            signs.append(seen(context.run_id))

    @dg.job
    def job() -> None:
        work()

    result = job.execute_in_process(instance=bench.instance)
    assert int(signs[0]) > 2 and seen(result.run_id) == ""
    [run] = bench.instance.get_runs(dg.RunsFilter([result.run_id]))
    assert process_tags(run_id=run.run_id).items() <= run.tags.items()


@pytest.mark.parametrize(("job", "module"), [(NAMES.check_job, "catalog_check"), (NAMES.switch_job, "current_space")])
def test_a_run_that_reads_everything_is_signed_while_it_does(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, job: str, module: str
) -> None:
    bench.write("a")
    seen: list[bool] = []

    def known_space(*_: object, **__: object) -> None:
        [run] = bench.instance.get_runs()
        signs = process_tags(run_id=run.run_id) | {_BEAT_TAG: "0"}
        seen.append(run.status is dg.DagsterRunStatus.STARTED and signs.items() <= run.tags.items())

    monkeypatch.setattr(f"surge_dagster.assets.{module}.known_space", known_space)
    bench.run(job)
    assert seen == [True]
