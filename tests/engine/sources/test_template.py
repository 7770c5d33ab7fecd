"""Texts that are put together from several columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.sources import Selection

TITLED = "{title}. {description}"


def batch_of(**columns: Any) -> pa.RecordBatch:
    arrays = {
        name: values if isinstance(values, pa.Array) else pa.array(values)
        for name, values in columns.items()
    }
    rows = len(next(iter(arrays.values())))
    return pa.record_batch({"id": pa.array(range(rows), pa.int64()), **arrays})


def texts_of(text: str, batch: pa.RecordBatch, **options: Any) -> list[str]:
    batches = list(Selection(text=text, **options).rows("k", [batch], 0))
    assert [row for each in batches for row in each.ids.to_pylist()] == batch.column(
        "id"
    ).to_pylist()
    return [row for each in batches for row in each.texts.to_pylist()]


def test_columns_are_put_together_in_order_and_braces_can_be_written() -> None:
    batch = batch_of(title=["Boot", "Café ☕"], description=["warm", "hot"], unread=[1, 2])
    assert texts_of("{{{title}}}: {description}{title}", batch) == [
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
    rows = [row for row in rows if row != (None, None)]
    text = f"{literals[0]}{{a}}{literals[1]}{{b}}{literals[2]}"
    columns = {
        name: pa.array([row[place] for row in rows], pa.string()) for place, name in enumerate("ab")
    }
    assert texts_of(text, batch_of(**columns)) == [
        text.format(a=a or "", b=b or "") for a, b in rows
    ]


def test_row_of_nothing_but_nulls_has_no_text_and_is_named() -> None:
    batch = batch_of(title=["a", None, None], description=[None, "b", None])
    with pytest.raises(DataError, match="row 12: the text is null"):
        list(Selection(text=TITLED).rows("k", [batch], 10))


def test_text_that_is_too_long_is_refused() -> None:
    batch = batch_of(title=["a", "b" * 100])

    with pytest.raises(DataError, match="row 1: the text has 10,000 bytes; at most 1,000 are"):
        texts_of("{title}" * 100, batch, max_text_bytes=1_000)


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
    suffixes = [
        Selection(text=text).version_suffix
        for text in (TITLED, "{title} {description}", "{title}", "title")
    ]
    assert len(set(suffixes)) == 4 and suffixes[3] == "?text_column=title"
    assert all(len(suffix) < 40 for suffix in suffixes)
    assert Selection(id="sku", text=TITLED).version_suffix == "?id_column=sku&text=" + suffixes[
        0
    ].removeprefix("?text=")
