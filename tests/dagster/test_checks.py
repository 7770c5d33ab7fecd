"""The catalog-wide check, and what keeps it out of ordinary runs."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import numpy as np
import pytest
from dagster._core.loader import LoadingContextForTest
from dagster._core.remote_representation.external_data import asset_check_node_snaps_from_repo
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecord

from surge_dagster.config.check_policy import CHECK_NAMES, CheckName
from surge_dagster.engine.errors import ConfigError
from surge_dagster.orchestration.failures import failure_table
from tests.dagster.conftest import NAMES, Workbench, workbench
from tests.engine.sources.test_parquet_system_errors import refuse_calls
from tests.small_catalogs import rewrite, with_vectors


@dataclass(frozen=True, slots=True)
class Shown:
    """A check as the page of its asset shows it."""

    name: str
    status: str
    line: str
    run_id: str
    is_latest: bool  # whether Dagster takes it for a result of what was materialized last


def shown_checks(bench: Workbench) -> list[Shown]:
    """The checks of `embeddings`, from what the page asks Dagster for."""
    keys = bench.definitions.get_repository_def().asset_graph.get_check_keys_for_assets(
        {NAMES.embeddings}
    )

    async def look() -> list[Shown]:
        context = LoadingContextForTest(bench.instance)
        shown = []
        for key in sorted(keys):
            record = await AssetCheckExecutionRecord.gen(context, key)
            if record is None:
                continue  # it was neither planned nor evaluated
            status = await record.resolve_status(context)
            is_latest = await record.targets_latest_materialization(context)
            result = record.evaluation
            line = result.description if isinstance(result, dg.AssetCheckEvaluation) else None
            shown.append(Shown(key.name, status.value, line or "", record.run_id, is_latest))
        return shown

    return asyncio.run(look())


# which only a run can see
EVERYTHING = {*CHECK_NAMES} - {"vectors_have_not_drifted", "encode_not_slow"}
WARNINGS = {"few_texts_are_truncated", "vectors_have_not_drifted"}
OF_FOOTERS = {"dimensions_match", "row_counts_match"}
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


def broken(bench: Workbench) -> dict[str, str]:
    """The catalog checks that do not pass, with what they say."""
    ran = bench.run("catalog_check")
    assert ran.success and set(ran.checks()) == EVERYTHING
    found = ran.checks().items()
    failed = {name: check.metadata.get("failed") for name, check in found if not check.passed}
    return {name: str(table.value) if table else "" for name, table in failed.items()}


def test_a_catalog_that_is_embedded_passes_every_check(embedded: Workbench) -> None:
    ran = embedded.run("catalog_check")
    assert ran.success and set(ran.checks()) == EVERYTHING
    of_run = embedded.refresh().checks()
    assert of_run and all(
        check.passed and not check.metadata.keys() & {"failed", "partitions_failed"}
        for check in (*ran.checks().values(), *of_run.values())
    ), "a passed check has no dialog that holds nothing"


def test_each_kind_of_violation_has_its_own_check(embedded: Workbench) -> None:
    embedded.fill("defghij", 40)
    embedded.refresh()
    file = {key: embedded.file(key) for key in "abcdefghij"}
    embedded.settings["model"] = "hash://24"
    embedded.refresh()
    [of_another_space] = [path for path in embedded.output.glob("*/j.parquet") if path != file["j"]]
    embedded.settings["model"] = "hash://16"
    rewrite(file["a"], lambda table: table, dimension=17)
    rewrite(file["b"], lambda table: table.slice(0, 30))
    embedded.write("c", [(f"id-{row}", f"other text {row}") for row in range(40)])
    embedded.write("d", [(f"x{row}", "text") for row in range(40)])
    rewrite(file["e"], lambda table: with_vectors(table, lambda matrix: 2 * matrix))
    rewrite(file["f"], lambda table: with_vectors(table, lambda matrix: np.nan * matrix))
    file["g"].unlink()
    embedded.write("h", 41, version="v2")
    content = bytearray(file["i"].read_bytes())
    content[900] ^= 1
    file["i"].write_bytes(content)
    shutil.copy(of_another_space, file["j"])
    reported = broken(embedded)
    assert {
        name: [key for key in file if f"| `{key}` |" in table] for name, table in reported.items()
    } == {
        "dimensions_match": ["a"],
        "row_counts_match": ["b"],
        "texts_match": ["c"],
        "ids_match": ["d"],
        "vectors_have_length_1": ["e"],
        "vectors_are_finite": ["f"],
        "every_partition_is_embedded": ["g", "h"],
        "files_are_whole": ["i"],
        "one_space": ["j"],
        "few_texts_are_truncated": [],  # it could judge none of them
    }
    damaged = reported["files_are_whole"]
    remedy = "launch the catalog's job embed_partitions with this key and force: true"
    assert remedy in damaged and "Remove" not in damaged


def test_orphan_file_is_only_a_warning(embedded: Workbench) -> None:
    shutil.rmtree(embedded.catalog / "partition=c")
    ran = embedded.run("catalog_check")
    [left] = [check for check in ran.checks().values() if not check.passed]
    assert (left.check_name, left.severity) == ("no_orphan_files", dg.AssetCheckSeverity.WARN)


def test_many_truncated_texts_are_a_warning_of_the_run_and_of_the_catalog(bench: Workbench) -> None:
    bench.settings |= {"max_length": 5}  # the hash model takes four bytes for a token
    for key, truncated in (("long", 3), ("some", 2), ("none", 0)):
        bench.write(
            key, [(str(row), f"{row} {'x' * (30 if row < truncated else 10)}") for row in range(10)]
        )
    for ran in (bench.refresh(), bench.run("catalog_check")):
        check = ran.checks()["few_texts_are_truncated"]
        assert ran.success and not check.passed and check.severity == dg.AssetCheckSeverity.WARN
        [line] = str(check.metadata["failed"].value).splitlines()[2:]
        assert line == "| `long` | `3 of 10 texts (30.0%) are longer than the model reads` |"
        assert (check.metadata["truncated"].value, check.metadata["truncated_share"].value) == (
            5,
            0.1667,
        )


def test_drifted_vectors_are_a_warning(embedded: Workbench) -> None:
    # As another device might have made them.
    rewrite(
        embedded.file("b"),
        lambda table: with_vectors(table, lambda matrix: np.roll(matrix, 1, axis=1)),
    )
    for key in "ab":
        embedded.write(key, 41, version="v2")
    ran = embedded.embed("a", "c")
    check = ran.checks()["vectors_have_not_drifted"]
    assert ran.success and (check.passed, check.severity) == (False, dg.AssetCheckSeverity.WARN)
    reported = str(check.metadata["failed"].value)
    assert "| `b` | `a row with a cosine of " in reported
    assert "`a`" not in reported
    assert check.metadata["compared_rows"].value == 3
    assert ran.materialized()["a"].metadata["rows_reused"].value == 0
    assert "vectors_have_not_drifted" not in embedded.embed("a", "c").checks(), (
        "it compared nothing"
    )


def test_severities_follow_the_settings(embedded: Workbench) -> None:
    rewrite(
        embedded.file("b"),
        lambda table: with_vectors(table, lambda matrix: np.roll(matrix, 1, axis=1)),
    )
    embedded.write("b", 41, version="v2")
    embedded.file("a").unlink()
    embedded.settings["checks"] = {
        "every_partition_is_embedded": "warn",
        "few_texts_are_truncated": "off",
        "vectors_have_not_drifted": "error",
    }
    ran = embedded.run("catalog_check").checks()
    assert set(ran) == EVERYTHING - {"few_texts_are_truncated"}
    missing = ran["every_partition_is_embedded"]
    assert (missing.passed, missing.severity) == (False, dg.AssetCheckSeverity.WARN)
    ran = embedded.refresh()
    assert set(ran.checks()) - {"encode_not_slow"} == {
        NAMES.run_check.name,
        "vectors_have_not_drifted",
        *OF_FOOTERS,
    }
    drifted = ran.checks()["vectors_have_not_drifted"]
    assert ran.success and (drifted.passed, drifted.severity) == (
        False,
        dg.AssetCheckSeverity.ERROR,
    )


@pytest.mark.parametrize("launched", ["a job", "the asset"])
def test_severity_of_the_run_check_follows_the_settings(bench: Workbench, launched: str) -> None:
    bench.settings["checks"] = {NAMES.run_check.name: "warn"}
    bench.write("a", [("x", None)])
    bench.instance.add_dynamic_partitions(NAMES.partitions_name, ["a"])
    ran = bench.refresh() if launched == "a job" else bench.embed("a", "a")
    check = ran.checks()[NAMES.run_check.name]
    assert (ran.success, check.passed, check.severity) == (False, False, dg.AssetCheckSeverity.WARN)


def test_turning_off_every_check_is_refused(bench: Workbench) -> None:
    bench.settings["checks"] = dict.fromkeys(CHECK_NAMES, "off")
    with pytest.raises(ConfigError, match="leave one check on"):
        _ = bench.definitions


@pytest.mark.parametrize(
    ("off", "reported_by"),
    [((), "files_are_whole"), (("files_are_whole",), "every_partition_is_embedded")],
)
def test_unreadable_partition_is_reported_by_one_check_and_the_rest_is_read(
    embedded: Workbench,
    monkeypatch: pytest.MonkeyPatch,
    off: tuple[CheckName, ...],
    reported_by: str,
) -> None:
    refuse_calls(monkeypatch, "os.scandir", embedded.catalog / "partition=b", errno.EIO)
    embedded.settings["checks"] = dict.fromkeys(off, "off")
    checks = embedded.run("catalog_check").checks()
    [reported] = [check for check in checks.values() if not check.passed]
    assert reported.check_name == reported_by
    assert "| `b` | `" in str(reported.metadata["failed"].value) and "checked again" in str(
        reported.metadata["failed"].value
    )
    assert (reported.metadata["partitions"].value, reported.metadata["rows"].value) == (3, 80)


def test_check_of_an_empty_output_says_that_nothing_is_embedded(bench: Workbench) -> None:
    bench.write("a")
    ran = bench.run("catalog_check")
    assert not ran.success and "holds nothing of 'hash://16'" in ran.failure()


def test_checks_of_the_output_belong_to_embeddings_and_truncation_to_the_source(
    embedded: Workbench,
) -> None:
    found = embedded.run("catalog_check").checks().values()
    assert {
        check.asset_key for check in found if check.check_name != "few_texts_are_truncated"
    } == {NAMES.embeddings}
    assert {
        check.asset_key for check in found if check.check_name == "few_texts_are_truncated"
    } == {NAMES.source_partitions}
    snaps = asset_check_node_snaps_from_repo(embedded.definitions.get_repository_def())
    shown = {(snap.asset_key, snap.name) for snap in snaps if snap.description}
    assert {(check.asset_key, check.check_name) for check in found} <= shown, (
        "each with a description"
    )


def test_a_run_that_materializes_embeddings_evaluates_only_its_own_checks(
    embedded: Workbench,
) -> None:
    embedded.write("a", 41, version="v2")

    ran = embedded.embed("a", "c")

    assert ran.success
    assert set(ran.checks()) - {"encode_not_slow"} == {NAMES.run_check.name, *WARNINGS, *OF_FOOTERS}
    assert ran.count(dg.DagsterEventType.STEP_SKIPPED) == 1, "the op of the catalog's checks"
    assert ran.count(dg.DagsterEventType.STEP_START) == 1


@pytest.mark.parametrize(
    ("launched", "status"),
    [("job", "SUCCEEDED"), ("asset", "SKIPPED"), ("failing asset", "EXECUTION_FAILED")],
)
def test_run_reports_no_result_of_a_check_that_it_did_not_evaluate(
    embedded: Workbench, launched: str, status: str
) -> None:
    catalog = embedded.run("catalog_check")
    embedded.write("a", [("x", None)] if launched == "failing asset" else 41, version="v2")

    ran = embedded.refresh() if launched == "job" else embedded.embed("a", "c")

    left = [check for check in shown_checks(embedded) if check.name in ONLY_OF_CATALOG]
    assert not ONLY_OF_CATALOG & set(ran.checks())
    assert {check.status for check in left} == {status}
    assert {check.run_id for check in left} == {catalog.run_id if launched == "job" else ran.run_id}


def test_result_of_an_earlier_run_is_not_one_of_what_was_materialized_last(
    embedded: Workbench,
) -> None:
    embedded.run("catalog_check")
    embedded.write("a", 41, version="v2")

    embedded.refresh()

    assert {
        check.name for check in shown_checks(embedded) if not check.is_latest
    } == ONLY_OF_CATALOG


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


def test_each_result_says_in_one_line_how_many_partitions_were_judged(
    embedded: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(embedded.file("a"), lambda table: table.slice(0, 30))
    refuse_calls(monkeypatch, "os.scandir", embedded.catalog / "partition=b", errno.EIO)
    checks = embedded.run("catalog_check").checks()
    lines = {
        name: str(check.description).partition(" (catalog_check of ")[0]
        for name, check in checks.items()
    }
    assert lines.pop("row_counts_match") == "2 partitions judged, 1 violation, 1 could not be read"
    assert lines.pop("no_orphan_files") == "3 partitions judged, 0 violations"
    assert lines.pop("files_are_whole").startswith(
        "1 partition judged, 1 violation, 1 could not be read"
    )
    assert set(lines.values()) == {
        "1 partition judged, 0 violations, 1 could not be read, 1 with a violation of another check"
    }
    judged = checks["ids_match"].metadata
    assert (judged["partitions_judged"].value, judged["partitions_not_judged"].value) == (1, 2)
    for key in "ac":
        refuse_calls(
            monkeypatch,
            "os.stat",
            embedded.catalog / f"partition={key}" / "part-0.parquet",
            errno.EIO,
        )
    unread = embedded.run("catalog_check").checks()["ids_match"]
    assert str(unread.description).startswith(
        "0 partitions judged, 0 violations, 3 could not be read"
    )
    assert not unread.passed


def test_checks_of_a_run_say_in_one_line_how_many_partitions_were_judged(
    embedded: Workbench,
) -> None:
    embedded.write("a", [("x", None)], version="v2")
    embedded.write("b", 41, version="v2")
    checks = embedded.refresh().checks()
    assert (
        checks["few_texts_are_truncated"].description
        == "1 partition judged, 0 violations, 1 failed"
    )
    assert (
        checks["vectors_have_not_drifted"].description
        == "3 partitions judged, 0 violations, 1 failed"
    )
    lines = {checks[name].description for name in OF_FOOTERS}
    assert lines == {"2 partitions judged, 0 violations, 1 failed"}


def test_failure_table_is_valid_markdown_for_any_key() -> None:
    table = failure_table([("a|b`c\n", "line one\nline | two")]).value
    assert table.splitlines()[2] == "| `a\\|b'c ` | `line one line \\| two` |"
    image = "![x](http://127.0.0.1/x.png) [y](javascript:z) <b>"
    assert f"`{image}`" in failure_table([("a", image)]).value, (
        "as code, so that a browser loads nothing"
    )
    assert (
        failure_table([(str(n), "x") for n in range(1000)]).value.splitlines()[-1]
        == "| … | and 800 more |"
    )
