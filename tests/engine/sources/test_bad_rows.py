"""Bad rows with `bad_rows: set_aside`: each is named, and the others come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources import checked_rows as checked_rows_module
from surge_dagster.engine.sources.bad_rows import FirstIds, is_not_utf8
from surge_dagster.engine.sources.checked_rows import checked_rows
from surge_dagster.engine.sources.partition import RejectedRow, RowBatch
from surge_dagster.engine.sources.selection import Selection
from tests.engine.sources.reading import batches_of

NO_ID = "the id is null; every row needs one"
NO_TEXT = "the text is null; every row needs one"
BLANK = "the text is null or blank; every row needs one"
REPEATED = "the id is repeated; the first row that has it is kept"


def strings(*values: str | bytes | None) -> pa.Array:
    """A column of strings, with bytes that need not be UTF-8."""
    return pa.array(values, pa.binary()).view(pa.string())


def named(batches: Sequence[RowBatch]) -> list[tuple[int, str | None, str]]:
    return [(row.row, row.id, row.reason) for batch in batches for row in batch.rejected]


def ids_of(batches: Sequence[RowBatch]) -> list[Any]:
    return [value for batch in batches for value in batch.ids.to_pylist()]


def source_rows(batches: Sequence[RowBatch]) -> int:
    return sum(each.source_rows + each.skipped + len(each.rejected) for each in batches)


# columns, settings, ids that remain, and the rejected rows; the batch begins at row 100
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[Any], list[Any]]] = {
    "nothing": ({"id": [1, 2], "text": ["a", " "]}, {}, [1, 2], []),
    "null id": ({"id": ["1", None], "text": ["a", "b"]}, {}, ["1"], [(101, None, NO_ID)]),
    "null text": ({"id": [1, 2], "text": [None, "b"]}, {}, [2], [(100, "1", NO_TEXT)]),
    "blank text": (
        {"id": ["1", "2"], "text": [" ", "b"]},
        {"missing_text": "refuse"},
        ["2"],
        [(100, "1", BLANK)],
    ),
    "null text is skipped": (
        {"id": [None, "2", None], "text": [None, "b", "c"]},
        {"missing_text": "skip"},
        ["2"],
        [(102, None, NO_ID)],
    ),
    "null text is empty": (
        {"id": ["1", None], "text": [None, "b"]},
        {"missing_text": "empty"},
        ["1"],
        [(101, None, NO_ID)],
    ),
    "long text": (
        {"id": [b"a", b"\xff"], "text": ["a", "ßß"]},
        {"max_text_bytes": 3},
        [b"a"],
        [(101, "\\xff", "the text has 4 bytes; at most 3 are allowed")],
    ),
    "text that is not UTF-8": (
        {"id": ["1", "2", "3"], "text": strings(b"a\xff", " ", "c")},
        {"missing_text": "skip"},
        ["3"],
        [(100, "1", "the text is not valid UTF-8")],
    ),
    "id that is not UTF-8": (
        {"id": strings(b"\xc3", "2"), "text": ["a", "b"]},
        {},
        ["2"],
        [(100, None, "the id is not valid UTF-8")],
    ),
    "carried value that is not UTF-8": (
        {"id": [1, 2], "text": ["a", "b"], "sku": strings("x", b"\xff")},
        {"carried": ("sku",)},
        [1],
        [(101, "2", "the sku is not valid UTF-8")],
    ),
    "carried list that is not UTF-8": (
        {
            "id": [1, 2],
            "text": ["a", "b"],
            "sku": pa.ListArray.from_arrays(
                pa.array([0, 2, 3], pa.int32()), strings("x", b"\xff", "")
            ),
        },
        {"carried": ("sku",)},
        [2],
        [(100, "1", "the sku is not valid UTF-8")],
    ),
    "template": (
        {"id": [1, 2, 3], "a": strings("x", b"\xff", None), "b": [None, 5, None]},
        {"text": "{a}.{b}"},
        [1],
        [(101, "2", "the text is not valid UTF-8"), (102, "3", NO_TEXT)],
    ),
    "repeated id": (
        {"id": ["1", "2", "1", None, "1"], "text": ["a", "b", "c", "d", "e"]},
        {},
        ["1", "2"],
        [(102, "1", REPEATED), (103, None, NO_ID), (104, "1", REPEATED)],
    ),
    "repeated id after skipped rows": (
        {"id": [7, 7, 7], "text": ["", "b", "c"]},
        {"missing_text": "skip"},
        [7],
        [(102, "7", REPEATED)],
    ),
    "id of a bad row is not taken": (
        {"id": ["1", "1"], "text": [None, "b"]},
        {},
        ["1"],
        [(100, "1", NO_TEXT)],
    ),
    "first reason counts": (
        {"id": [None, "2"], "text": strings(b"\xff", "b")},
        {},
        ["2"],
        [(100, None, "the text is not valid UTF-8")],
    ),
    "no row remains": ({"id": [None], "text": [None]}, {}, [], [(100, None, NO_TEXT)]),
    "views": (
        {
            "id": pa.array(["1", None], pa.string_view()),
            "text": pa.array(["a", "b"], pa.string_view()),
        },
        {},
        ["1"],
        [(101, None, NO_ID)],
    ),
    "dictionaries": (
        {"id": ["1", "2"], "text": pa.array(["a", None]).dictionary_encode()},
        {},
        ["1"],
        [(101, "2", NO_TEXT)],
    ),
}


def test_rows_in_views_are_skipped() -> None:
    ids = pa.array(["1", "2"], pa.string_view())
    texts = pa.array([None, "b"], pa.string_view())

    [read] = batches_of(Selection(missing_text="skip"), id=ids, text=texts)

    assert read.ids.to_pylist() == ["2"]
    assert read.skipped == 1


def test_first_bad_row_is_refused_whatever_is_wrong_with_the_next() -> None:
    with pytest.raises(DataError, match="row 100: the text has 4 bytes") as refused:
        batches_of(Selection(max_text_bytes=3), id=["1", None], text=["long", "b"])

    assert refused.value.remedy.endswith("or set bad_rows to set_aside.")


@pytest.mark.parametrize("case", CASES)
def test_bad_rows_are_named_and_the_others_come(case: str) -> None:
    columns, settings, ids, rejected = CASES[case]

    batches = batches_of(Selection(bad_rows="set_aside", **settings), **columns)

    assert ids_of(batches) == ids
    assert named(batches) == rejected
    assert source_rows(batches) == len(columns["id"])


# A repeated id is refused by the run, once it has read the partition.
REFUSED = [
    name for name, (*_, rejected) in CASES.items() if rejected and rejected[0][2] != REPEATED
]


@pytest.mark.parametrize("case", REFUSED)
def test_row_that_would_be_set_aside_is_refused_otherwise(case: str) -> None:
    columns, settings, _, rejected = CASES[case]

    with pytest.raises(DataError) as refused:
        batches_of(Selection(**settings), **columns)

    assert refused.value.row in [row for row, _, _ in rejected]


def test_rejected_row_has_its_place() -> None:
    batch = pa.record_batch({"id": ["1", None], "text": ["a", "b"]})
    selection = Selection(bad_rows="set_aside")

    [read] = checked_rows(selection, "k", [batch], 7, lambda row: f"line {row} of a.csv")

    assert read.rejected == (RejectedRow(8, "line 8 of a.csv", None, NO_ID),)


def test_places_of_the_other_rows_are_their_own() -> None:
    columns = {"id": [None, "1", "1", "2"], "text": ["a", "b", "c", "d"]}

    [read] = batches_of(Selection(bad_rows="set_aside"), **columns)

    assert read.place is not None
    assert [read.place(row) for row in range(len(read))] == ["row 101", "row 103"]


def test_passages_and_carried_columns_follow_their_rows() -> None:
    columns = {"id": [1, 1, None, 2], "t": ["a", "b", "c", "long"], "d": ["x", "y", "z", "w"]}
    selection = Selection(text="{t}: {d}", carried=("d",), bad_rows="set_aside", passage="d")

    [read] = batches_of(selection, **columns)

    assert read.carried is not None
    assert read.passages is not None
    assert read.carried.column("d").to_pylist() == ["x", "w"]
    assert read.passages.tolist() == [[3, 4], [6, 7]]


def test_id_of_an_earlier_batch_is_repeated() -> None:
    batches = [pa.record_batch({"id": ids, "text": ["a", "b"]}) for ids in ([1, 2], [3, 1], [3, 4])]

    read = list(checked_rows(Selection(bad_rows="set_aside"), "k", batches))

    assert ids_of(read) == [1, 2, 3, 4]
    assert [row.row for batch in read for row in batch.rejected] == [3, 4]


def test_another_reading_begins_without_ids() -> None:
    selection = Selection(bad_rows="set_aside")

    first = batches_of(selection, id=[1], text=["a"])

    assert batches_of(selection, id=[1], text=["a"]) == first


def test_value_that_no_type_fits_is_refused() -> None:
    ids = pa.array([1, 2**63], pa.uint64())

    with pytest.raises(DataError, match="cannot be read as int64"):
        batches_of(Selection(bad_rows="set_aside"), id=ids, text=["a", "b"])


def test_thousands_of_bad_rows_are_found_in_few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    counted = checked_rows_module.is_not_utf8

    def count(key: str, name: str, column: pa.Array) -> np.ndarray:
        calls.append(1)
        return counted(key, name, column)

    monkeypatch.setattr(checked_rows_module, "is_not_utf8", count)
    rows = 8_000
    texts = strings(*(b"\xff" if row % 2 else None for row in range(rows)))

    batches = batches_of(Selection(bad_rows="set_aside"), id=range(rows), text=texts)

    assert sum(len(batch.rejected) for batch in batches) == rows
    assert len(calls) == 2  # of the ids and the texts


@given(st.lists(st.binary(max_size=3) | st.none(), max_size=40))
def test_values_that_are_not_utf8_are_those_python_cannot_decode(
    values: list[bytes | None],
) -> None:
    def is_bad(value: bytes | None) -> bool:
        try:
            (value or b"").decode()
        except UnicodeDecodeError:
            return True
        return False

    assert is_not_utf8("k", "text", strings(*values)).tolist() == [
        is_bad(value) for value in values
    ]


@given(st.lists(st.lists(st.integers(0, 50), max_size=20), max_size=20), st.booleans())
def test_first_row_of_each_id_is_first(batches: list[list[int]], is_text: bool) -> None:
    known = FirstIds()
    seen: set[int] = set()
    for values in batches:
        expected: list[bool] = []
        for value in values:
            expected.append(value not in seen)
            seen.add(value)
        ids = pa.array(values, pa.int64())

        is_first = known.add(ids.cast(pa.string()) if is_text else ids)

        assert is_first.tolist() == expected


def test_runs_of_ids_remain_few() -> None:
    known = FirstIds()
    for part in np.array_split(np.random.default_rng(5).permutation(100_000), 997):
        assert known.add(pa.array(part)).all()

    assert len(known._runs) < 12
    assert sum(run.nbytes for run in known._runs) <= FirstIds.ROW_BYTES // 2 * 100_000
