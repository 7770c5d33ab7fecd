"""The command line on catalogs whose texts are put together from columns."""

from __future__ import annotations

import json
from pathlib import Path

from tests.command import MODEL, Command
from tests.commands.test_cli import write_partition


def test_template_is_embedded_searched_and_verified(tmp_path: Path, surge: Command) -> None:
    write_partition(
        tmp_path / "catalog", "shoes", 2, sku=[1, 2], title=["Boot", "Clog"], price=[99.5, 20.0]
    )
    given = (*MODEL, "--id", "sku", "--text", "{title} for {price} {{EUR}}")
    surge.json("embed", "catalog", "out", *given)
    first = surge.json("search", "out", "Clog for 20 {EUR}", *MODEL)["hits"][0]
    assert (first["id"], first["text"]) == ("2", "Clog for 20 {EUR}")
    assert surge.json("verify", "catalog", "out", *given)["violations"] == []


def test_table_without_rows_is_told_to_give_no_partitions(tmp_path: Path, surge: Command) -> None:
    (tmp_path / "t.csv").write_text("id,text,category\n")
    code, _, error = surge("embed", "t.csv", "out", *MODEL, "--partition-by", "category")
    assert code == 0 and "the source 't.csv' has no rows, and so no partitions" in error


def test_errors_are_the_json_document_too(surge: Command) -> None:
    code, out, error = surge("embed", "nowhere", "out", *MODEL, "--json")
    assert (
        code == 2 and surge.printed == f"error: {json.loads(out)['error']}\n" and "nowhere" in error
    )


def test_further_columns_are_carried_into_the_output_and_searched(
    tmp_path: Path, surge: Command
) -> None:
    write_partition(
        tmp_path / "catalog", "shoes", 1, id=["1"], text=["Boot"], price=[99.5], sku=["b-1"]
    )
    given = (*MODEL, "--columns", "sku,price")
    surge.json("embed", "catalog", "out", *given)
    [hit] = surge.json("search", "out", "Boot", *MODEL)["hits"]
    assert hit["columns"] == {"sku": "b-1", "price": 99.5}
    for wanted in (given, ()):  # without settings, those that the output recorded
        assert surge.json("verify", "catalog", "out", *wanted)["violations"] == []
    code, _, error = surge("embed", "catalog", "out", *MODEL, "--columns", "text")
    assert code == 2 and "the column 'text' cannot be carried" in error
