"""Which runs are taken for lost, and which never are."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
import pytest

from surge_dagster.assets.active_runs import _process, active_runs, process_tags
from tests.dagster.conftest import NAMES, Workbench

ENDS = {"SUCCESS": dg.DagsterEventType.RUN_SUCCESS, "CANCELED": dg.DagsterEventType.RUN_CANCELED}


@contextmanager
def tags_of_another_process() -> Iterator[dict[str, str]]:
    """Tags of a run that a process of this machine executes, which lives until the end of the block."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        host, mark = process_tags()
        try:
            yield {host: process_tags()[host], mark: _process(process.pid)}
        finally:
            process.kill()


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
