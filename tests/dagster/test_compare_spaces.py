"""The job `compare_spaces`, and the gate `min_ndcg_ratio` of a switch."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from surge_dagster.engine.output.current_space import read_current, write_current
from surge_dagster.orchestration.launch import config_of
from tests.dagster import private_dagster
from tests.dagster.conftest import NAMES, Ran, Workbench
from tests.small_catalogs import numbered_rows
from tests.spaces import KEYS, ROWS, Spaces

QUERIES = 12


@pytest.fixture
def made(bench: Workbench, three_spaces: Spaces) -> Spaces:
    """A catalog in two spaces; the first one is current."""
    made = three_spaces.copy_to(bench.root, ("hash://16", "hash://24"))
    write_current(made.store, made.of("hash://16").name, seen=None)
    return made


@pytest.fixture
def queries(bench: Workbench) -> Path:
    """A file of queries with the text of their relevant row."""
    path = bench.root / "queries.csv"
    with path.open("w", newline="") as target:
        lines = csv.writer(target)
        lines.writerow(["query", "partition", "id"])
        lines.writerows([text, "a", name] for name, text in numbered_rows("a", QUERIES))
    return path


def compare(bench: Workbench, **options: Any) -> Ran:
    return bench.run(NAMES.compare_job, config_of(NAMES.compare_op, options))


def switch(bench: Workbench, made: Spaces, **options: Any) -> Ran:
    """Launch the job that switches to the second space."""
    space = made.of("hash://24").name
    config = config_of(NAMES.current_space_op, {"space": space, **options})
    return bench.run(NAMES.switch_job, config)


def observed(bench: Workbench) -> dg.AssetObservation:
    [record] = bench.instance.fetch_observations(NAMES.current_space, limit=9).records
    assert record.asset_observation is not None
    return record.asset_observation


def test_result_is_an_observation_of_the_current_space(
    bench: Workbench, made: Spaces, queries: Path
) -> None:
    second = made.of("hash://24").name

    assert compare(bench, with_space=second, queries=str(queries)).success

    event = observed(bench)
    found: Any = event.metadata["comparison"].value
    assert found["first"] == made.of("hash://16").name
    assert found["rows"] == ROWS * len(KEYS)
    assert found["judged"]["verdict"] == "no difference can be seen with 12 queries"
    assert "| `nDCG@10` | `1.000` |" in str(event.metadata["Means"].value)


def test_drawn_rows_are_compared_side_by_side(bench: Workbench, made: Spaces) -> None:
    first, second = (made.of(model).name for model in ("hash://16", "hash://24"))

    assert compare(bench, with_space=second, sample=12).success

    table = str(observed(bench).metadata["The queries that differ most"].value)
    assert table.splitlines()[0] == f"| query | {first} | {second} |"
    assert len(table.splitlines()) == 2 + 10
    assert table.splitlines()[2].count("` `") == 2 * 2, "three rows of each space"


def test_comparison_makes_no_downstream_asset_stale(bench: Workbench, made: Spaces) -> None:
    @dg.asset(deps=[NAMES.current_space])
    def report() -> None: ...

    definitions = dg.Definitions.merge(bench.definitions, dg.Definitions(assets=[report]))

    def status() -> str:
        return private_dagster.stale_status(bench.instance, definitions, report.key, None)

    assert switch(bench, made).success
    assert bench.run_downstream(report).success
    assert status() == "FRESH"
    assert compare(bench, with_space=made.of("hash://16").name, sample=3).success
    assert status() == "FRESH"


def test_switch_to_a_space_below_the_ratio_is_refused(
    bench: Workbench, made: Spaces, queries: Path
) -> None:
    before = read_current(made.store)

    ran = switch(bench, made, queries=str(queries), min_ndcg_ratio=1.01)

    assert "is less than 1.01 of the current one; nothing was switched" in ran.failure()
    assert not ran.will_retry
    assert read_current(made.store) == before


def test_switch_to_a_space_above_the_ratio_shows_the_comparison(
    bench: Workbench, made: Spaces, queries: Path
) -> None:
    ran = switch(bench, made, queries=str(queries), min_ndcg_ratio=0.99)

    event = ran.materialized(NAMES.current_space)[None]
    assert event.metadata["space"].value == made.of("hash://24").name
    assert "| `nDCG@10` | `1.000` |" in str(event.metadata["Means"].value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "min_ndcg_ratio needs labelled queries", id="no file"),
        pytest.param("query\none\n", "have no labels", id="no labels"),
        pytest.param("query,id\none\n", "line 2: id is empty", id="bad file"),
    ],
)
def test_gate_without_usable_queries_is_refused(
    bench: Workbench, made: Spaces, content: str | None, message: str
) -> None:
    options: dict[str, Any] = {"min_ndcg_ratio": 0.9}
    if content is not None:
        path = bench.root / "queries.csv"
        path.write_text(content)
        options["queries"] = str(path)

    assert message in switch(bench, made, **options).failure()
