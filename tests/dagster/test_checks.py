"""The catalog-wide check, and what keeps it out of ordinary runs."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import dagster as dg
import numpy as np
import pytest

from surge_dagster.config.nested_settings import CheckName
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import Space
from surge_dagster.orchestration.failures import failure_table
from surge_dagster.orchestration.spaces import existing_space
from tests.dagster.conftest import NAMES, Ran, Workbench, values_of, workbench
from tests.engine.sources.test_parquet_system_errors import refuse_calls
from tests.small_catalogs import numbered_rows, rewrite, with_vectors

_SHOWN = """{ assetNodeOrError(assetKey: {path: ["embeddings"]}) { ... on AssetNode {
    assetChecksOrError { ... on AssetChecks { checks {
        name executionForLatestMaterialization { status runId } } } } } } }"""


def shown_checks(bench: Workbench) -> dict[str, dict[str, str] | None]:
    """Return what the page of `embeddings` shows of each check, None without a present result."""
    checks = bench.ask(_SHOWN)["assetNodeOrError"]["assetChecksOrError"]["checks"]
    return {check["name"]: check["executionForLatestMaterialization"] for check in checks}


# which only a run can see
CHECK_NAMES = get_args(CheckName)
EVERYTHING = {*CHECK_NAMES} - {"vectors_have_not_drifted", "encode_not_slow"}
WARNINGS = {"few_texts_are_truncated", "vectors_have_not_drifted"}
OF_FOOTERS = {"dimensions_match", "row_counts_match", "few_rows_are_set_aside"}
ONLY_OF_CATALOG = EVERYTHING - WARNINGS - OF_FOOTERS  # on `embeddings`


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, empty_home: Path) -> Path:
    """The folder of a workbench whose catalog is embedded."""
    root = tmp_path_factory.mktemp("embedded") / "bench"
    root.mkdir()
    with workbench(root, empty_home) as bench:
        bench.fill("abc", 40)
        assert bench.refresh().success
    return root.rename(root.with_name("kept"))


@pytest.fixture
def embedded(kept: Path) -> Iterator[Workbench]:
    """A workbench whose catalog is embedded, always in the same place: the output records where its
    catalog is."""
    root = kept.with_name("bench")
    for name in ("catalog", "output"):
        shutil.copytree(kept / name, root / name)
    with workbench(root, kept / "home") as made:
        yield made
    shutil.rmtree(root)


def failed(ran: Ran) -> list[dg.AssetCheckEvaluation]:
    """The checks of a successful run that do not pass."""
    assert ran.success
    return [check for check in ran.evaluations() if not check.passed]


def test_catalog_that_is_embedded_passes_every_check(embedded: Workbench) -> None:
    ran = embedded.run("catalog_check")

    assert set(ran.checks()) == EVERYTHING
    assert failed(ran) == []
    for check in ran.evaluations():
        assert "failed" not in check.metadata


def test_each_kind_of_violation_has_its_own_check(embedded: Workbench) -> None:
    embedded.fill("defghi", 40)
    embedded.refresh()
    file = embedded.file
    rewrite(file("a"), lambda table: table, dimension=17)
    rewrite(file("b"), lambda table: table.slice(0, 30))
    embedded.write("c", numbered_rows("other", 40))
    embedded.write("d", numbered_rows("d", 40, start=1))
    rewrite(file("e"), lambda table: with_vectors(table, lambda matrix: 2 * matrix))
    rewrite(file("f"), lambda table: with_vectors(table, lambda matrix: np.nan * matrix))
    file("g").unlink()
    file("h").write_bytes(b"x")
    rewrite(file("i"), lambda table: table, space="another")

    ran = embedded.run("catalog_check")

    found: dict[str, list[str]] = {}
    for check in failed(ran):
        table = str(values_of(check).get("failed"))
        found[check.check_name] = re.findall(r"^\| `(.)` \|", table, re.MULTILINE)
    assert set(ran.checks()) == EVERYTHING
    assert found == {
        "dimensions_match": ["a"],
        "row_counts_match": ["b"],
        "texts_match": ["c"],
        "ids_match": ["d"],
        "vectors_have_length_1": ["e"],
        "vectors_are_finite": ["f"],
        "every_partition_is_embedded": ["g"],
        "files_are_whole": ["h"],
        "one_space": ["i"],
        "few_texts_are_truncated": [],  # it could judge none of them, like the next one
        "few_rows_are_set_aside": [],
    }


def test_orphan_file_is_only_a_warning(embedded: Workbench) -> None:
    shutil.rmtree(embedded.catalog / "partition=c")
    [left] = failed(embedded.run("catalog_check"))

    assert left.check_name == "no_orphan_files"
    assert left.severity == dg.AssetCheckSeverity.WARN


def test_many_truncated_texts_are_a_warning(bench: Workbench) -> None:
    bench.settings |= {"max_length": 5}  # the hash model takes four bytes for a token
    bench.write("none", numbered_rows("none", 10, words=1))
    long = numbered_rows("long", 3, words=5)
    bench.write("long", [*long, *numbered_rows("long", 7, words=1, start=3)])

    for ran in (bench.refresh(), bench.run("catalog_check")):
        check = ran.checks()["few_texts_are_truncated"]
        assert ran.success
        assert not check.passed
        assert check.severity == dg.AssetCheckSeverity.WARN
        [line] = str(check.metadata["failed"].value).splitlines()[2:]
        assert line == "| `long` | `3 of 10 texts (30.0%) are longer than the model reads` |"
        assert check.metadata["truncated"].value == 3


def test_drifted_vectors_are_a_warning(embedded: Workbench) -> None:
    file = embedded.file("b")  # as another device might have made it
    rewrite(file, lambda table: with_vectors(table, lambda matrix: np.roll(matrix, 1, axis=1)))
    for key in "ab":
        embedded.write(key, 41, version="v2")

    ran = embedded.embed("a", "c")

    check = ran.checks()["vectors_have_not_drifted"]

    assert ran.success
    assert not check.passed
    assert check.severity == dg.AssetCheckSeverity.WARN
    assert "| `b` | `a row with a cosine of " in str(check.metadata["failed"].value)
    assert " rows judged, " in str(check.description)


def test_severities_of_catalog_checks_follow_the_settings(embedded: Workbench) -> None:
    embedded.file("a").unlink()
    embedded.settings["checks"] = {
        "every_partition_is_embedded": "warn",
        "few_texts_are_truncated": "off",
    }

    ran = embedded.run("catalog_check").checks()

    assert set(ran) == EVERYTHING - {"few_texts_are_truncated"}

    missing = ran["every_partition_is_embedded"]
    assert not missing.passed
    assert missing.severity == dg.AssetCheckSeverity.WARN


@pytest.mark.parametrize("launched", ["a job", "the asset"])
def test_severity_of_the_run_check_follows_the_settings(bench: Workbench, launched: str) -> None:
    bench.settings["checks"] = {NAMES.run_check.name: "warn"}
    bench.write("a", [("x", None)])
    bench.instance.add_dynamic_partitions(NAMES.partitions_name, ["a"])
    ran = bench.refresh() if launched == "a job" else bench.embed("a", "a")
    check = ran.checks()[NAMES.run_check.name]

    assert ran.success is False
    assert check.passed is False
    assert check.severity == dg.AssetCheckSeverity.WARN


def test_turning_off_every_check_is_refused(bench: Workbench) -> None:
    bench.settings["checks"] = dict.fromkeys(CHECK_NAMES, "off")
    with pytest.raises(ConfigError, match="leave one check on"):
        _ = bench.definitions


def test_unreadable_partition_is_reported_once_and_the_rest_is_read(
    embedded: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    [path] = (embedded.catalog / "partition=b").iterdir()
    refuse_calls(monkeypatch, "pyarrow.OSFile", path, errno.EIO)

    ran = embedded.run("catalog_check")

    [reported] = failed(ran)

    assert reported.check_name == "files_are_whole"
    assert "| `b` | `" in str(reported.metadata["failed"].value)
    assert reported.metadata["partitions"].value == 3
    assert reported.metadata["rows"].value == 80

    of_ids = ran.checks()["ids_match"]
    assert of_ids.metadata["partitions_judged"].value == 2
    assert of_ids.metadata["partitions_not_judged"].value == 1

    said = "2 partitions judged, 0 violations, 1 with a violation of another check"
    assert str(of_ids.description).startswith(said)


def test_length_of_vectors_is_not_judged_in_a_space_that_is_not_normalized(
    embedded: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_normalized(*given: Any) -> Space:
        return replace(existing_space(*given), normalize=False)

    monkeypatch.setattr("surge_dagster.assets.catalog_check.existing_space", not_normalized)

    ran = embedded.run("catalog_check")

    assert ran.success
    assert set(ran.checks()) == EVERYTHING - {"vectors_have_length_1"}
    shown = shown_checks(embedded)["vectors_have_length_1"]
    assert shown is not None
    assert shown["status"] == "SKIPPED"


def test_run_that_reuses_no_vector_does_not_judge_drift(bench: Workbench) -> None:
    bench.write("a")

    assert "vectors_have_not_drifted" not in bench.refresh().checks()


def test_run_check_is_of_the_last_run_and_counts_what_failed_before(bench: Workbench) -> None:
    bench.write("bad", [("x", None)])
    assert not bench.refresh().success
    bench.write("good", 3)

    check = bench.embed_keys(keys=["good"]).checks()[NAMES.run_check.name]

    assert check.passed
    assert str(check.description).startswith("Last run: 1 partition: 1 encoded")
    assert "1 other partition failed in earlier runs" in str(check.description)
    assert check.metadata["partitions_failed_in_earlier_runs"].value == 1


def test_check_of_an_empty_output_says_that_nothing_is_embedded(bench: Workbench) -> None:
    bench.write("a")

    ran = bench.run("catalog_check")

    assert not ran.success
    assert "holds nothing of 'hash://16'" in ran.failure()


def test_checks_belong_to_embeddings_and_truncation_to_the_source(embedded: Workbench) -> None:
    found = embedded.run("catalog_check").checks()

    truncation = found.pop("few_texts_are_truncated")

    assert truncation.asset_key == NAMES.source_partitions
    for check in found.values():
        assert check.asset_key == NAMES.embeddings


def test_a_run_that_materializes_embeddings_evaluates_only_its_own_checks(
    embedded: Workbench,
) -> None:
    embedded.write("a", 41, version="v2")

    ran = embedded.embed("a", "c")

    assert ran.success
    assert set(ran.checks()) - {"encode_not_slow"} == {NAMES.run_check.name, *WARNINGS, *OF_FOOTERS}
    assert ran.count(dg.DagsterEventType.STEP_SKIPPED) == 1, "the op of the catalog's checks"
    assert ran.count(dg.DagsterEventType.STEP_START) == 1


def test_run_shows_no_result_of_a_check_that_it_did_not_evaluate(embedded: Workbench) -> None:
    embedded.run("catalog_check")

    shown = shown_checks(embedded)
    for name in ONLY_OF_CATALOG:
        assert shown[name] is not None

    embedded.write("a", 41, version="v2")
    ran = embedded.refresh()

    shown = shown_checks(embedded)

    assert not ONLY_OF_CATALOG & set(ran.checks())
    assert {name for name, result in shown.items() if result is None} == ONLY_OF_CATALOG


def test_check_of_the_catalog_can_be_executed_alone(embedded: Workbench) -> None:
    embedded.file("b").unlink()
    chosen = dg.AssetCheckKey(NAMES.embeddings, "every_partition_is_embedded")
    job = embedded.definitions.resolve_implicit_global_asset_job_def().get_subset(
        asset_check_selection={chosen}
    )

    ran = job.execute_in_process(instance=embedded.instance)

    [found] = ran.get_asset_check_evaluations()

    assert found.asset_check_key == chosen
    assert not found.passed


def test_failure_table_is_valid_markdown_for_any_key() -> None:
    table = failure_table([("a|b`c\n", "line one\nline | two")]).value

    assert table.splitlines()[2] == "| `a\\|b'c ` | `line one line \\| two` |"

    image = "![x](http://127.0.0.1/x.png) [y](javascript:z) <b>"
    assert f"`{image}`" in failure_table([("a", image)]).value, (
        "as code, so that a browser loads nothing"
    )
    assert failure_table([("a", "x")] * 1000).value.endswith("| `…` | `and 800 more` |")
