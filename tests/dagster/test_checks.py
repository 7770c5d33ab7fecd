"""The catalog-wide check, and what keeps it out of ordinary runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import dagster as dg
import pytest

from surge_dagster.assets.checks import failure_table
from tests.dagster.conftest import NAMES, Workbench

EVERYTHING = {
    "every_partition_is_embedded",
    "rows_and_ids_match",
    "vectors_are_valid",
    "one_space",
    "nothing_is_left_over",
}


@pytest.fixture
def embedded(bench: Workbench) -> Workbench:
    """A workbench whose catalog is embedded."""
    for key in "abc":
        bench.write(key, 40)
    assert bench.refresh().success
    return bench


def broken(bench: Workbench) -> dict[str, str]:
    """The catalog checks that do not pass, with what they say."""
    ran = bench.run("catalog_check")
    assert ran.success and set(ran.checks()) == EVERYTHING
    found = ran.checks().items()
    return {name: str(check.metadata["failed"].value) for name, check in found if not check.passed}


def test_a_catalog_that_is_embedded_passes_every_check(embedded: Workbench) -> None:
    assert broken(embedded) == {}


def test_what_is_missing_or_changed_is_found(embedded: Workbench) -> None:
    embedded.file("a").unlink()
    embedded.write("b", 41, version="v2")
    [(name, told)] = broken(embedded).items()
    assert name == "every_partition_is_embedded" and "| `a` |" in told and "| `b` |" in told and "| `c` |" not in told


def test_a_flipped_byte_is_found_and_named(embedded: Workbench) -> None:
    with embedded.file("b").open("r+b") as file:
        file.seek(900)
        byte = file.read(1)
        file.seek(900)
        file.write(bytes([byte[0] ^ 1]))
    [(name, told)] = broken(embedded).items()
    assert name == "vectors_are_valid" and "| `b` |" in told


def test_rows_that_are_not_the_catalogs_are_found(embedded: Workbench) -> None:
    embedded.write("c", [("other", "text")] * 1, version="v1")  # other rows under the version that is on file
    [(name, told)] = broken(embedded).items()
    assert name == "rows_and_ids_match" and "| `c` |" in told


def test_a_file_of_another_space_is_found(embedded: Workbench, tmp_path: Path) -> None:
    here = embedded.file("a")
    embedded.settings["model"] = "hash://24"
    embedded.refresh()
    [other] = [path for path in embedded.output.glob("*/a.parquet") if path != here]
    shutil.copy(other, here)
    embedded.settings["model"] = "hash://16"
    [(name, told)] = broken(embedded).items()
    assert name == "one_space" and "| `a` |" in told


def test_a_file_that_is_left_over_is_only_a_warning(embedded: Workbench) -> None:
    shutil.rmtree(embedded.catalog / "partition=c")
    ran = embedded.run("catalog_check")
    [left] = [check for check in ran.checks().values() if not check.passed]
    assert (left.check_name, left.severity) == ("nothing_is_left_over", dg.AssetCheckSeverity.WARN)


def test_with_nothing_embedded_the_check_says_so(bench: Workbench) -> None:
    bench.write("a")
    ran = bench.run("catalog_check")
    assert not ran.success and "holds nothing of 'hash://16'" in ran.failure()


def test_runs_that_embed_do_not_execute_the_catalogs_checks(embedded: Workbench) -> None:
    embedded.write("a", 3, version="v2")
    assert not EVERYTHING & set(embedded.embed("a", "c").checks())
    job = embedded.definitions.resolve_job_def("catalog_check")
    assert {key.asset_key for key in job.asset_layer.asset_graph.asset_check_keys} >= {NAMES.source_partitions}


def test_a_table_survives_any_key_and_stays_readable() -> None:
    assert failure_table([]) == "none"
    table = failure_table([("a|b`c\n", "line one\nline | two")])
    assert table.splitlines()[2] == "| `a\\|b'c ` | line one line \\| two |"
    assert failure_table([(str(n), "x") for n in range(1000)]).splitlines()[-1] == "| … | and 800 more |"
