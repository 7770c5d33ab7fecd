"""A consumer of the change feed has the rows of the source after any nights, by an oracle that
knows only what was edited.

The source has a carried column of each Arrow type, and the oracle keeps which of three values each
column of each row has.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.feed.changes import changes
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.frames import FrameCatalog
from tests.engine.carried_values import VALUES
from tests.engine.runs import completed, make_run
from tests.small_catalogs import DIMENSION

NIGHTS = 30
IDS = tuple("abcdefgh")
COLUMNS = ("text", *VALUES)
TEXTS = ["text 0", "text 1", "text 2"]
VECTORS = pa.array(hash_vectors(TEXTS, DIMENSION).tolist(), pa.list_(pa.float32(), DIMENSION))
KNOWN: dict[str, Any] = {**VALUES, "text": pa.array(TEXTS), "embedding": VECTORS}

# By partition and id, which of its three values each column has.
Copy = dict[str, dict[str, dict[str, int]]]


class Nights:
    """A catalog that changes each night, its output, and a consumer."""

    def __init__(self, pool: EncoderPool, root: Path) -> None:
        self._pool = pool
        self._store = open_store(root)
        self._catalog: Copy = {"p": {row_id: dict.fromkeys(COLUMNS, 0) for row_id in IDS}}
        self._columns = COLUMNS
        self._night = 0
        self._consumer: Copy = {}

    def edit(self, kind: str, key: str, row_id: str, column: str, number: int) -> None:
        """Change one thing in the catalog."""
        rows = self._catalog.setdefault(key, {})
        match kind:
            case "switch":  # embed with other columns, so that all rows change
                without = tuple(name for name in COLUMNS if name != column)
                self._columns = without if self._columns == COLUMNS else COLUMNS
            case "remove":
                del self._catalog[key]
                self._store.delete(f"{self._pool.space.name}/{key}.parquet")
            case "move":
                self._catalog[key] = dict(reversed(rows.items()))
            case "delete":
                rows.pop(row_id, None)
            case _:
                rows.setdefault(row_id, dict.fromkeys(COLUMNS, 0))[column] = number

    def embed(self) -> None:
        self._night += 1
        frames = {key: frame_of(rows) for key, rows in self._catalog.items()}
        versions = dict.fromkeys(frames, str(self._night))
        carried = tuple(name for name in self._columns if name in VALUES)
        source = FrameCatalog(frames, Selection(carried=carried), versions=versions)
        include_text = "text" in self._columns
        run = make_run(self._pool, source, self._store, include_text=include_text, changes=True)
        assert completed(run).report.partitions_failed == []

    def hand_over(self, *, confirms: bool) -> None:
        """Apply the feed, and compare the copy of the consumer with the catalog.

        A consumer that does not confirm has lost its copy, as if it had died.
        """
        feed = changes(self._store, "consumer")
        copy: Copy = {} if feed.is_new else deepcopy(self._consumer)
        for partition in feed:
            for batch in partition:
                apply(batch, copy.setdefault(partition.partition, {}))
        assert {key: rows for key, rows in copy.items() if rows} == self._expected()
        if confirms:
            feed.confirm()
            self._consumer = copy

    def _expected(self) -> Copy:
        """The rows of the catalog as a consumer should have them."""
        expected: Copy = {}
        for key, rows in self._catalog.items():
            for row_id, row in rows.items():
                known = {name: row[name] for name in self._columns}
                expected.setdefault(key, {})[row_id] = known | {"embedding": row["text"]}
        return expected


def frame_of(rows: dict[str, dict[str, int]]) -> pa.Table:
    columns: dict[str, Any] = {"id": pa.array(rows, pa.string())}
    for name in COLUMNS:
        places = pa.array((row[name] for row in rows.values()), pa.int64())
        columns[name] = KNOWN[name].take(places)
    return pa.table(columns)


def apply(batch: pa.RecordBatch, rows: dict[str, dict[str, int]]) -> None:
    """Apply a batch of the feed to a partition's rows."""
    ids = batch.column("id").to_pylist()
    match batch.column("op")[0].as_py():
        case "clear":
            rows.clear()
        case "delete":
            for row_id in ids:
                rows.pop(row_id, None)
        case _:
            names = [name for name in batch.schema.names if name in KNOWN]
            places = [places_in(name, batch.column(name)) for name in names]
            for row_id, *row in zip(ids, *places, strict=True):
                rows[row_id] = dict(zip(names, row, strict=True))


def places_in(name: str, column: pa.Array) -> Iterable[int]:
    """Return which of the three values of a column each row has."""
    plain = KNOWN[name]
    if name in ("uuid", "json"):
        plain = pa.array([value and str(value) for value in plain.to_pylist()])
    known = shown(plain.cast(column.type))
    assert len(set(known)) == 3
    return map(known.index, shown(column))


def shown(column: Any) -> list[str]:
    found: list[str] = []
    for row, value in enumerate(column):
        whole = column.slice(row, 1).to_string(container_window=DIMENSION, skip_new_lines=True)
        found.append(whole if value.is_valid else "")
    return found


EDIT = st.tuples(
    st.sampled_from(("value", "value", "value", "delete", "move", "remove", "switch")),
    st.sampled_from("pqr"),
    st.sampled_from(IDS),
    st.sampled_from(("text", "text", *COLUMNS)),
    st.integers(0, 2),
)
NIGHT = st.tuples(
    st.lists(EDIT, max_size=4), st.sampled_from(("not", "unconfirmed", "confirmed", "confirmed"))
)


@pytest.mark.processes
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
