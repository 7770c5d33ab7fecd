"""Texts that are put together from several columns, and rows whose text is null or blank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.sources.casting import is_blank
from surge_dagster.engine.sources.checked_rows import checked_rows
from surge_dagster.engine.tables.opening import open_source
from tests.engine.sources.reading import only, refusal, rows_in, rows_of
from tests.small_catalogs import ids_of, texts_of, write_partition, write_rows

TITLED = "{title}. {description}"


def batch_of(**columns: Any) -> pa.RecordBatch:
    batch = pa.record_batch(columns)
    return batch.add_column(0, "id", pa.array(range(len(batch)), pa.int64()))


def made_of(text: str, batch: pa.RecordBatch, **options: Any) -> list[str]:
    rows = rows_in(checked_rows(Selection(text=text, **options), "k", [batch], 0))
    assert ids_of(rows) == batch["id"].to_pylist()
    return texts_of(rows)


def test_columns_are_put_together_in_order_and_braces_can_be_written() -> None:
    batch = batch_of(title=["Boot", "Café ☕"], description=["warm", "hot"], unread=[1, 2])
    assert made_of("{{{title}}}: {description}{title}", batch) == [
        "{Boot}: warmBoot",
        "{Café ☕}: hotCafé ☕",
    ]
    assert Selection(id="sku", text=TITLED).columns == ["sku", "title", "description"]
    assert Selection(id="title", text=TITLED).columns == ["title", "description"]


@given(
    st.lists(
        st.text(st.characters(exclude_characters="{}", exclude_categories=["Cs"])),
        min_size=3,
        max_size=3,
    ),
    st.lists(
        st.tuples(*[st.none() | st.text(st.characters(exclude_categories=["Cs"]))] * 2), max_size=9
    ),
)
def test_texts_are_those_of_a_format_string_with_nulls_as_nothing(
    literals: list[str], rows: list[Any]
) -> None:
    text = f"{literals[0]}{{a}}{literals[1]}{{b}}{literals[2]}"
    expected: list[str] = []
    columns: dict[str, list[str | None]] = {"a": [], "b": []}
    for a, b in rows:
        if a is not None or b is not None:
            columns["a"].append(a)
            columns["b"].append(b)
            expected.append(text.format(a=a or "", b=b or ""))
    batch = batch_of(a=pa.array(columns["a"], pa.string()), b=pa.array(columns["b"], pa.string()))
    assert made_of(text, batch) == expected


def test_row_of_nothing_but_nulls_has_no_text_and_is_named() -> None:
    batch = batch_of(title=["a", None, None], description=[None, "b", None])
    with pytest.raises(DataError, match="row 12: the text is null"):
        list(checked_rows(Selection(text=TITLED), "k", [batch], 10))


def test_text_that_is_too_long_is_refused() -> None:
    batch = batch_of(title=["a", "b" * 100])

    with pytest.raises(DataError, match="row 1: the text has 10,000 bytes; at most 1,000 are"):
        made_of("{title}" * 100, batch, max_text_bytes=1_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{title", "is not complete"),
        ("title}", "is not complete"),
        ("{} {title}", "more or less than the name of a column"),
        ("{price:.2f}", "more or less than the name of a column"),
        ("{title!r}", "more or less than the name of a column"),
        ("{{title}}", r"names no column; expected columns in braces, as in"),
    ],
)
def test_template_that_cannot_be_used_is_refused_at_once(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Selection(text=text)


def test_another_template_is_another_version_and_column_names_keep_theirs() -> None:
    suffixes: list[str] = []
    for text in (TITLED, "{title} {description}", "{title}", "title"):
        suffixes.append(Selection(text=text).version_suffix)
        assert len(suffixes[-1]) < 40
    assert len(set(suffixes)) == 4
    assert suffixes[3] == "?text_column=title"
    assert Selection(id="sku", text=TITLED).version_suffix == "?id_column=sku&text=" + suffixes[
        0
    ].removeprefix("?text=")


NO_WIDTH = "\u00ad\u180e\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"
BLANKS = ["", " ", "\t\r\n", "\u00a0", "\u3000 ", "\u2028", "\u200b", "\u200b \ufeff", *NO_WIDTH]
ROWS = [("1", "one"), ("2", None), ("3", " "), ("4", "four"), ("5", "")]
PRESENT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


def read(rows: Sequence[tuple[Any, Any]], **options: Any) -> tuple[list[tuple[Any, Any]], int]:
    """The rows of one batch as a selection gives them, and how many it skipped."""
    columns = {"id": pa.array(ids_of(rows), pa.string()), "text": texts_of(rows)}
    batches = list(checked_rows(Selection(**options), "k", [pa.record_batch(columns)], 100))
    return rows_in(batches), sum(each.skipped for each in batches)


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
    rows = rows_in(checked_rows(selection, "k", [pa.record_batch(columns)], 0))
    assert texts_of(rows) == expected


@given(st.lists(st.none() | PRESENT | st.sampled_from(BLANKS), max_size=12), st.integers(0, 3))
def test_blank_is_what_python_calls_blank_or_has_no_width(
    texts: list[str | None], start: int
) -> None:
    column: Any = pa.array(texts, pa.large_string())[start:]
    expected = []
    for text in texts[start:]:
        shown = "x" if text is None else text.translate(dict.fromkeys(map(ord, NO_WIDTH)))
        expected.append(not shown.strip())
    assert is_blank(column).tolist() == expected
