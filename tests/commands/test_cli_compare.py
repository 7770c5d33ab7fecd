"""`surge-dagster compare`: its result for people and as JSON, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.command import Command


@pytest.fixture
def spaces(surge: Command) -> tuple[str, str]:
    """The names of two spaces of one catalog; the first one is current."""
    for key in ("a", "b"):
        surge.write(key, 30)
    first = surge.embed()["space"]
    second = surge.json("embed", "catalog", "out", "--model", "hash://24")["space"]
    (surge.root / "queries.csv").write_text(
        "query,partition,id\n"
        + "".join(f"a number {row},a,a-{row}\n" for row in range(20))
        + "a number 3,b,b-3\n"
    )
    return first, second


def test_labelled_queries_are_judged(surge: Command, spaces: tuple[str, str]) -> None:
    first, second = spaces

    found = surge.json("compare", "out", "--with", second, "--queries", "queries.csv", "-k", 3)

    assert found["first"] == first, "the current space"
    assert found["second"] == second
    assert found["rows"] == 60
    assert found["judged"]["queries"] == 20
    assert found["judged"]["rows"] == 21
    names = [metric["name"] for metric in found["judged"]["metrics"]]
    assert names == ["recall@3", "MRR@3", "nDCG@10"]
    assert found["judged"]["verdict"] == "no difference can be seen with 20 queries"


def test_tables_show_the_queries_that_change(surge: Command, spaces: tuple[str, str]) -> None:
    texts = [f"a number {row},b,b-{row}" for row in range(20)]
    (surge.root / "queries.csv").write_text("\n".join(["query,partition,id", *texts]))

    code, out, _ = surge("compare", "out", "--with", spaces[1], "--queries", "queries.csv")

    assert code == 0
    assert "nDCG@10 of the queries that gain most" in out
    assert "nDCG@10 of the queries that lose most" in out
    assert f"{spaces[1]}: no difference can be seen with 20 queries: nDCG@10" in out


def test_table_without_queries_is_left_out(surge: Command, spaces: tuple[str, str]) -> None:
    _, out, _ = surge("compare", "out", "--with", spaces[0], "--queries", "queries.csv")

    assert "Means" in out
    assert "of the queries that" not in out


def test_drawn_rows_are_shown_with_both_results(surge: Command, spaces: tuple[str, str]) -> None:
    code, out, _ = surge("compare", "out", "--with", spaces[1], "--sample", 12)

    assert code == 0
    assert "The queries that differ most" in out
    assert "of the ten nearest rows are the same, rank correlation" in out
    assert "12 queries among 60 rows in 2 partitions" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ("--queries", "queries.csv", "--sample", 3), "Give one of them", id="both sources"
        ),
        pytest.param(("--queries", "none.csv"), "cannot be read", id="no such file"),
        pytest.param(("--space", "x"), "has no space 'x'; it holds", id="no such space"),
    ],
)
def test_wrong_use_is_refused(
    surge: Command, spaces: tuple[str, str], options: tuple[object, ...], message: str
) -> None:
    assert message in surge.error("compare", "out", "--with", spaces[1], *options)


def test_model_that_only_the_output_names_is_not_loaded(
    surge: Command, spaces: tuple[str, str]
) -> None:
    path = surge.root / "out" / spaces[1] / "space.json"
    record = json.loads(path.read_text())
    record["requested"]["model"] = "owner/model"
    path.write_text(json.dumps(record | {"model_folder": "/somewhere"}))

    error = surge.error("compare", "out", "--with", spaces[1], "--sample", 3)

    assert "names the model '/somewhere', which the settings do not" in error


def test_switch_refuses_a_space_that_finds_less(surge: Command, spaces: tuple[str, str]) -> None:
    first, second = spaces
    gate = ("--queries", "queries.csv", "--min-ndcg-ratio", 1.01)

    error = surge.error("switch", "catalog", "out", "--space", second, *gate, expected=1)

    assert f"nDCG@10 of {second} is less than 1.01 of the current one; nothing was" in error
    current = json.loads((surge.root / "out" / "current_space.json").read_text())
    assert current["space"] == first


def test_switch_takes_a_space_that_finds_as_much(surge: Command, spaces: tuple[str, str]) -> None:
    gate = ("--queries", "queries.csv", "--min-ndcg-ratio", 0.9)

    code, out, error = surge("switch", "catalog", "out", "--space", spaces[1], *gate)

    assert code == 0, error
    assert "nDCG@10" in out
    assert f"{spaces[1]} is now the current space" in out


@pytest.mark.parametrize(
    ("gate", "problem"),
    [
        (("--min-ndcg-ratio", 0.9), "--min-ndcg-ratio and --queries go together"),
        (("--queries", "plain.csv", "--min-ndcg-ratio", 0.9), "the queries have no labels"),
    ],
)
def test_gate_of_a_switch_needs_labelled_queries(
    surge: Command, spaces: tuple[str, str], gate: tuple[object, ...], problem: str
) -> None:
    (surge.root / "plain.csv").write_text("query\nred\n")

    assert problem in surge.error("switch", "catalog", "out", "--space", spaces[1], *gate)
