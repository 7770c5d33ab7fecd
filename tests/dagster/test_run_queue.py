"""Tests of retried runs, on an instance whose settings launch every failed run again."""

from __future__ import annotations

import dagster as dg
import pytest

from surge_dagster.orchestration.launch import RUN_TAGS
from tests.dagster.conftest import NAMES, Workbench


@pytest.fixture
def eager(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Workbench:
    """A workbench whose instance has Dagster's default, which is to launch again whatever has
    failed."""
    monkeypatch.setattr(dg.DagsterInstance, "run_retries_retry_on_asset_or_op_failure", True)
    assert bench.instance.run_retries_enabled
    return bench


def test_run_is_launched_again_if_its_process_died(eager: Workbench) -> None:
    eager.write("a", [("x", None)])

    ran = eager.refresh()

    assert not ran.success

    [failed] = eager.instance.get_runs(dg.RunsFilter([ran.run_id]))
    assert failed.tags["dagster/will_retry"] == "false"

    lost = eager.pretend_run(NAMES.refresh_job, dg.DagsterRunStatus.STARTED, tags=RUN_TAGS)
    eager.instance.report_run_failed(lost, "its process is gone")

    [lost] = eager.instance.get_runs(dg.RunsFilter([lost.run_id]))

    assert lost.tags["dagster/will_retry"] == "true"


@pytest.mark.parametrize("job", sorted(NAMES.jobs))
def test_every_job_is_launched_again_twice_after_a_failure(bench: Workbench, job: str) -> None:
    bench.settings["pgvector"] = {"dsn": "postgresql://127.0.0.1/shop", "table": "products"}
    bench.settings["derived"] = [{"dtype": "int8"}]
    tags = bench.definitions.resolve_job_def(job).run_tags

    assert tags["dagster/retry_on_asset_or_op_failure"] == "true"
    assert tags["dagster/max_retries"] == "2"
