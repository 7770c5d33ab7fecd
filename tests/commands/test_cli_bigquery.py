"""The command line on tables and queries of BigQuery, which the fake of both its APIs serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.command import MODEL, Command
from tests.engine.tables.bigquery_fake import CATALOG, SOURCE, TABLE, FakeBigQuery, table_of
from tests.extras import require
from tests.small_catalogs import assert_embedded

require("bigquery", "google.cloud.bigquery_storage_v1")

KEYS = ("a", "b", "ß")


@pytest.fixture
def fake() -> Iterator[FakeBigQuery]:
    fake = FakeBigQuery(table_of({key: CATALOG[key] for key in KEYS}))
    with fake.serve_by_default():
        yield fake


class Shell:
    """Commands whose settings are in `surge.yaml`."""

    def __init__(self, run: Command) -> None:
        self._root, self._run = run.root, run

    def configure(self, **settings: Any) -> None:
        (self._root / "surge.yaml").write_text(json.dumps({"output": "out", "model": MODEL[1], **settings}))

    def run(self, *given: str) -> dict[str, Any]:
        return self._run.json(*given)

    def error(self, *given: str) -> str:
        code, _, error = self._run(*given)
        assert code == 2
        return error

    def assert_embedded(self) -> None:
        [space] = [each.parent.name for each in (self._root / "out").glob("*/space.json")]
        for key in KEYS:
            assert_embedded(self._root / "out", space, key, CATALOG[key])


@pytest.fixture
def shell(surge: Command) -> Shell:
    return Shell(surge)


def test_table_whose_versions_are_the_newest_changes_is_embedded_and_verified(fake: FakeBigQuery, shell: Shell) -> None:
    shell.configure(source=SOURCE, partition_by="category", updated_at="changed")
    assert shell.run("embed")["partitions_written"] == 3
    shell.assert_embedded()
    assert "CAST(MAX(`changed`) AS STRING)" in fake.queries[0] and "FINGERPRINT" not in fake.queries[0]
    assert shell.run("verify")["violations"] == []
    changed = fake.table["changed"].to_pylist()
    changed[fake.table["category"].to_pylist().index("b")] = 99
    fake.replace(fake.table.set_column(3, "changed", [changed]))
    again = shell.run("embed")
    assert (again["partitions_written"], again["partitions_skipped"], again["texts_encoded"]) == (1, 2, 0)


def test_query_is_embedded_and_found_on_record_by_verify(fake: FakeBigQuery, shell: Shell) -> None:
    query = f"SELECT * FROM `{TABLE}`"
    found = shell.run("embed", "bigquery://p", "out", *MODEL, "--query", query, "--partition-by", "category")
    assert found["partitions_written"] == 3 and f"FROM (\n{query}\n)" in fake.queries[0]
    shell.assert_embedded()
    assert shell.run("verify", "bigquery://p", "out")["violations"] == []
    other = ("bigquery://p", "out", *MODEL, "--query", f"{query} WHERE TRUE", "--partition-by", "category")
    assert "holds embeddings of the catalog 'bigquery://p?query=" in shell.error("embed", *other)


def test_settings_of_bigquery_are_refused_for_other_sources(shell: Shell) -> None:
    for name, value in (("query", "SELECT 1"), ("updated_at", "changed")):
        shell.configure(source="catalog", **{name: value})
        assert f"the setting {name} is for sources of BigQuery (bigquery://…), and the source is 'catalog'" in (
            shell.error("embed")
        )


def test_project_without_a_query_is_refused(fake: FakeBigQuery, shell: Shell) -> None:
    shell.configure(source="bigquery://p", partition_by="category")
    assert "or bigquery://project and the setting query" in shell.error("embed")
