"""Further columns of a source stay beside the rows that they belong to, in types that output files
can have."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.sources.partition import ContentDigest, RowBatch, read_rows
from surge_dagster.engine.sources.selection import OWN_COLUMNS
from surge_dagster.engine.support.values import stored_type
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import batches_of, only


def carried(batch: RowBatch) -> list[dict[str, Any]]:
    assert batch.carried is not None and len(batch.carried) == len(batch)
    return batch.carried.to_pylist()


@pytest.mark.parametrize("name", OWN_COLUMNS)
def test_name_of_a_column_of_the_output_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the column '{name}' cannot be carried"):
        Selection(carried=("sku", name))


def test_name_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="the column 'sku' is named twice in columns"):
        Selection(carried=("sku", "price", "sku"))


def test_id_or_a_column_of_the_template_can_be_carried_too() -> None:
    selection = Selection("sku", "{title}!", carried=("sku", "title"))
    assert selection.columns == ["sku", "title"]
    [batch] = batches_of(selection, sku=["1"], title=["Boot"])
    assert (batch.ids.to_pylist(), batch.texts.to_pylist()) == (["1"], ["Boot!"])
    assert carried(batch) == [{"sku": "1", "title": "Boot"}]


def test_source_version_names_carried_columns_in_their_order_and_nothing_without_them() -> None:
    chosen = [(), ("a", "b"), ("b", "a"), ("a,b",), ("a&columns=b",)]
    suffixes: list[str] = []
    for names in chosen:
        suffixes.append(Selection(carried=names).version_suffix)
    assert suffixes[:2] == ["", "?columns=a&columns=b"]
    assert len(set(suffixes)) == len(chosen)


def test_columns_of_skipped_rows_are_skipped() -> None:
    selection = Selection(missing_text="skip", carried=("price",))
    ids, texts = ["1", "2", "3", "4"], ["one", None, " ", "four"]
    [batch] = batches_of(selection, id=ids, text=texts, price=pa.array([1, 2, 3, None]))
    assert batch.ids.to_pylist() == ["1", "4"] and batch.skipped == 2
    assert carried(batch) == [{"price": 1}, {"price": None}]


def test_type_that_no_file_can_have_is_refused_by_name() -> None:
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    with pytest.raises(
        DataError, match=r"'k': the column 'u' has type sparse_union.* cannot be carried into"
    ):
        batches_of(Selection(carried=("u",)), id=["1"], text=["t"], u=union)


def test_column_with_two_types_in_one_partition_is_refused_with_the_first_row_of_the_other(
    tmp_path: Path,
) -> None:
    (tmp_path / "partition=k").mkdir()
    for name, price in (("a", [1.5, 2.5]), ("b", ["3"])):
        ids, texts = [f"{name}{row}" for row in range(len(price))], ["t"] * len(price)
        pq.write_table(
            pa.table({"id": ids, "text": texts, "price": price}),
            tmp_path / f"partition=k/{name}.parquet",
        )
    change = "the column 'price' has type string from this row on, and double"
    with pytest.raises(DataError, match=rf"row 0 of .*b.parquet: {change}"):
        list(read_rows(only(open_source(tmp_path, selection=Selection(carried=("price",))))))


PRICES: list[tuple[list[list[Any]], pa.DataType]] = [
    ([[None], [2]], pa.int64()),
    ([[2], [None]], pa.int64()),
    ([[], [2]], pa.int64()),
    ([[2], []], pa.int64()),
    ([[None], [], ["2"]], pa.string()),
    ([[None], [[]], [[2]]], pa.list_(pa.int64())),
    ([[{"a": None}], [{"a": 2}]], pa.struct([("a", pa.int64())])),
    ([[None], [None]], pa.string()),
]
# JSON lines have no lists or objects as values.
PRICES_OF_LINES = [case for case in PRICES if not pa.types.is_nested(case[1])]


@pytest.mark.parametrize(
    ("prices", "expected", "ending"),
    [
        *((*case, ending) for ending in ("parquet", "arrow") for case in PRICES),
        *((*case, "jsonl") for case in PRICES_OF_LINES),
    ],
)
def test_nulls_and_files_without_rows_go_with_any_type(
    tmp_path: Path, prices: list[list[Any]], expected: pa.DataType, ending: str
) -> None:
    for number, values in enumerate(prices):
        ids = pa.array([f"{number}"] * len(values), pa.string())
        table = pa.table({"id": ids, "text": ids, "price": values})
        path = tmp_path / "partition=k" / f"{number}.{ending}"
        path.parent.mkdir(exist_ok=True)
        if ending == "parquet":
            pq.write_table(table, path)
        elif ending == "arrow":
            with pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table)
        else:
            path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))

    read = list(read_rows(only(open_source(tmp_path, selection=Selection(carried=("price",))))))

    found = [row["price"] for batch in read for row in carried(batch)]
    assert found == list(chain.from_iterable(prices))
    for batch in read:
        assert batch.carried is not None
        assert batch.carried.schema.field("price").type.equals(stored_type(expected))


def test_content_digest_covers_carried_columns() -> None:
    def digest(price: pa.Array | None, name: str = "price", cut: int = 1) -> str:
        found = ContentDigest()
        columns = None if price is None else pa.RecordBatch.from_arrays([price], [name])
        batch = RowBatch(
            pa.array(["1", "2"]), pa.array(["a", "b"], pa.large_string()), carried=columns
        )  # pyright: ignore[reportArgumentType]
        for part in (batch.rows(0, cut), batch.rows(cut, 2)):
            found.update(part)
        return found.hexdigest()

    prices = [[1, 2], [1, None], [None, 2]]
    others = [digest(pa.array(values, pa.int64())) for values in prices]
    others += [digest(pa.array([1.0, 2.0])), digest(pa.array([1, 2]), name="cost"), digest(None)]
    assert len(set(others)) == len(others)
    assert digest(pa.array([1, 2])) == digest(pa.array([1, 2]), cut=2)
    assert digest(None) == "6cac1af4b91d8d7aa6ff0db6372c5aea"


def test_bytes_of_carried_columns_count_per_row() -> None:
    columns = pa.record_batch({"brand": ["x" * 100, ""], "price": [1.5, None]})
    batch = RowBatch(pa.array([1, 2]), pa.array(["", "t"], pa.large_string()), carried=columns)  # pyright: ignore[reportArgumentType]
    assert batch.carried_sizes is not None and batch.carried_sizes.tolist() == [116, 16]
    assert batch.value_bytes == 16 + 1 + 132
    assert batch.rows(1, 2).value_bytes == 8 + 1 + 16


STRINGS = pa.list_(pa.string())


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (pa.array([["x"]], pa.large_list(pa.string_view())), STRINGS),  # of polars
        (pa.array([{"c": ["x"]}]), pa.struct([("c", STRINGS)])),
        (pa.array([["x"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))), STRINGS),
        # of files by Spark
        (pa.array([["x"]], pa.list_(pa.field("element", pa.string(), nullable=False))), STRINGS),
        (pa.array([["x"]], pa.list_(pa.string_view(), 1)), pa.list_(pa.string(), 1)),
        (pa.array([[]], pa.list_(pa.null())), STRINGS),
        (pa.array([[1]], pa.list_(pa.int8())), pa.list_(pa.int8())),
        (pa.array([1], pa.int8()), pa.int64()),
        (pa.array(["x"]).dictionary_encode(), pa.string()),
        (pa.array([None]), pa.string()),
        (pa.array([0], pa.timestamp("s")), pa.timestamp("ms")),
    ],
    ids=str,
)
def test_types_are_those_of_every_kind_of_source(given: pa.Array, kind: pa.DataType) -> None:
    [batch] = batches_of(Selection(carried=("c",)), id=["1"], text=["t"], c=given)

    assert batch.carried is not None
    assert str(batch.carried.schema.field("c").type) == str(kind)
    assert carried(batch) == [{"c": given.to_pylist()[0]}]
