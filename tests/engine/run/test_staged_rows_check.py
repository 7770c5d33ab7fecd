"""Staged rows are separated from the others in any batches, and used only if the source has the
same rows."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.facts import VectorFacts
from surge_dagster.engine.run.reading import StagedRowsCheck
from surge_dagster.engine.run.superbatch import StagedRows
from tests.engine.runs import read_of
from tests.small_catalogs import Rows, numbered_rows, row_batch_of

ROWS = numbered_rows("k", 60)


def staged_of(rows: Rows, start: int, stop: int) -> StagedRows:
    return StagedRows(start, stop, read_of(rows[start:stop]).content_digest, VectorFacts())


def cut(rows: Rows, staged: list[StagedRows], batch_rows: int = 7) -> list[bool]:
    """For each row whether it is staged; rows and their order are checked."""
    check = StagedRowsCheck(Mock(), "k", staged)
    found = []
    ids = []
    for start in range(0, len(rows), batch_rows):
        for piece, segment in check.cut(row_batch_of(rows[start : start + batch_rows])):
            assert len(piece)
            found += [segment is not None] * len(piece)
            ids += piece.ids.to_pylist()
    check.finish()
    assert ids == [row[0] for row in rows]
    return found


@given(st.sets(st.integers(0, 60), max_size=12), st.integers(1, 70), st.integers(0, 1))
def test_rows_are_divided_into_staged_and_others(
    borders: set[int], batch_rows: int, first: int
) -> None:
    ends = sorted(borders)
    ranges = list(pairwise(ends))[first::2]
    staged = [staged_of(ROWS, start, stop) for start, stop in ranges]
    expected = [any(start <= row < stop for start, stop in ranges) for row in range(60)]
    assert cut(ROWS, staged, batch_rows) == expected


@given(st.integers(0, 59), st.integers(0, 1))
def test_changed_staged_row_is_noticed(row: int, column: int) -> None:
    changed = [list(values) for values in ROWS]
    changed[row][column] += "x"
    staged = [staged_of(ROWS, 10, 20), staged_of(ROWS, 20, 45)]
    rows: Rows = [(values[0], values[1]) for values in changed]
    if 10 <= row < 45:
        with pytest.raises(TransientError, match="are not those that were staged"):
            cut(rows, staged)
    else:
        cut(rows, staged)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [(ROWS[1:], "its rows 10 to 20"), (ROWS[:15], "it has 15 rows, and 20 were there")],
)
def test_moved_or_missing_staged_rows_are_noticed(rows: Rows, reason: str) -> None:
    with pytest.raises(TransientError, match=reason):
        cut(rows, [staged_of(ROWS, 10, 20)])
