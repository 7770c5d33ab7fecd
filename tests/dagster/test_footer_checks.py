"""`dimensions_match` and `row_counts_match`, which each run evaluates from the footers that it
reads anyway."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.orchestration.footer_checks import FooterChecks
from tests.dagster.conftest import NAMES, Ran, Workbench, shown, when_footers_are_checked
from tests.engine.outputs import Output
from tests.small_catalogs import (
    narrow,
    partition_of,
    rewrite,
    tamper,
)

CHECKS = ("dimensions_match", "row_counts_match")
SOUND = FooterChecks(dimensions={"k": ""}, rows={"k": ""})
Change = Callable[[pa.Table], pa.Table]


def fewer_rows(table: pa.Table) -> pa.Table:
    return table.slice(0, 30)


tampered = pytest.mark.parametrize(
    ("change", "failing", "reason"),
    [
        (fewer_rows, "row_counts_match", "its metadata promise 40 rows and it has 30"),
        (narrow, "dimensions_match", "expected 16 numbers per row"),
    ],
)


@pytest.fixture
def output(tmp_path: Path) -> Output:
    """An output with a file of three rows for the partition k."""
    made = Output(tmp_path / "out", EncodingSpec("hash://16"))
    made.put("k", 3)
    return made


@pytest.fixture
def embedded(bench: Workbench) -> Workbench:
    """A workbench whose partitions a, b and c are embedded, with 40 rows each."""
    bench.fill("abc", 40)
    assert bench.refresh().success
    return bench


def partition(rows: int | None = None) -> Partition:
    return replace(partition_of("k", []), rows=rows)


def judged(
    output: Output, rows_of_source: int | None, rows_encoded: int | None = None
) -> FooterChecks:
    """What the footer of partition k says, if the source knows this number of rows."""
    checks = FooterChecks()
    listed = partition(rows_of_source)
    freshness = OutputState(output.store, output.space.name).freshness(listed)
    checks.record(listed, freshness, output.space, rows_encoded)
    return checks


def passed(ran: Ran) -> dict[str, bool]:
    """Which of both checks the run evaluated, and whether they passed."""
    return {name: check.passed for name, check in ran.checks().items() if name in CHECKS}


def violations(ran: Ran, check: str) -> str:
    return str(ran.checks()[check].metadata["failed"].value)


def test_footer_with_the_rows_of_the_source_is_sound(output: Output) -> None:
    assert judged(output, 3) == SOUND


def test_rows_of_a_fresh_file_are_not_judged_without_a_known_count(output: Output) -> None:
    checks = judged(output, None)

    assert checks.dimensions == {"k": ""}
    assert checks.rows == {}


def test_footer_is_compared_with_the_row_count_that_the_source_knows(output: Output) -> None:
    assert judged(output, 4).rows == {"k": "its file has 3 rows; its source has 4."}


def test_footer_is_compared_with_what_was_encoded_without_a_known_count(output: Output) -> None:
    assert judged(output, None, 4).rows == {"k": "its file has 3 rows; its source has 4."}


def test_rows_that_the_source_has_and_the_file_skips_are_no_violation(output: Output) -> None:
    rewrite(output.path("k"), lambda table: table, skipped_rows=2)

    assert judged(output, 5) == SOUND


def test_vectors_of_another_type_than_the_space_has_are_a_violation(output: Output) -> None:
    output.space = replace(output.space, dtype="float16")

    assert "halffloat" in judged(output, 3).dimensions["k"]


def test_stale_file_is_not_judged(output: Output) -> None:
    output.put("k", 3, source_version="v0")

    assert judged(output, 4) == FooterChecks()


@tampered
def test_tampered_file_is_red_after_the_next_nightly_run(
    embedded: Workbench, change: Change, failing: str, reason: str
) -> None:
    tamper(embedded.file("b"), change)

    ran = embedded.nightly()

    assert ran.success
    assert passed(ran) == dict.fromkeys(CHECKS, True) | {failing: False}
    assert "| `b` |" in violations(ran, failing)
    assert reason in violations(ran, failing)
    assert set(ran.materialized()) == {"b"}


def test_run_that_does_not_select_a_tampered_file_reports_it_all_the_same(
    embedded: Workbench,
) -> None:
    tamper(embedded.file("b"), fewer_rows)

    ran = embedded.refresh(select="stale")

    assert not ran.checks()["row_counts_match"].passed
    assert ran.materialized() == {}


def test_run_that_judges_no_partition_reports_neither_check(bench: Workbench) -> None:
    bench.write("a", [("x", None)])

    ran = bench.refresh()

    assert set(ran.checks()) == {NAMES.run_check.name}


def test_run_judges_what_it_published_and_what_it_found_fresh(embedded: Workbench) -> None:
    embedded.write("a", 41, version="v2")
    embedded.write("d", 40)

    ran = embedded.refresh()

    assert {ran.checks()[name].description for name in CHECKS} == {
        "4 partitions judged, 0 violations"
    }


def test_published_file_with_a_damaged_footer_fails_its_partition(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run_that_damages_b(bench, monkeypatch)

    assert not ran.success
    assert "partition 'b': its published file is missing or damaged" in ran.failure()
    assert "| `Run again: it is encoded again.` |" in str(ran.metrics()["failed"])
    assert shown(bench) == ({"a"}, {"b"})


def test_partition_with_a_damaged_footer_is_encoded_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_that_damages_b(bench, monkeypatch)

    fixed = bench.refresh()

    assert fixed.success
    assert set(fixed.materialized()) == {"b"}
    assert shown(bench) == ({"a", "b"}, set())


def run_that_damages_b(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Return a run over a and b; the file of b is cut short before its footer is checked."""

    def cut_short(key: str) -> None:
        if key == "b":
            os.truncate(bench.file(key), bench.file(key).stat().st_size - 8)

    bench.fill("ab", 50)
    with monkeypatch.context() as patch:
        when_footers_are_checked(patch, cut_short)
        return bench.refresh()
