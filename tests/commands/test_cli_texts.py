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
    first = surge.json("search", "Clog for 20 {EUR}", "out", *MODEL)["hits"][0]
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
