"""A consumer of the change feed has the rows of the source after any nights, by an oracle that
knows only what was edited.

The source has a carried column of each Arrow type. The oracle keeps, for each row, which of three
values a column has, and which ids were touched since the consumer last confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.feed.changes import Changes, changes
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.frames import FrameCatalog
from tests.engine.carried_values import REFUSED, VALUES
from tests.engine.runs import completed, make_run
from tests.small_catalogs import DIMENSION

NIGHTS = 30
KEYS = ("p", "q", "r")
IDS = tuple("abcdefgh")
COLUMNS = tuple(VALUES)


@dataclass
class Row:
    """Which text a row has, and which of the three values of each column."""

    text: int = 0
    values: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))


# What a consumer has, by partition and id: its text, its vector, and which value of each column.
Copy = dict[str, dict[str, dict[str, Any]]]


class Nights:
    """A catalog that changes each night, its output, and a consumer."""

    def __init__(self, pool: EncoderPool, root: Path) -> None:
        self._pool = pool
        self._store = open_store(root)
        self.catalog: dict[str, dict[str, Row]] = {"p": {row: Row() for row in IDS}}
        self._include_text = True
        self._columns = COLUMNS
        self._night = 0
        self._space = ""
        self._copy: Copy = {}
        self._touched: dict[str, set[str]] = {}
        self._new: set[str] = set()  # partitions of which the consumer may have nothing

    def edit(self, kind: str, key: str, row_id: str, column: str, number: int) -> None:
        """Change one thing in the catalog."""
        rows = self.catalog.get(key)
        if kind == "switch":
            self._switch(column, number)
        elif rows is None:
            self.catalog[key] = {row_id: Row(number)}
            self._new.add(key)
        elif kind == "remove":
            self._remove(key)
        elif kind == "move":
            self.catalog[key] = dict(reversed(rows.items()))
        elif kind == "delete":
            self._touch(key, rows.pop(row_id, None) and row_id)
        elif row_id not in rows:
            rows[row_id] = Row(number)
            self._touch(key, row_id)
        elif kind == "text" and rows[row_id].text != number:
            rows[row_id].text = number
            self._touch(key, row_id)
        elif kind == "value" and rows[row_id].values[column] != number:
            rows[row_id].values[column] = number
            self._touch(key, row_id)

    def _switch(self, column: str, number: int) -> None:
        """Embed with other columns, so that all rows change."""
        if number == 0:
            self._include_text = not self._include_text
        else:
            without = tuple(name for name in COLUMNS if name != column)
            self._columns = COLUMNS if self._columns != COLUMNS else without
        for key, rows in self.catalog.items():
            for row_id in rows:
                self._touch(key, row_id)

    def _remove(self, key: str) -> None:
        del self.catalog[key]
        self._new.discard(key)
        if self._space:
            self._store.delete(f"{self._space}/{key}.parquet")

    def _touch(self, key: str, row_id: str | None) -> None:
        if row_id is not None:
            self._touched.setdefault(key, set()).add(row_id)

    def embed(self) -> None:
        self._night += 1
        frames = {key: self._frame(rows) for key, rows in self.catalog.items()}
        versions = dict.fromkeys(frames, str(self._night))
        source = FrameCatalog(frames, Selection(carried=self._columns), versions=versions)
        run = make_run(
            self._pool, source, self._store, include_text=self._include_text, changes=True
        )
        completed(run)
        assert run.report.partitions_failed == []
        self._space = run.space.name

    def _frame(self, rows: dict[str, Row]) -> pa.Table:
        columns: dict[str, Any] = {
            "id": pa.array(list(rows), pa.string()),
            "text": pa.array([_text(row) for row in rows.values()], pa.string()),
        }
        for name in COLUMNS:
            places = [row.values[name] for row in rows.values()]
            columns[name] = VALUES[name].take(pa.array(places, pa.int64()))
        return pa.table(columns)

    def hand_over(self, *, confirms: bool) -> None:
        """Apply the feed, and compare the copy with the catalog and the operations with the edits.

        A consumer that does not confirm has lost its copy, as if it had died.
        """
        feed = changes(self._store, "consumer")
        copy = {} if feed.is_new else {key: dict(rows) for key, rows in self._copy.items()}
        given = self._apply(feed, copy)
        assert copy == self._expected()
        if not feed.is_new:
            self._check_operations(given)
        if confirms:
            feed.confirm()
            self._copy = copy
            self._touched = {}
            self._new = set()

    def _apply(self, feed: Changes, copy: Copy) -> dict[str, list[tuple[str, str]]]:
        """Apply the feed to a copy; return operation and id of what came, by partition."""
        given: dict[str, list[tuple[str, str]]] = {}
        for partition in feed:
            key = partition.partition
            rows = copy.setdefault(key, {})
            given[key] = []
            for batch in partition:
                operation = batch.column("op")[0].as_py()
                came = ["" if each is None else each for each in batch.column("id").to_pylist()]
                given[key] += [(operation, row_id) for row_id in came]
                if operation == "clear":
                    rows.clear()
                elif operation == "put":
                    rows |= zip(came, _rows(batch), strict=True)
                else:
                    for row_id in came:
                        rows.pop(row_id, None)
            assert len(set(given[key])) == len(given[key]), "no id comes twice"
            if not rows:
                del copy[key]
        return given

    def _check_operations(self, given: dict[str, list[tuple[str, str]]]) -> None:
        for key, came in given.items():
            if key not in self.catalog:
                assert came == [("clear", "")]
            elif key not in self._new:
                assert ("clear", "") not in came
                assert {row_id for _, row_id in came} <= self._touched.get(key, set())

    def _expected(self) -> Copy:
        """The rows of the catalog as a consumer should have them."""
        copy: Copy = {}
        for key, rows in self.catalog.items():
            for row_id, row in rows.items():
                expected: dict[str, Any] = {name: row.values[name] for name in self._columns}
                if self._include_text:
                    expected["text"] = _text(row)
                [expected["embedding"]] = hash_vectors([_text(row)], DIMENSION).tolist()
                copy.setdefault(key, {})[row_id] = expected
        return copy


def _text(row: Row) -> str:
    return f"text {row.text}"


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch as `Copy` has them."""
    rows: list[dict[str, Any]] = [{} for _ in range(len(batch))]
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in ("op", "partition", "id"):
            continue
        values = column.to_pylist() if name in ("text", "embedding") else _places(name, column)
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def _places(name: str, column: pa.Array) -> list[int]:
    """Return which of the three values of a column each row has."""
    plain = VALUES[name]
    if name in ("uuid", "json"):
        plain = pa.array([value and str(value) for value in plain.to_pylist()])
    known = _shown(plain.cast(column.type))
    assert len(set(known)) == 3
    return [known.index(value) for value in _shown(column)]


def _shown(column: Any) -> list[str]:
    return [column.slice(row, 1).to_string(skip_new_lines=True) for row in range(len(column))]


EDIT = st.tuples(
    st.sampled_from(("value", "value", "text", "delete", "add", "move", "remove", "switch")),
    st.sampled_from(KEYS),
    st.sampled_from(IDS),
    st.sampled_from(COLUMNS),
    st.integers(0, 2),
)
NIGHT = st.tuples(
    st.lists(EDIT, max_size=4), st.sampled_from(("not", "unconfirmed", "confirmed", "confirmed"))
)


@pytest.mark.parametrize("examples", [4, pytest.param(40, marks=pytest.mark.soak)])
def test_consumer_has_the_rows_of_the_source_after_thirty_nights(
    hash_pool: EncoderPool, tmp_path_factory: pytest.TempPathFactory, examples: int
) -> None:
    @settings(max_examples=examples)
    @given(st.lists(NIGHT, min_size=NIGHTS, max_size=NIGHTS))
    def live(history: list[tuple[list[tuple[str, str, str, str, int]], str]]) -> None:
        nights = Nights(hash_pool, tmp_path_factory.mktemp("nights"))
        nights.embed()
        for edits, hand_over in history:
            for edit in edits:
                nights.edit(*edit)
            nights.embed()
            if hand_over != "not":
                nights.hand_over(confirms=hand_over == "confirmed")
        nights.hand_over(confirms=True)

    live()


@pytest.mark.parametrize("kind", REFUSED)
def test_type_that_files_cannot_carry_is_refused_by_column(
    hash_pool: EncoderPool, tmp_path: Path, kind: str
) -> None:
    table = pa.table({"id": ["a", "b", "c"], "text": ["x", "y", "z"], "value": REFUSED[kind]})
    source = FrameCatalog({"k": table}, Selection(carried=("value",)), versions={"k": "1"})

    [failure] = completed(make_run(hash_pool, source, tmp_path)).report.partitions_failed

    assert failure.key == "k"
    assert "the column 'value' has type" in failure.reason
