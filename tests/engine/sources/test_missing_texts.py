"""Rows whose text is null or blank: refused, skipped or embedded as empty, by the selection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.sources.casting import is_blank
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import only, refusal, rows_of
from tests.small_catalogs import write_partition, write_rows

NO_WIDTH = "\u00ad\u180e\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"
BLANKS = ["", " ", "\t\r\n", "\u00a0", "\u3000 ", "\u2028", "\u200b", "\u200b \ufeff", *NO_WIDTH]
ROWS = [("1", "one"), ("2", None), ("3", " "), ("4", "four"), ("5", "")]
PRESENT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


def read(rows: Sequence[tuple[Any, Any]], **options: Any) -> tuple[list[tuple[Any, Any]], int]:
    """The rows of one batch as a selection gives them, and how many it skipped."""
    columns = {
        "id": pa.array([row[0] for row in rows], pa.string()),
        "text": [row[1] for row in rows],
    }
    batches = list(Selection(**options).rows("k", [pa.record_batch(columns)], 100))
    given = [
        row
        for each in batches
        for row in zip(each.ids.to_pylist(), each.texts.to_pylist(), strict=True)
    ]
    return given, sum(each.skipped for each in batches)


def test_every_row_without_a_text_is_skipped_and_counted() -> None:
    assert read(ROWS, missing_text="skip") == ([("1", "one"), ("4", "four")], 3)
    assert read([(None, None), ("2", "two")], missing_text="skip") == ([("2", "two")], 1), (
        "an empty line of a table"
    )
    assert read(ROWS[1:3], missing_text="skip") == ([], 2)


def test_every_row_without_a_text_becomes_empty() -> None:
    expected = [("1", "one"), ("2", ""), ("3", ""), ("4", "four"), ("5", "")]
    assert read(ROWS, missing_text="empty") == (expected, 0)


@pytest.mark.parametrize("text", [None, *BLANKS])
def test_row_without_a_text_is_refused_where_that_is_set(text: str | None) -> None:
    with pytest.raises(DataError, match="row 101: the text is null or blank; every row needs one"):
        read([("1", "one"), ("2", text)], missing_text="refuse")


def test_blank_text_is_kept_as_it_is_unless_something_is_set() -> None:
    assert read([("1", " "), ("2", "")]) == ([("1", " "), ("2", "")], 0)


def test_second_file_follows_the_skipped_rows_of_the_first(tmp_path: Path) -> None:
    path = write_partition(tmp_path, "k", ROWS)
    path.with_name("part-1.parquet").write_bytes(path.read_bytes())
    partition = only(open_source(tmp_path, selection=Selection(missing_text="skip")))
    assert partition.rows == 10, "as the files announce them"
    assert rows_of(partition) == [("1", "one"), ("4", "four")] * 2
    assert sum(batch.skipped for batch in partition.read()) == 6
    write_rows(
        path.with_name("part-2.parquet"),
        [("6", "six"), (None, "text without id")],
        key="k",
        version="v1",
    )
    assert refusal(only(open_source(tmp_path, selection=Selection(missing_text="skip")))).row == 11


@pytest.mark.parametrize(
    ("missing_text", "expected"),
    [("refuse_nulls", ["a.b", " .", "."]), ("skip", ["a.b"]), ("empty", ["a.b", "", ""])],
)
def test_text_of_several_columns_is_blank_where_all_of_them_are(
    missing_text: Any, expected: list[str]
) -> None:
    columns = {"id": [1, 2, 3], "a": ["a", " ", ""], "b": ["b", None, ""]}
    selection = Selection(text="{a}.{b}", missing_text=missing_text)
    batches = list(selection.rows("k", [pa.record_batch(columns)], 0))
    assert [text for batch in batches for text in batch.texts.to_pylist()] == expected


@given(st.lists(st.none() | PRESENT | st.sampled_from(BLANKS), max_size=12), st.integers(0, 3))
def test_blank_is_what_python_calls_blank_or_has_no_width(
    texts: list[str | None], start: int
) -> None:
    column: Any = pa.array(texts, pa.large_string())[start:]
    expected = []
    for text in texts[start:]:
        shown = None if text is None else [letter for letter in text if letter not in NO_WIDTH]
        expected.append(shown is not None and not "".join(shown).strip())
    assert is_blank(column).tolist() == expected
