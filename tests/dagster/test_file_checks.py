"""`dimensions_match` and `row_counts_match`, which each run evaluates from what it knows anyway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest

from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.report import Receipt
from surge_dagster.orchestration.outcome import FileChecks
from tests.dagster.conftest import NAMES, Ran, Workbench
from tests.small_catalogs import narrow, partition_of, tamper

CHECKS = ("dimensions_match", "row_counts_match")
SPACE = EncodingSpec("hash://16").resolve()
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
def embedded(bench: Workbench) -> Workbench:
    """A workbench whose partitions a, b and c are embedded, with 40 rows each."""
    bench.fill("abc", 40)
    assert bench.refresh().success
    return bench


def judged(rows_of_source: int | None, **facts: object) -> FileChecks:
    """What the checks find in a file of three rows, if the source knows this number of rows."""
    checks = FileChecks()
    partition = replace(partition_of("k", []), rows=None, source_rows=rows_of_source)
    receipt = Receipt("k", "fresh", "/k", 3, 16, 9, "etag", 0, "v1", "digest", "version", "space")
    checks.record(partition, replace(receipt, **{"source_rows": 3, **facts}), SPACE)
    return checks


def passed(ran: Ran) -> dict[str, bool]:
    """Which of both checks the run evaluated, and whether they passed."""
    return {name: check.passed for name, check in ran.checks().items() if name in CHECKS}


def violations(ran: Ran, check: str) -> str:
    return str(ran.checks()[check].metadata["failed"].value)


@pytest.mark.parametrize(
    ("rows_of_source", "facts", "found"),
    [
        (3, {}, {"k": ""}),
        (4, {}, {"k": "its file is made of 3 rows; its source has 4."}),
        (5, {"source_rows": 5, "skipped_rows": 2}, {"k": ""}),
        (None, {"action": "encoded"}, {"k": ""}),
        (None, {}, {}),
    ],
    ids=["all", "fewer", "skipped", "as read", "not known"],
)
def test_rows_of_a_file_are_those_that_its_source_is_known_to_have(
    rows_of_source: int | None, facts: dict[str, object], found: dict[str, str]
) -> None:
    assert judged(rows_of_source, **facts) == FileChecks(dimensions={"k": ""}, rows=found)


def test_vectors_of_another_dimension_than_the_space_has_are_a_fault() -> None:
    found = judged(3, dimension=8).dimensions

    assert found == {"k": "its file has 8 numbers per row; the space has 16."}


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
