"""A catalog whose files are Arrow files, through Dagster."""

from __future__ import annotations

import shutil

import pytest
from pydantic import ValidationError

from surge_dagster import open_embeddings
from surge_dagster.orchestration.launch import Unattended
from surge_dagster.resources import OutputStore
from tests.dagster.conftest import Workbench
from tests.small_catalogs import partition_folder


def test_runs_sensor_and_checks_see_the_files_of_the_space_whatever_their_format(bench: Workbench) -> None:
    bench.settings["format"] = "arrow"
    bench.fill("ab")
    [ran] = bench.launch(bench.tick())
    assert ran.success and ran.metrics()["partitions_written"] == 2
    files = sorted(bench.output.glob("*/*.arrow"))
    assert [path.name for path in files] == ["a.arrow", "b.arrow"] and not list(bench.output.glob("*/*.parquet"))
    assert bench.tick().run_requests == [] and bench.refresh().metrics()["partitions_skipped"] == 2
    assert open_embeddings(bench.output).lazy().collect().height == 6

    content = bytearray(files[0].read_bytes())
    content[content.index(b"id-0id-1")] ^= 1  # not in the padding, which nothing reads
    files[0].write_bytes(content)
    checks = bench.run("catalog_check").checks()
    assert [name for name, check in checks.items() if not check.passed] == ["files_are_whole"]

    shutil.rmtree(partition_folder(bench.catalog, "b"))
    bench.refresh(unattended=Unattended(removed_partitions="delete"))
    assert not files[1].exists() and files[0].exists()

    bench.settings["format"] = "parquet"
    refused = bench.refresh(force=True)
    assert (
        not refused.success and "has files in the format 'arrow'; the settings request 'parquet'" in refused.failure()
    )


def test_unknown_file_format_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"format\n.*'parquet' or 'arrow'"):
        OutputStore(url="out", format="csv")  # pyright: ignore[reportArgumentType]
