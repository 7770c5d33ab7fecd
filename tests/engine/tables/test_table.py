"""A table in any order gives the partitions that folders with the same rows would give, with
versions by content."""

from __future__ import annotations

import datetime
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.sources import Selection, csv_files
from surge_dagster.engine.support.keys import joined_key
from surge_dagster.engine.tables import grouping, table
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import partitions_of, refusal, rows_of
from tests.engine.sources.tables import (
    by_key,
    contents,
    shuffled_rows,
    table_of,
    versions,
    write_csv,
    write_parquet,
)
from tests.small_catalogs import keys_of

ROWS = shuffled_rows(5_000, 300)


pytestmark = pytest.mark.usefixtures("own_cache")  # every test groups its table itself


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds so small that blocks are divided, and files of rows are divided again."""
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(table, "_BLOCK_ROWS", 700)
    monkeypatch.setattr(grouping, "_FILES", 4)
    monkeypatch.setattr(grouping, "_HELD_BYTES", 2_000)


class TestRows:
    def test_every_row_is_in_its_partition_in_the_order_of_the_table(self, tmp_path: Path) -> None:
        source = table_of(write_csv(tmp_path / "t.csv", ROWS))
        assert contents(source) == by_key(ROWS)

    @pytest.mark.usefixtures("small_memory")
    def test_rows_that_do_not_fit_in_memory_are_grouped_alike(self, tmp_path: Path) -> None:
        source = table_of(write_csv(tmp_path / "t.csv", ROWS))
        assert contents(source) == by_key(ROWS)

    def test_partitions_are_listed_in_order_with_their_rows(self, tmp_path: Path) -> None:
        listed = list(table_of(write_csv(tmp_path / "t.csv", ROWS)))
        expected = by_key(ROWS)
        assert keys_of(listed) == sorted(expected)
        for partition in listed:
            assert partition.rows == len(expected[partition.key])

    @pytest.mark.usefixtures("small_memory")
    def test_key_with_most_of_the_rows_is_grouped(self, tmp_path: Path) -> None:
        rows = [(row, "t" * 50, "huge" if row % 10 else f"k{row % 7}") for row in range(4_000)]
        assert contents(table_of(write_parquet(tmp_path / "t.parquet", rows))) == by_key(rows)

    def test_files_follow_each_other_in_the_order_of_their_names(self, tmp_path: Path) -> None:
        for place in range(5):
            write_parquet(tmp_path / f"{place}.parquet", ROWS[place * 1000 : (place + 1) * 1000])
        assert contents(table_of(tmp_path)) == by_key(ROWS)
        assert contents(table_of(f"{tmp_path}/*.parquet")) == by_key(ROWS)

    @pytest.mark.parametrize(
        "keys", [[5, 7, 5], [True, False, True], [datetime.date(2024, 1, 2)] * 3]
    )
    def test_keys_need_not_be_strings(self, tmp_path: Path, keys: list[object]) -> None:
        rows = [(str(place), "t", key) for place, key in enumerate(keys)]
        expected = by_key([(row[0], "t", str(row[2]).lower()) for row in rows])
        assert contents(table_of(write_parquet(tmp_path / "t.parquet", rows))) == expected


class TestVersions:
    def test_unchanged_partition_of_a_rewritten_table_keeps_its_version(
        self, tmp_path: Path
    ) -> None:
        before = versions(table_of(write_csv(tmp_path / "t.csv", ROWS)))
        changed = [(row[0], "other" if row[0] == "id-17" else row[1], row[2]) for row in ROWS]
        after = versions(table_of(write_csv(tmp_path / "t.csv", changed)))
        assert dict(before.items() - after.items()).keys() == {ROWS[17][2]}

    def test_version_depends_on_the_order_within_a_key_alone(self, tmp_path: Path) -> None:
        by_category = sorted(ROWS, key=lambda row: row[2])
        in_order = versions(table_of(write_parquet(tmp_path / "a.parquet", by_category)))
        assert versions(table_of(write_parquet(tmp_path / "b.parquet", ROWS))) == in_order
        assert versions(table_of(write_parquet(tmp_path / "c.parquet", ROWS[::-1]))) != in_order

    def test_changed_file_is_seen_at_the_next_look(self, tmp_path: Path) -> None:
        now = [0.0]
        [partition, *_] = table_of(write_csv(tmp_path / "t.csv", ROWS), clock=lambda: now[0])
        write_csv(tmp_path / "t.csv", ROWS[:-1])
        assert partition.current_source_version() == partition.source_version
        now[0] = 2.0
        assert partition.current_source_version() not in (None, partition.source_version)
        (tmp_path / "t.csv").unlink()
        now[0] = 4.0
        assert partition.current_source_version() is None

    def test_table_that_is_replaced_before_it_is_read_is_transient(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "t.csv", ROWS)
        list(table_of(path))  # so that the next listing reads nothing
        listed = list(table_of(path))
        write_csv(tmp_path / "t.csv", [(f"x{row[0]}", *row[1:]) for row in ROWS])
        with pytest.raises(TransientError, match="changed"):
            list(listed[3].read())


class TestRefusals:
    @pytest.mark.parametrize("bad", ["", None])
    def test_rows_without_a_key_are_refused_and_the_others_go_on(
        self, tmp_path: Path, bad: str | None
    ) -> None:
        rows = [*ROWS[:100], ("a", "t", bad), *ROWS[100:], ("b", "t", bad)]
        listed = partitions_of(table_of(write_parquet(tmp_path / "t.parquet", rows)))
        refused = listed["__HIVE_DEFAULT_PARTITION__"]
        with pytest.raises(
            DataError, match=r"2 rows without a key.*the first is row 100 of t\.parquet"
        ):
            list(refused.read())
        assert listed.keys() == {*by_key(ROWS), refused.key}

    def test_key_that_is_not_utf8_is_refused_and_the_others_go_on(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_bytes(b"id,text,category\n1,a,caf\xe9\n2,b,tea\n")
        refused, tea = list(table_of(tmp_path / "t.csv"))
        assert tea.key == "tea"
        with pytest.raises(DataError, match=r"row 0 of t\.csv"):
            list(refused.read())

    def test_bad_row_is_named_with_its_place_in_the_file(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "0.parquet", ROWS[:2_000])
        bad = [*ROWS[2_000:3_000], ("x", None, ROWS[3_000][2]), *ROWS[3_000:]]
        write_parquet(tmp_path / "1.parquet", bad)
        partition = partitions_of(table_of(tmp_path))[ROWS[3_000][2]]
        with pytest.raises(DataError, match=r"row 1,000 of 1\.parquet") as caught:
            list(partition.read())
        assert caught.value.row == [row[2] for row in ROWS[:3_000]].count(ROWS[3_000][2])

    def test_files_of_different_types_are_refused_with_both_names(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "a.parquet", [("1", "t", "k")])
        write_parquet(tmp_path / "b.parquet", [(1, "t", "k")])
        with pytest.raises(
            ConfigError, match=r"'id' has type string in a\.parquet and int64 in b\.parquet"
        ):
            list(table_of(tmp_path))

    def test_column_of_numbers_with_fractions_is_no_key(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="has type double and cannot be a key"):
            list(table_of(write_parquet(tmp_path / "t.parquet", [("1", "t", 0.5)])))

    def test_folder_without_files_of_a_known_format_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "t").mkdir()
        with pytest.raises(ConfigError, match="has no file"):
            list(table_of(tmp_path / "t"))


class TestGroupedRows:
    def test_same_files_are_read_once_to_be_listed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_csv(tmp_path / "t.csv", ROWS)
        first = versions(table_of(path))
        monkeypatch.setattr(table, "GroupedRows", None)
        assert versions(table_of(path)) == first

    def test_partitions_that_another_process_listed_are_read(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "t.csv", ROWS)
        list(table_of(path))
        assert contents(table_of(path)) == by_key(ROWS)

    @pytest.mark.usefixtures("small_memory")
    def test_grouped_rows_are_files_without_names(self, tmp_path: Path, own_cache: Path) -> None:
        source = table_of(write_csv(tmp_path / "t.csv", ROWS))
        list(source)
        assert list((own_cache / "tables" / "rows").iterdir()) == []

    @pytest.mark.parametrize("content", [b"", b"{}", b'{"version": 1}', b'{"groups": [[]]}'])
    def test_damaged_index_is_made_again(
        self, tmp_path: Path, own_cache: Path, content: bytes
    ) -> None:
        path = write_csv(tmp_path / "t.csv", ROWS)
        list(table_of(path))
        [index] = own_cache.glob("tables/*.json")
        index.write_bytes(content)
        assert contents(table_of(path)) == by_key(ROWS)

    def test_rows_that_differ_from_the_index_are_not_read(
        self, tmp_path: Path, own_cache: Path
    ) -> None:
        path = write_csv(tmp_path / "t.csv", ROWS)
        before = versions(table_of(path))
        [index] = own_cache.glob("tables/*.json")
        index.write_text(index.read_text().replace(before[ROWS[0][2]], "0" * 32))
        partitions = partitions_of(table_of(path))

        with pytest.raises(TransientError, match="its rows are not those that were listed"):
            list(partitions[ROWS[0][2]].read())
        assert versions(table_of(path)) == before

    def test_cache_that_cannot_be_written_is_refused_with_the_setting(
        self, tmp_path: Path, own_cache: Path
    ) -> None:
        source = table_of(write_csv(tmp_path / "t.csv", ROWS))
        (own_cache / "tables").touch()
        with pytest.raises(ConfigError, match="SURGE_CACHE_DIR"):
            list(source)


def test_rows_of_eight_key_columns_with_many_values_have_their_own_keys(tmp_path: Path) -> None:
    names = [f"k{place}" for place in range(8)]
    rows = [
        (str(row), f"text {row}", *(f"{row * (place + 1) % 300}" for place in range(8)))
        for row in range(300)
    ]
    path = write_csv(tmp_path / "t.csv", rows, ("id", "text", *names))
    expected = {joined_key(dict(zip(names, row[2:], strict=True))): [row[:2]] for row in rows}
    assert contents(table_of(path, *names)) == expected


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(("null", "value"), [(None, 7), ([None], [7])])
def test_column_of_nulls_goes_with_any_type(
    tmp_path: Path, place: int, null: Any, value: Any
) -> None:
    prices = [value] * 3
    prices[place] = null
    for number, price in enumerate(prices):
        columns = {"id": [number], "text": ["x"], "category": ["a"], "price": [price]}
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet")

    [partition] = table_of(tmp_path, selection=Selection(carried=("price",)))

    carried = [batch.carried for batch in partition.read()]
    assert pa.Table.from_batches(carried)["price"].to_pylist() == prices


def test_null_id_refuses_only_its_own_rows(tmp_path: Path) -> None:
    for name, ids in (("0", pa.array([1])), ("1", pa.nulls(1))):
        columns = {"id": ids, "text": ["x"], "category": [name]}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    one, other = table_of(tmp_path)
    assert rows_of(one) == [(1, "x")]
    assert "the id is null" in str(refusal(other))


def test_file_without_rows_states_no_type(tmp_path: Path) -> None:
    empty = {"id": pa.array([], pa.float64()), "text": pa.nulls(0), "category": pa.nulls(0)}
    pq.write_table(pa.table(empty), tmp_path / "0.parquet")
    write_parquet(tmp_path / "1.parquet", ROWS)
    assert contents(table_of(tmp_path)) == by_key(ROWS)


def test_csv_table_that_is_not_utf8_is_read_with_its_encoding(
    tmp_path: Path,
) -> None:
    path = tmp_path / "products.csv"
    rows = [("grün", "1", "Stiefel"), ("blau", "2", "Hüte"), ("grün", "3", "Schuhe")]
    path.write_bytes("\n".join(["color,id,text", *map(",".join, rows)]).encode("cp1252"))
    unnamed, blue = open_source(path, partition_by="color")
    assert refusal(unnamed).remedy.endswith("for a CSV file that is not UTF-8, set encoding.")
    assert "set encoding for a CSV file" in refusal(blue).remedy
    read = open_source(path, partition_by="color", encoding="Windows-1252")
    assert contents(read) == {
        "blau": [("2", "Hüte")],
        "grün": [("1", "Stiefel"), ("3", "Schuhe")],
    }


def test_escape_is_that_of_every_reading_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('id,text,category\n1,"say \\"hi\\", now",x\n2,b,y\n3,c,x\n')

    read = open_source(path, partition_by="category", escape="\\")

    assert contents(read) == {"x": [("1", 'say "hi", now'), ("3", "c")], "y": [("2", "b")]}
    for each in read:
        assert each.source_version.endswith("?escape=%5C")
    with pytest.raises(ConfigError, match=r"row 0 .* set escape to it"):
        list(open_source(path, partition_by="category"))


def test_uuid_is_a_key_and_a_day_outside_of_the_calendar_is_refused(tmp_path: Path) -> None:
    key = uuid.UUID(bytes=b"all of it is ASC")
    days = pa.array([0, 2**62], pa.date64())
    ids = pa.array([key.bytes, key.bytes], pa.uuid())
    table = pa.table({"id": ["1", "2"], "text": ["a", "b"], "category": ids, "day": days})
    with pa.ipc.new_file(str(tmp_path / "t.arrow"), table.schema) as writer:
        writer.write_table(table)

    read = open_source(tmp_path / "t.arrow", partition_by="category")

    assert contents(read) == {str(key): [("1", "a"), ("2", "b")]}
    with pytest.raises(ConfigError, match=r"'day' of t.arrow has a date64\[ms\] outside of"):
        list(open_source(tmp_path / "t.arrow", partition_by="day"))
