"""Keys of a table's rows: of many columns, of columns that are selected too, and of values that stand for none."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support.keys import joined_key
from tests.engine.sources.tables import contents, table_of, write_csv


def test_rows_of_eight_key_columns_with_many_values_have_their_own_keys(tmp_path: Path) -> None:
    names = [f"k{place}" for place in range(8)]
    rows = [(str(row), f"text {row}", *(f"{row * (place + 1) % 300}" for place in range(8))) for row in range(300)]
    path = write_csv(tmp_path / "t.csv", rows, ("id", "text", *names))
    expected = {joined_key(dict(zip(names, row[2:], strict=True))): [row[:2]] for row in rows}
    assert contents(table_of(path, *names)) == expected


@pytest.mark.parametrize("keys", ["aab", "aba"])
def test_key_column_may_be_part_of_the_text(tmp_path: Path, keys: str) -> None:
    path = write_csv(tmp_path / "t.csv", [(str(row), "x", key) for row, key in enumerate(keys)])
    found = contents(table_of(path, selection=Selection(text="{category}: {text}")))
    expected = {key: [(str(row), f"{key}: x") for row, other in enumerate(keys) if other == key] for key in "ab"}
    assert found == expected


def test_name_of_the_partition_without_a_key_is_refused_with_the_rows_that_have_none(tmp_path: Path) -> None:
    rows = [("0", "x", "a"), ("1", "x", ""), ("2", "x", "__HIVE_DEFAULT_PARTITION__")]
    partitions = {partition.key: partition for partition in table_of(write_csv(tmp_path / "t.csv", rows))}
    assert partitions.keys() == {"a", "__HIVE_DEFAULT_PARTITION__"}
    with pytest.raises(DataError, match="2 rows have no key"):
        list(partitions["__HIVE_DEFAULT_PARTITION__"].read())


def test_later_file_may_have_nothing_but_nulls_in_a_column(tmp_path: Path) -> None:
    for name, ids in (("0", [1, 2]), ("1", [3])):
        columns = {"id": ids, "text": ["x"] * len(ids), "category": ["a"] * len(ids)}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    nulls = pa.table({"id": pa.nulls(1), "text": ["x"], "category": ["b"]})
    pq.write_table(nulls, tmp_path / "2.parquet")
    partitions = {partition.key: partition for partition in table_of(tmp_path)}
    assert list(itertools.chain.from_iterable(b.ids.to_pylist() for b in partitions["a"].read())) == [1, 2, 3]
    with pytest.raises(DataError, match="the id is null"):
        list(partitions["b"].read())


def test_table_in_order_is_read_once_whatever_the_order_of_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_csv(tmp_path / "t.csv", [(str(row), "x", f"key {-row % 50}") for row in range(50)])
    source = table_of(path)
    partitions = list(source)
    opened: list[int] = []
    read = source._rows
    monkeypatch.setattr(source, "_rows", lambda index: opened.append(1) or read(index))
    assert [batch.ids[0].as_py() for partition in partitions for batch in partition.read()] == list(map(str, range(50)))
    assert len(opened) == 1
