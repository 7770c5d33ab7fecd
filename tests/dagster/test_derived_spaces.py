"""Assets of derived spaces and the job that brings them up to date: one run for many partitions,
stale ones only."""

from __future__ import annotations

import dagster as dg
import pytest

from tests.dagster.conftest import NAMES, Ran, Workbench, options_of, range_tags, stale_status
from tests.spaces import KEYS, Spaces

INT8, SHORT = NAMES.derived("int8"), NAMES.derived("float32_8")
CHECK = "every_partition_is_derived"


def follow(bench: Workbench) -> list[Ran]:
    """Execute what the sensor requests until it requests nothing more; the jobs are those of
    derived spaces."""
    runs = list[Ran]()
    while requests := bench.tick(NAMES.hand_over_sensor).run_requests:
        [request] = requests
        assert request.job_name == NAMES.derive_job
        assert len(runs) < 3
        runs.append(bench.run(NAMES.derive_job, request.run_config, request.tags))
    return runs


def lag(ran: Ran, asset: dg.AssetKey) -> tuple[bool, str]:
    """Whether a run found that a derived space is complete, and how it says so."""
    [found] = [check for check in ran.evaluations() if check.asset_key == asset]
    assert found.check_name == CHECK
    assert found.severity == dg.AssetCheckSeverity.WARN
    return found.passed, str(found.description)


@pytest.fixture
def made(bench: Workbench, three_spaces: Spaces) -> Spaces:
    """An embedded catalog that Dagster has on record, and settings with two derived spaces."""
    made = three_spaces.copy_to(bench.root, ("hash://16",))
    bench.settings["derived"] = [{"dtype": "int8"}, {"dimension": 8}]
    assert bench.refresh().success
    return made


def test_job_derives_what_is_stale_and_reports_each_file(bench: Workbench, made: Spaces) -> None:
    ran = bench.run(NAMES.derive_job)

    assert ran.success
    assert list(ran.materialized(INT8)) == list(ran.materialized(SHORT)) == list(KEYS)

    space = str(ran.materialized(INT8)["a"].metadata["space"].value)
    assert space.startswith("hash-16-int8-16-")
    assert stale_status(bench, "a", INT8) == "FRESH"
    assert not bench.run(NAMES.derive_job).materialized(INT8)

    (made.root / "output" / space / "b.parquet").unlink()
    assert list(bench.run(NAMES.derive_job).materialized(INT8)) == ["b"]


def test_run_of_a_backfill_reports_fresh_partitions_too(bench: Workbench, made: Spaces) -> None:
    tags = range_tags("a", "b")

    assert list(bench.materialize({}, tags, INT8).materialized(INT8)) == ["a", "b"]
    assert not bench.materialize({}, tags, INT8).materialized(INT8)

    again = bench.materialize({}, tags | {"dagster/backfill": "one"}, INT8)
    assert again.success
    assert list(again.materialized(INT8)) == ["a", "b"]


def test_derived_spaces_follow_runs_with_a_refused_partition(bench: Workbench) -> None:
    bench.settings["derived"] = [{"dtype": "int8"}]
    bench.fill("ab", 3)
    bench.write("bad", [("x", None)])

    assert not bench.refresh().success

    [ran] = follow(bench)
    assert ran.success
    assert list(ran.materialized(INT8)) == ["a", "b"]
    assert lag(ran, INT8) == (True, "2 of 2 partitions up to date")

    bench.write("b", 3, version="v2")
    both = bench.materialize({}, range_tags("a", "bad"), NAMES.embeddings, INT8)
    assert not both.materialized(INT8), "the check of embeddings blocks"

    [ran] = follow(bench)
    assert list(ran.materialized(INT8)) == ["b"]
    assert follow(bench) == []


def test_catalog_check_says_how_far_derived_spaces_lag(bench: Workbench, made: Spaces) -> None:
    missing = (False, "0 of 3 partitions up to date, 3 missing")

    assert lag(bench.run(NAMES.check_job), INT8) == missing

    space = str(bench.run(NAMES.derive_job).materialized(INT8)["a"].metadata["space"].value)
    bench.write("a", 5, version="v2")

    assert bench.refresh().success

    made.file("hash://16", "b").write_bytes(b"nothing")
    (made.root / "output" / space / "c.parquet").unlink()

    found = lag(bench.run(NAMES.check_job), INT8)
    counts = "1 missing, 1 derived from earlier rows, 1 not judged, because a file cannot be read"

    assert found == (False, f"0 of 3 partitions up to date, {counts}")


def test_one_tick_requests_derived_spaces_and_tables(bench: Workbench, made: Spaces) -> None:
    bench.settings["lancedb"] = {"uri": str(bench.root / "lance")}

    requests = bench.tick(NAMES.hand_over_sensor).run_requests

    assert [each.job_name for each in requests] == [NAMES.derive_job, NAMES.hand_over_job]


def test_derived_space_that_is_added_is_requested(bench: Workbench, made: Spaces) -> None:
    follow(bench)
    bench.settings["derived"].append({"dimension": 4})

    [ran] = follow(bench)

    assert ran.success


def test_derived_spaces_that_fail_keep_back_no_table(bench: Workbench, made: Spaces) -> None:
    bench.settings["lancedb"] = {"uri": str(bench.root / "lance")}
    derive, _ = bench.tick(NAMES.hand_over_sensor).run_requests

    bench.pretend_run(NAMES.derive_job, dg.DagsterRunStatus.FAILURE, tags=derive.tags)

    [request] = bench.tick(NAMES.hand_over_sensor).run_requests
    assert request.job_name == NAMES.hand_over_job


@pytest.mark.parametrize("removed", ["report", "delete"])
def test_run_of_the_sensor_deletes_what_was_removed_if_that_is_set(
    bench: Workbench, made: Spaces, removed: str
) -> None:
    bench.settings["removed_partitions"] = removed
    [request] = bench.tick(NAMES.hand_over_sensor).run_requests

    assert options_of(request) == {"delete_removed": removed == "delete"}
