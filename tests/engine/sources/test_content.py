"""What is remembered of a partition's rows: one digest for equal content, another for any other,
and repeated ids."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources import partition as partition_module
from surge_dagster.engine.sources.partition import (
    ContentDigest,
    IdSet,
    RowBatch,
    id_keys,
    refuse_repeated_id,
)
from tests.small_catalogs import Rows, partition_of, row_batch_of

words = st.text("abö\0", max_size=4)
rows_of_strings = st.lists(st.tuples(words, words), max_size=12)


def digest_of(*batches: RowBatch) -> str:
    digest = ContentDigest()
    for batch in batches:
        digest.update(batch)
    return digest.hexdigest()


@given(rows_of_strings, st.data())
def test_digest_does_not_depend_on_batches_slices_or_offsets(
    rows: Rows, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    before, behind = data.draw(rows_of_strings), data.draw(rows_of_strings)
    padded = row_batch_of([*before, *rows, *behind])
    pieces = [
        RowBatch(
            padded.ids[len(before) + start : len(before) + stop],
            padded.texts[len(before) + start : len(before) + stop],
        )
        for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True)
    ]
    assert digest_of(*pieces) == digest_of(row_batch_of(rows))


@given(rows_of_strings, rows_of_strings)
@example([("1", "abc"), ("2", "def")], [("1", "abcd"), ("2", "ef")])  # the border between two texts
# the border between id and text
@example([("1", "abc"), ("2", "def")], [("1a", "bc"), ("2", "def")])
@example([("1", "abc"), ("2", "def")], [("1", "def"), ("2", "abc")])
@example([("1", "abc")], [("1", "abc"), ("", "")])
def test_different_rows_have_different_digests(one: Rows, other: Rows) -> None:
    assert (digest_of(row_batch_of(one)) == digest_of(row_batch_of(other))) == (one == other)


@pytest.mark.parametrize("kind", [pa.int64(), pa.binary()])
def test_ids_of_other_types_are_digested_by_value_and_type(kind: pa.DataType) -> None:
    values: list[Any] = [65, 66, 67] if kind == pa.int64() else [b"A", b"B", b"C"]
    rows = [(value, "t") for value in values]
    whole = row_batch_of(rows, kind)
    assert digest_of(whole) == digest_of(
        row_batch_of(rows[:1], kind),
        RowBatch(whole.ids[1:], whole.texts[1:]),  # pyright: ignore[reportArgumentType]
    )
    assert digest_of(whole) != digest_of(row_batch_of([(values[1], "t"), *rows[1:]], kind))
    assert digest_of(whole) != digest_of(row_batch_of([("A", "t"), ("B", "t"), ("C", "t")]))


def id_set_of(ids: list[Any], kind: pa.DataType, batch: int = 100) -> IdSet:
    known = IdSet()
    for start in range(0, len(ids), batch):
        values = pa.array(ids[start : start + batch], type=kind)
        known.add(values)
    return known


@pytest.mark.parametrize("kind", [pa.string(), pa.int64(), pa.binary()])
def test_repeated_id_is_found_wherever_it_stands(kind: pa.DataType) -> None:
    make = {pa.string(): str, pa.int64(): int, pa.binary(): lambda n: str(n).encode()}[kind]
    ids = [make(n) for n in range(3000)]
    assert id_set_of(ids, kind).repeated().size == 0
    assert id_set_of([*ids, ids[17], ids[17], ids[3]], kind).repeated().size == 2


def test_ids_cost_about_eight_bytes_a_row() -> None:
    known = id_set_of(list(range(100_000)), pa.int64(), 8192)

    assert sys.getsizeof(known._hashes) <= IdSet.ROW_BYTES * 100_000


def test_repeated_id_is_named_with_both_rows() -> None:
    rows = [(f"id-{n}", "t") for n in range(40)]
    rows[33] = ("id-5", "t")
    repeated = id_set_of([row[0] for row in rows], pa.string()).repeated()
    with pytest.raises(DataError, match="id 'id-5' stands at row 5 already") as refused:
        refuse_repeated_id(partition_of("k", rows, batch_rows=8), repeated)
    assert (refused.value.key, refused.value.row) == ("k", 33)


def test_ids_whose_hashes_collide_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_module, "id_keys", lambda ids: np.full(len(ids), 7))
    repeated = id_set_of(["a", "b"], pa.string()).repeated()
    assert repeated.tolist() == [7]
    refuse_repeated_id(partition_of("k", [("a", "t"), ("b", "t")]), repeated)


def test_strings_that_differ_in_length_or_one_byte_have_different_keys() -> None:
    ids = ["", "a", "a\0", "b", "aé", *("x" * length for length in range(1, 300))]

    keys = id_keys(pa.array(["before", *ids], pa.string())[1:])

    assert len(np.unique(keys)) == len(ids)


@pytest.mark.parametrize("text", ["", "id-5", "é", "x" * 128, "x" * 200])
def test_key_of_an_id_does_not_depend_on_its_column(text: str) -> None:
    alone = id_keys(pa.array([text], pa.string()))

    others = [*map(str, range(100)), "x" * 150]
    among_others = id_keys(pa.array(["before", text, *others], pa.large_string())[1:])

    assert among_others[0] == alone[0]


def test_ids_of_an_old_file_need_not_be_utf8() -> None:
    ids = pa.array([b"a", b"\xff", b"b", b"\xff"]).view(pa.string())

    keys = id_keys(ids)

    assert keys[1] == keys[3]
    assert len(np.unique(keys)) == 3


def test_smallest_and_largest_integers_are_different_ids() -> None:
    edges = np.array([-(2**63), 2**63 - 1, -1, 0, 1, -2], dtype=np.int64).tolist()
    assert id_set_of(edges, pa.int64()).repeated().size == 0
