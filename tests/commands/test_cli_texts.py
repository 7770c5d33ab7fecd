"""The command line on catalogs whose texts are put together from columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import MODEL, Command
from tests.commands.test_cli import write_partition


def test_template_is_embedded_searched_and_verified(tmp_path: Path, surge: Command) -> None:
    write_partition(tmp_path / "catalog", "shoes", 2, sku=[1, 2], title=["Boot", "Clog"], price=[99.5, 20.0])
    given = (*MODEL, "--id", "sku", "--text", "{title} for {price} {{EUR}}")
    surge.json("embed", "catalog", "out", *given)
    first = surge.json("search", "out", "Clog for 20 {EUR}", *MODEL)["hits"][0]
    assert (first["id"], first["text"]) == ("2", "Clog for 20 {EUR}")
    assert surge.json("verify", "catalog", "out", *given)["violations"] == []


def test_template_that_cannot_be_used_is_wrong_usage(tmp_path: Path, surge: Command) -> None:
    write_partition(tmp_path / "catalog", "shoes", 1, id=["1"], text=["Boot"])
    code, _, error = surge("embed", "catalog", "out", *MODEL, "--text", "{title")
    assert code == 2 and "error: setting text is '{title': the text template '{title' is not complete" in error


def test_rows_without_a_text_are_skipped_and_counted(tmp_path: Path, surge: Command) -> None:
    write_partition(tmp_path / "catalog", "shoes", 3, id=["1", "2", "3"], text=["Boot", None, " "])
    given = (*MODEL, "--missing-text", "skip")
    report = surge.json("embed", "catalog", "out", *given)
    assert (report["texts_encoded"], report["skipped_rows"], report["blank_texts"]) == (1, 2, 0)
    assert surge.json("verify", "catalog", "out", *given)["violations"] == []


def test_search_without_a_text_says_what_is_missing(tmp_path: Path, surge: Command) -> None:
    (tmp_path / "out").mkdir()
    for output in ("out", "s3://bucket/vectors"):
        code, _, error = surge("search", output, *MODEL)
        assert code == 2 and f"the text to search for is missing: surge-dagster search {output} TEXT" in error


@pytest.mark.parametrize(
    ("rows", "partition_by", "expected", "said"),
    [
        ("1,x,a\n", "category,category", 2, "setting partition_by is 'category,category': expected each column once"),
        ("", "category", 0, "the source 't.csv' has no rows, and so no partitions"),
    ],
)
def test_table_that_gives_no_partitions_is_told_why(
    tmp_path: Path, surge: Command, rows: str, partition_by: str, expected: int, said: str
) -> None:
    (tmp_path / "t.csv").write_text(f"id,text,category\n{rows}")
    given = ("embed", "t.csv", "out", *MODEL, "--partition-by", partition_by)
    code, _, error = surge(*given)
    assert code == expected and said in error


def test_errors_are_the_json_document_too(surge: Command) -> None:
    code, out, error = surge("embed", "nowhere", "out", *MODEL, "--json")
    assert code == 2 and surge.printed == f"error: {json.loads(out)['error']}\n" and "nowhere" in error


def test_further_columns_are_carried_into_the_output_and_searched(tmp_path: Path, surge: Command) -> None:
    write_partition(tmp_path / "catalog", "shoes", 1, id=["1"], text=["Boot"], price=[99.5], sku=["b-1"])
    given = (*MODEL, "--columns", "sku,price")
    surge.json("embed", "catalog", "out", *given)
    [hit] = surge.json("search", "out", "Boot", *MODEL)["hits"]
    assert hit["columns"] == {"sku": "b-1", "price": 99.5}
    for wanted in (given, ()):  # without settings, those that the output recorded
        assert surge.json("verify", "catalog", "out", *wanted)["violations"] == []
    code, _, error = surge("embed", "catalog", "out", *MODEL, "--columns", "text")
    assert code == 2 and "the column 'text' cannot be carried" in error
