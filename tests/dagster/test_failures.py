"""Failed runs: what is retried and reported, and that other partitions are published."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
from sqlalchemy.exc import InterfaceError, OperationalError

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError, EncoderError, StoreUnavailable
from surge_dagster.engine.sources import FolderCatalog
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.orchestration import refresh
from surge_dagster.orchestration.launch import RUN_TAGS
from surge_dagster.orchestration.refresh import Refresh
from tests.dagster.conftest import NAMES, Ran, Workbench, requested, shown

NULL_TEXT = [("x", "fine"), ("y", None)]


@pytest.mark.parametrize("launched", ["catalog_refresh", "a range"])
def test_bad_partition_fails_the_run_and_stops_no_other(bench: Workbench, launched: str) -> None:
    bench.fill("abz")
    bench.write("bad", NULL_TEXT)
    bench.instance.add_dynamic_partitions("catalog", ["a", "b", "bad", "z"])

    ran = bench.refresh() if launched == "catalog_refresh" else bench.embed("a", "z")

    assert not ran.success
    assert not ran.will_retry
    assert set(ran.materialized()) == {"a", "b", "z"}
    assert shown(bench) == ({"a", "b", "z"}, {"bad"})


def test_failure_of_a_partition_is_reported_with_row_and_remedy(bench: Workbench) -> None:
    bench.write("bad", NULL_TEXT)

    ran = bench.refresh()

    assert "1 partition failed" in ran.failure()
    assert "partition 'bad', row 1" in ran.failure()
    assert ", 1 failed (bad), " in ran.summary()
    assert [failed["key"] for failed in ran.metrics()["partitions_failed"]] == ["bad"]

    [row] = str(ran.metrics()["failed"]).splitlines()[2:]
    assert row.startswith(
        "| `bad` | `partition 'bad', row 1: the text is null; every row needs one. Fill or drop"
    )


def test_last_attempt_on_the_page_is_the_run_that_fixed_the_partition(bench: Workbench) -> None:
    def tried(key: str) -> str | None:
        planned = bench.instance.get_latest_planned_materialization_info(NAMES.embeddings, key)
        return planned.run_id if planned else None

    bench.write("a", NULL_TEXT)
    bench.write("b")

    failed = bench.refresh()

    assert tried("a") == failed.run_id
    assert tried("b") is None

    bench.write("a", 2, version="v2")

    fixed = bench.refresh()

    assert fixed.success
    assert tried("a") == fixed.run_id
    assert shown(bench) == ({"a", "b"}, set())


@pytest.mark.parametrize("kind", [OperationalError, InterfaceError])
def test_run_whose_database_restarts_is_retried_and_keeps_its_files(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    report = refresh.report_readers_space
    failures = iter([kind("SELECT 1", {}, Exception("the server closed the connection"))])

    def fail_once(*given: Any) -> None:
        if (failed := next(failures, None)) is not None:
            raise failed
        report(*given)

    monkeypatch.setattr(refresh, "report_readers_space", fail_once)
    bench.settings |= {"b_min": 1, "b_max": 50}
    bench.fill("ab")

    ran = bench.refresh()

    again = bench.retry(ran)

    assert not ran.success
    assert again.success
    assert set(ran.materialized()) | set(again.materialized()) == set("ab")
    assert ran.metrics()["texts_encoded"] + again.metrics()["texts_encoded"] == 6, (
        "each text once in both runs"
    )


def test_run_over_a_source_that_changed_while_it_was_read_is_retried(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write("a")
    bench.write("moving", 5)
    listed = FolderCatalog.__iter__
    changes = iter([True])

    def replaced_after_the_first_listing(self: FolderCatalog) -> Iterator[Partition]:
        yield from list(listed(self))
        if next(changes, False):
            bench.write("moving", 6, version="v2")

    monkeypatch.setattr(FolderCatalog, "__iter__", replaced_after_the_first_listing)
    ran = bench.refresh()

    again = bench.retry(ran)

    assert not ran.success
    assert again.success
    assert again.metrics()["texts_encoded"] == 6
    assert again.materialized()["moving"].metadata["source_version"].value == "v2"


@pytest.mark.parametrize("launched", ["a job", "the asset"])
@pytest.mark.parametrize(
    ("error", "shown_as"),
    [
        (EncoderError("the pool failed"), "the pool failed"),
        (RuntimeError("odd"), "RuntimeError: odd"),
        (ConfigError("no such model"), "no such model"),
    ],
    ids=["encoder", "unexpected", "setting"],
)
def test_run_that_an_error_ends_fails_its_check_with_the_reason(
    bench: Workbench,
    monkeypatch: pytest.MonkeyPatch,
    launched: str,
    error: Exception,
    shown_as: str,
) -> None:
    ran = run_that_ends_with(bench, monkeypatch, error, launched)

    assert not ran.success
    assert ran.will_retry is isinstance(error, EncoderError)
    assert str(error) in ran.failure()

    [check] = ran.evaluations()
    assert not check.passed

    row = str(ran.metrics()["failed"]).splitlines()[-1]
    assert row == f"| `(the whole run)` | `{shown_as}` |"


def test_run_that_is_interrupted_evaluates_no_check(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run_that_ends_with(bench, monkeypatch, KeyboardInterrupt(), "the asset")

    assert not ran.success
    assert ran.checks() == {}


def run_that_ends_with(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, error: BaseException, launched: str
) -> Ran:
    def fail(_: EncoderPool) -> None:
        raise error

    bench.write("a")
    bench.instance.add_dynamic_partitions(NAMES.partitions_name, ["a"])
    monkeypatch.setattr(EncoderPool, "start", fail)
    return bench.refresh() if launched == "a job" else bench.embed("a", "a")


def test_refusals_are_reported_by_a_run_that_another_error_ends(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object) -> None:
        raise StoreUnavailable("the store is down")

    bench.write("bad", NULL_TEXT)
    bench.write("good")
    monkeypatch.setattr(Refresh, "_report_fresh", down)

    ran = bench.refresh()

    assert not ran.success
    assert ran.will_retry
    assert ran.failure().startswith("the store is down\n1 partition had failed by then:")

    whole, bad = str(ran.metrics()["failed"]).splitlines()[2:]
    assert whole == "| `(the whole run)` | `the store is down` |"
    assert bad.startswith("| `bad` | `partition 'bad', row 1")
    assert shown(bench) == ({"good"}, {"bad"})
    assert "1 refused" in bench.tick().skip_message


@pytest.mark.parametrize("setting", [{"text": "name"}, {"max_text_bytes": 4}])
def test_refused_partition_is_requested_once_the_setting_is_fixed(
    bench: Workbench, setting: dict[str, Any]
) -> None:
    bench.write("a")
    bench.tick()
    bench.settings |= setting

    assert not bench.refresh().success
    assert requested(bench.tick()) == []

    for name in setting:
        del bench.settings[name]

    assert requested(bench.tick()) == [["a"]]


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

    assert ran.run.tags["dagster/will_retry"] == "false"

    lost = eager.pretend_run(NAMES.refresh_job, dg.DagsterRunStatus.STARTED, tags=RUN_TAGS)
    eager.instance.report_run_failed(lost, "its process is gone")

    assert Ran(eager.instance, lost.run_id, False).will_retry


@pytest.mark.parametrize("job", sorted(NAMES.jobs))
def test_every_job_is_launched_again_twice_after_a_failure(bench: Workbench, job: str) -> None:
    bench.settings["pgvector"] = {"dsn": "postgresql://127.0.0.1/shop", "table": "products"}
    bench.settings["derived"] = [{"dtype": "int8"}]
    tags = bench.definitions.resolve_job_def(job).run_tags

    assert tags["dagster/retry_on_asset_or_op_failure"] == "true"
    assert tags["dagster/max_retries"] == "2"
