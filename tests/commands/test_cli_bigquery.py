"""The command line on tables and queries of BigQuery, which the fake of both its APIs serves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.command import MODEL, Command
from tests.engine.tables.bigquery_fake import CATALOG, TABLE, FakeBigQuery, table_of
from tests.small_catalogs import assert_embedded

KEYS = ("a", "b", "ß")


@pytest.fixture
def fake() -> Iterator[FakeBigQuery]:
    fake = FakeBigQuery(table_of({key: CATALOG[key] for key in KEYS}))
    with fake.serve_by_default():
        yield fake


def assert_all_embedded(surge: Command) -> None:
    for key in KEYS:
        assert_embedded(surge.root / "out", surge.space_json().parent.name, key, CATALOG[key])


def test_query_is_embedded_and_found_on_record_by_verify(
    fake: FakeBigQuery, surge: Command
) -> None:
    query = f"SELECT * FROM `{TABLE}`"
    embed = ("embed", "bigquery://p", "out", *MODEL, "--partition-by", "category", "--query")
    assert surge.json(*embed, query)["partitions_written"] == 3
    assert f"FROM (\n{query}\n)" in fake.queries[0]
    assert_all_embedded(surge)
    assert surge.json("verify", "bigquery://p", "out")["violations"] == []
    refused = surge.error(*embed, f"{query} WHERE TRUE")
    assert "holds embeddings of the catalog 'bigquery://p?query=" in refused
