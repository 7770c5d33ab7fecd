"""Assets of derived spaces and the job that brings them up to date: one run for many partitions, stale ones only."""

from __future__ import annotations

import pytest
from dagster._core.definitions.data_version import StaleStatus

from tests.dagster.conftest import NAMES, Workbench, stale_status
from tests.spaces import KEYS, Spaces

INT8, SHORT = NAMES.derived("int8"), NAMES.derived("float32_8")


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
    assert stale_status(bench, "a", INT8) == StaleStatus.FRESH
    assert not bench.run(NAMES.derive_job).materialized(INT8)
    (made.root / "output" / space / "b.parquet").unlink()
    assert list(bench.run(NAMES.derive_job).materialized(INT8)) == ["b"]


def test_run_of_a_backfill_reports_fresh_partitions_too(bench: Workbench, made: Spaces) -> None:
    tags = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "b"}
    assert list(bench.materialize({}, tags, INT8).materialized(INT8)) == ["a", "b"]
    assert not bench.materialize({}, tags, INT8).materialized(INT8)
    again = bench.materialize({}, tags | {"dagster/backfill": "one"}, INT8)
    assert again.success and list(again.materialized(INT8)) == ["a", "b"]


def test_damaged_partition_fails_the_run_by_name_after_the_others(bench: Workbench, made: Spaces) -> None:
    made.file("hash://16", "b").write_bytes(b"nothing")
    ran = bench.run(NAMES.derive_job)
    assert not ran.success
    assert list(ran.materialized(SHORT)) == ["a", "c"]
    assert "2 partitions could not be derived. The first one: partition 'b'" in ran.failure()
    assert "b.parquet' cannot be read because" in ran.failure()


def test_without_the_setting_there_is_neither_asset_nor_job(bench: Workbench) -> None:
    assert INT8 not in bench.definitions.resolve_asset_graph().get_all_asset_keys()
    assert NAMES.derive_job not in {job.name for job in bench.definitions.resolve_all_job_defs()}
