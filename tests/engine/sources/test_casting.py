"""Values that have to become another type: in their usual form, or refused by key, column and
row."""

from __future__ import annotations

import uuid
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources import Selection, open_folders
from tests.engine.sources.reading import batches_of, only, refusal, rows_of

UUIDS = [uuid.UUID(bytes=b"all of it is ASC"), uuid.UUID(int=7)]
AS_TEXT = [str(each) for each in UUIDS]
LATE = 2**62


def uuid_column() -> pa.Array:
    return pa.array([each.bytes for each in UUIDS], pa.uuid())


def test_uuid_is_read_in_its_usual_form_as_id_text_and_carried_column(tmp_path: Path) -> None:
    table = pa.table({"id": uuid_column(), "text": uuid_column(), "more": uuid_column()})
    pq.write_table(table, tmp_path / "k.parquet", store_schema=False)

    partition = only(open_folders(tmp_path, Selection(carried=("more",))))

    assert rows_of(partition) == list(zip(AS_TEXT, AS_TEXT, strict=True))
    [batch] = partition.read()
    assert batch.carried is not None
    assert batch.carried.to_pylist() == [{"more": text} for text in AS_TEXT]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (uuid_column(), AS_TEXT),
        (pa.array(['{"a": 1}', "2"], pa.json_()), ['{"a": 1}', "2"]),
        (pa.array([1, -1], pa.bool8()), ["1", "-1"]),
        (pa.RunEndEncodedArray.from_arrays([2], ["text"]), ["text", "text"]),
        (pa.array([1.5, 2.0], pa.float16()), ["1.5", "2"]),
        (pa.array([Decimal("19.90"), Decimal("0.05")]), ["19.90", "0.05"]),
        (pa.array([True, False]), ["true", "false"]),
        (pa.array([date(2024, 2, 29), date(1, 1, 1)]), ["2024-02-29", "0001-01-01"]),
        (pa.array(["red", "blue"], pa.string_view()), ["red", "blue"]),
    ],
)
def test_column_of_a_template_is_written_in_its_usual_form(
    values: pa.Array, shown: list[str]
) -> None:
    [batch] = batches_of(Selection(text="{other}|"), id=["1", "2"], other=values)

    assert batch.texts.to_pylist() == [f"{text}|" for text in shown]


def test_json_column_is_a_text() -> None:
    [batch] = batches_of(Selection(), id=["1"], text=pa.array(['{"a": 1}'], pa.json_()))

    assert batch.texts.to_pylist() == ['{"a": 1}']


@pytest.mark.parametrize(
    "values",
    [
        pa.array([["text"]] * 2),
        pa.array([{"a": "text"}] * 2),
        pa.array([b"text", b"text"]),
        pa.array([b"text", b"text"], pa.binary(4)),
        pa.array([b"text", b"text"], pa.binary_view()),
        pa.array([(1, 2, 3)] * 2, pa.month_day_nano_interval()),
        pa.array([b"text", b"text"]).dictionary_encode(),
        pa.FixedShapeTensorArray.from_numpy_ndarray(
            pa.array([1, 2, 3, 4]).to_numpy().reshape(2, 2).copy()
        ),
    ],
    ids=lambda values: str(values.type)[:20],
)
def test_type_without_a_usual_form_is_refused_in_a_template_by_name(values: pa.Array) -> None:
    with pytest.raises(DataError, match=r"partition 'k'.*: the column 'other' "):
        batches_of(Selection(text="{other}"), id=["1", "2"], other=values)


@pytest.mark.parametrize(
    ("values", "row", "reason"),
    [
        (pa.array([1, 2], pa.timestamp("s", "Nowhere/City")), 100, "timezone 'Nowhere/City'"),
        (pa.array([1, LATE], pa.timestamp("s")), 101, "outside of the calendar"),
        (pa.array([1, LATE], pa.timestamp("s", "Europe/Berlin")), 101, "outside of the calendar"),
        (pa.array([1, LATE], pa.date64()), 101, "outside of the calendar"),
    ],
)
def test_time_that_cannot_be_written_in_a_template_is_refused_with_its_row(
    values: pa.Array, row: int, reason: str
) -> None:
    with pytest.raises(DataError, match=f"partition 'k', row {row}: the column 'at' .*{reason}"):
        batches_of(Selection(text="{at}"), id=["1", "2"], at=values)


def test_carried_timestamp_that_overflows_is_refused_with_its_row(tmp_path: Path) -> None:
    table = pa.table({"id": ["1", "2"], "text": ["a", "b"], "at": [1, LATE]})
    table = table.set_column(2, "at", table["at"].cast(pa.timestamp("s")))
    (tmp_path / "k.arrow").touch()
    with pa.ipc.new_file(str(tmp_path / "k.arrow"), table.schema) as writer:
        writer.write_table(table)

    refused = refusal(only(open_folders(tmp_path, Selection(carried=("at",)))))

    assert str(refused).startswith("partition 'k', row 1: the column 'at' cannot be read as times")


def test_carried_timestamp_of_an_unknown_zone_keeps_its_value() -> None:
    at = pa.array([1, None], pa.timestamp("ms", "Nowhere/City"))

    [batch] = batches_of(Selection(carried=("at",)), id=["1", "2"], text=["a", "b"], at=at)

    assert batch.carried is not None
    assert batch.carried.column("at").cast(pa.int64()).to_pylist() == [1, None]


def test_id_beyond_int64_is_refused_with_its_row() -> None:
    ids = pa.array([1, 2**63], pa.uint64())

    with pytest.raises(
        DataError, match="partition 'k', row 101: the column 'id' cannot be read as"
    ):
        batches_of(Selection(), id=ids, text=["a", "b"])


@pytest.mark.parametrize("kind", [pa.list_(pa.uuid()), pa.struct([("u", pa.uuid())])])
def test_uuids_inside_of_others_are_refused_by_name(kind: pa.DataType) -> None:
    nested = pa.nulls(1, kind)

    with pytest.raises(DataError, match=r"the column 'u' has type .*uuid.* cannot be carried"):
        batches_of(Selection(carried=("u",)), id=["1"], text=["a"], u=nested)
