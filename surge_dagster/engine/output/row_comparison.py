"""Comparison by id: which rows of a partition are new or changed since its old file, and which ids it no longer has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.files.rows import OutputFile
from surge_dagster.engine.superbatch import ADDED, CHANGED, UNCHANGED, RowChanges

_COPIES = 3  # of the ids: as they are read, in one piece, and in the table that finds them
NO_ROW = -1


class RowComparison:
    """Finds the rows of an old file by their ids.

    Args:
        reader: the open file.
        reserve: books bytes before they are held; False where they do not fit.

    Attributes:
        is_possible: whether the ids could be read, and are of the partition's type.

    Raises:
        InvalidFile: the file is damaged.
    """

    def __init__(self, reader: OutputFile, reserve: Callable[[int], bool]) -> None:
        self.is_possible = True
        self._previous_version = reader.facts.rows_version
        self._operations: list[np.ndarray] = []
        self._shift = 0
        parts: list[pa.Array] = []
        for batch in reader.read(columns=["id"]):
            parts.append(batch.column("id"))
            self.is_possible = self.is_possible and reserve(_COPIES * parts[-1].nbytes + 2)
            if not self.is_possible:
                return
        kind = reader.columns.field("id").type
        self._ids = pa.concat_arrays(parts) if parts else pa.array([], kind)
        self._seen = np.zeros(len(self._ids), np.bool_)

    def old_rows(self, ids: pa.Array, first_row: int) -> np.ndarray | None:
        """The row that each of the next ids has in the old file, -1 where it has none; None where that is unknown.

        Args:
            first_row: the place of the first one in its partition.
        """
        if not self.is_possible or ids.type != self._ids.type:
            self.is_possible = False
            return None
        old = np.full(len(ids), NO_ROW, np.int64)
        begin = first_row + self._shift
        start, stop = max(0, -begin), min(len(ids), len(self._ids) - begin)
        if start < stop:
            there = self._ids.slice(begin + start, stop - start)
            equal = pc.equal(ids.slice(start, stop - start), there)  # pyright: ignore[reportAttributeAccessIssue]
            places = np.arange(begin + start, begin + stop)
            old[start:stop] = np.where(equal.to_numpy(zero_copy_only=False), places, NO_ROW)
        others = np.flatnonzero(old == NO_ROW)
        if len(others):
            found = pc.index_in(ids.take(pa.array(others)), value_set=self._ids)  # pyright: ignore[reportAttributeAccessIssue]
            old[others] = found.fill_null(NO_ROW).to_numpy()
        matched = np.flatnonzero(old != NO_ROW)
        if len(matched):
            last = int(matched[-1])
            self._shift = int(old[last]) - first_row - last
        self._seen[old[matched]] = True
        return old

    def add(self, old_rows: np.ndarray, is_same: np.ndarray) -> None:
        """Enter the next rows; `is_same` says of which of them everything is that of the old row."""
        operations = np.where(old_rows == NO_ROW, ADDED, np.where(is_same, UNCHANGED, CHANGED))
        self._operations.append(operations.astype(np.int8))

    def result(self) -> RowChanges | None:
        """What was found, after the last row; None where the rows could not be compared."""
        if not self.is_possible or not self._previous_version:
            return None
        operations = np.concatenate(self._operations) if self._operations else np.empty(0, np.int8)
        return RowChanges(operations, self._ids.filter(pa.array(~self._seen)), self._previous_version)
