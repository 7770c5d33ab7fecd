"""BigQuery, through Google's own clients and a fake of both its APIs: the rows of folders, whatever
breaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.tables import bigquery as module
from surge_dagster.engine.tables.bigquery import BigQueryCatalog
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import partitions_of, refusal, rows_of
from tests.engine.sources.tables import contents, versions
from tests.engine.tables.bigquery_fake import CATALOG, SOURCE, TABLE, FakeBigQuery, table_of
from tests.engine.tables.test_frames import content
from tests.small_catalogs import write_catalog

_ONLY = r'surge_key IN ("[\"ß\"]")'


class Service:
    """A running fake, and sources on it."""

    def __init__(self, fake: FakeBigQuery, clients: tuple[Any, Any]) -> None:
        self.fake = fake
        self._clients = clients
        self.now = 0.0

    def open(
        self, source: str = SOURCE, partition_by: tuple[str, ...] = ("category",), **options: Any
    ) -> BigQueryCatalog:
        client, storage = self._clients
        return BigQueryCatalog(
            client,
            source,
            partition_by,
            open_storage=lambda: storage,
            clock=lambda: self.now,
            **options,
        )


@pytest.fixture
def service() -> Iterator[Service]:
    fake = FakeBigQuery(table_of(CATALOG))
    with fake.serve() as clients:
        yield Service(fake, clients)


@pytest.mark.parametrize(
    ("source", "query"),
    [(SOURCE, None), ("bigquery://p", f"SELECT * FROM `{TABLE}`;\n")],
    ids=["table", "query"],
)
def test_a_table_and_a_query_give_what_folders_give(
    service: Service, source: str, query: str | None, tmp_path: Path
) -> None:
    folders = open_source(write_catalog(tmp_path / "catalog", CATALOG))
    found = service.open(source, query=query)
    assert content(found) == content(folders)
    for partition in found:
        assert partition.rows == len(CATALOG[partition.key])


def test_a_run_over_all_partitions_makes_two_queries_and_few_sessions(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SESSION_KEYS", 10)
    for partition in service.open():
        rows_of(partition)

    assert len(service.fake.queries) == 2
    assert [each.count("]") for each in service.fake.sessions] == [10, 10, 4]


def test_a_partition_that_is_read_again_needs_no_further_session(service: Service) -> None:
    [first, *_] = service.open()
    for _ in range(2):
        assert rows_of(first) == CATALOG["a"]
    assert len(service.fake.sessions) == 1


def test_a_partition_larger_than_a_session_is_sorted_and_streamed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SESSION_BYTES", 600)
    found = partitions_of(service.open())
    assert rows_of(found["ß"]) == CATALOG["ß"]
    assert service.fake.queries[-1].endswith(f"WHERE {_ONLY}\nORDER BY `id`")
    assert len(list(found["ß"].read())) > 5  # message by message
    # of all rows
    for query in service.fake.queries:
        assert not query.endswith(f"FROM `{TABLE}`")
    assert rows_of(found["b"]) == CATALOG["b"]


@pytest.mark.parametrize("session_bytes", [1, module._SESSION_BYTES], ids=["streamed", "held"])
def test_the_same_row_of_a_repeated_id_is_kept_each_time(
    service: Service, monkeypatch: pytest.MonkeyPatch, session_bytes: int
) -> None:
    monkeypatch.setattr(module, "_SESSION_BYTES", session_bytes)
    rows = table_of({"a": [("1", "second"), ("1", "first"), ("2", "third")]})
    kept: list[list[tuple[object, str]]] = []

    for order in ([0, 1, 2], [2, 1, 0]):
        service.fake.replace(rows.take(order))
        [partition] = service.open(selection=Selection(bad_rows="set_aside"))
        kept.append(rows_of(partition))

    assert kept == [[("1", "first"), ("2", "third")]] * 2


def test_an_ended_session_is_transient_and_a_new_reading_opens_another(service: Service) -> None:
    [first, *_] = service.open()
    service.fake.refused["ReadRows"] = (
        StatusCode.FAILED_PRECONDITION,
        "session expired at 2026-01-01T00:00:00+00:00",
    )
    with pytest.raises(
        TransientError,
        match=r"partition 'a'.*the read session ended \(400 session expired.*Run again",
    ):
        rows_of(first)
    service.fake.refused.clear()
    assert rows_of(first) == CATALOG["a"]


def test_a_missing_permission_is_refused_with_the_roles_and_not_retried(service: Service) -> None:
    [first, *_] = service.open()
    denied = "the user does not have 'bigquery.readsessions.create' permission"
    service.fake.refused["CreateReadSession"] = (StatusCode.PERMISSION_DENIED, denied)

    with pytest.raises(ConfigError, match=rf"{denied}.*Grant the account the roles bigquery.job"):
        rows_of(first)


def test_a_changed_schema_is_named_with_a_remedy(service: Service) -> None:
    [first, *_] = service.open()
    service.fake.replace(service.fake.table.rename_columns(["category", "id", "title", "changed"]))
    with pytest.raises(
        ConfigError,
        match=r"partition 'a'.*Unrecognized name: text.*Check the settings source or query",
    ):
        rows_of(first)
    with pytest.raises(ConfigError, match="Unrecognized name: text"):
        list(service.open())


def test_ids_that_cannot_be_sorted_are_refused(service: Service) -> None:
    ids = [[7]] * len(service.fake.table)
    service.fake.replace(service.fake.table.set_column(1, "id", [ids]))
    [first, *_] = service.open()
    with pytest.raises(ConfigError, match=r"the column 'id' has type list.*with the setting id"):
        rows_of(first)


def test_version_moves_with_the_rows_of_a_modified_table(
    service: Service,
) -> None:
    source = service.open()
    listed = partitions_of(source)
    changed = {**CATALOG, "a": [*CATALOG["a"][:-1], (CATALOG["a"][-1][0], "another text")]}
    del changed["b"]
    service.fake.replace(table_of(changed))
    queries = len(service.fake.queries)
    # looked at a moment ago
    assert listed["a"].current_source_version() == listed["a"].source_version
    service.now += 60
    assert listed["a"].current_source_version() != listed["a"].source_version
    assert listed["b"].current_source_version() is None
    assert listed["ß"].current_source_version() == listed["ß"].source_version
    assert len(service.fake.queries) == queries + 1
    assert versions(source)["ß"] == listed["ß"].source_version


def test_version_moves_with_a_row_that_the_table_has_twice(service: Service) -> None:
    selection = Selection(bad_rows="set_aside")
    twice = [("1", "a text"), ("1", "a text"), ("2", "the other row")]
    service.fake.replace(table_of({"a": twice}))
    before = versions(service.open(selection=selection))

    changed = [("1", "another text"), ("1", "another text"), ("2", "the other row")]
    service.fake.replace(table_of({"a": changed}))

    assert versions(service.open(selection=selection)) != before


def test_a_table_is_listed_by_a_query_only_after_it_was_modified(service: Service) -> None:
    before = versions(service.open())
    assert versions(service.open()) == before and len(service.fake.queries) == 1
    service.fake.replace(table_of({"a": CATALOG["a"]}))
    assert versions(service.open()).keys() == {"a"} and len(service.fake.queries) == 2


def test_partitions_of_two_listings_have_their_own_rows(
    service: Service,
) -> None:
    catalog = service.open()
    before = partitions_of(catalog)
    rows_of(before["b"])
    changed = {"0": [("new", "a row before all others")], **CATALOG}
    service.fake.replace(table_of(changed))
    service.now += 60
    after = partitions_of(catalog)
    assert rows_of(after["0"]) == changed["0"] and rows_of(after["b"]) == CATALOG["b"]
    assert rows_of(before["b"]) == CATALOG["b"] and rows_of(after["0"]) == changed["0"]


def test_version_is_the_newest_change_where_a_column_says_it(service: Service) -> None:
    before = versions(service.open(updated_at="changed"))
    assert before["b"] == "2-1"
    changed = [*service.fake.table["changed"].to_pylist()]
    newest = service.fake.table["category"].to_pylist().index("b")
    changed[newest] = 99
    service.fake.replace(service.fake.table.set_column(3, "changed", [changed]))
    after = versions(service.open(updated_at="changed"))
    assert dict(before.items() - after.items()).keys() == {"b"}


def test_several_columns_make_one_key(
    service: Service,
) -> None:
    selection = Selection(text="category")
    found = partitions_of(service.open(partition_by=("category", "changed"), selection=selection))
    assert rows_of(found["category=it%27s%2C%20%5C50%25/changed=3"]) == [
        (CATALOG["it's, \\50%"][3][0], "it's, \\50%")
    ]
    for each in found.values():
        assert each.source_version.endswith("?text_column=category")


def test_rows_without_a_key_are_refused_and_the_others_are_read(service: Service) -> None:
    none = {"b": None, "c0": "", "c1": "__HIVE_DEFAULT_PARTITION__"}
    keys = [none.get(key, key) for key in service.fake.table["category"].to_pylist()]
    service.fake.replace(service.fake.table.set_column(0, "category", [keys]))
    [bad, *good] = sorted(service.open(), key=lambda each: not each.key.startswith("__"))
    assert "8 rows without a key, since 'category' is null" in str(refusal(bad))
    found = contents(good)
    assert found.keys() == CATALOG.keys() - none.keys()
    assert found.items() <= CATALOG.items()


def test_rows_without_a_key_can_be_set_aside_in_one_partition(service: Service) -> None:
    none = {"b": None, "c0": "", "c1": "__HIVE_DEFAULT_PARTITION__"}
    keys = [none.get(key, key) for key in service.fake.table["category"].to_pylist()]
    service.fake.replace(service.fake.table.set_column(0, "category", [keys]))
    selection = Selection(bad_rows="set_aside")
    by = ("category", "changed")

    found = partitions_of(service.open(partition_by=by, selection=selection))
    rejected = [row for batch in found["unassigned"].read() for row in batch.rejected]

    assert sum(len(batch) for batch in found["unassigned"].read()) == 0
    assert [row.row for row in rejected] == list(range(8))
    assert {row.id for row in rejected} == {row[0] for key in none for row in CATALOG[key]}
    assert {row.reason for row in rejected} == {
        "the row has no key, since 'category' is null, empty or not UTF-8"
    }
    assert found["unassigned"].source_rows == 8
    assert not [key for key in found if "HIVE" in key]


def test_an_empty_table_has_no_partitions(service: Service) -> None:
    service.fake.replace(service.fake.table.slice(0, 0))
    assert list(service.open()) == []


@pytest.mark.parametrize(
    ("source", "query"), [("bigquery://shop.products", None), (SOURCE, "SELECT 1")]
)
def test_source_that_is_no_table_or_project_is_refused(
    service: Service, source: str, query: str | None
) -> None:
    with pytest.raises(ConfigError, match=r"Give a table as bigquery://project\.dataset\.table"):
        service.open(source, query=query)


def test_source_without_partition_by_is_refused(service: Service) -> None:
    with pytest.raises(ConfigError, match="needs the setting partition_by"):
        service.open(partition_by=())
