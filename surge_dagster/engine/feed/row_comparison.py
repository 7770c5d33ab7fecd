"""Comparison by id: which rows of a partition differ from those of its old file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from surge_dagster.engine.files.parquet import OutputFile
from surge_dagster.engine.files.rows import carried_columns
from surge_dagster.engine.run.old_values import LOOKUP_BYTES, NO_ROW, OldValues
from surge_dagster.engine.support.values import same_values

_COPIES = 2  # of the ids: as they are read, and in one piece


@dataclass(frozen=True, slots=True)
class RowChanges:
    """How a partition's rows differ from those of the file that it replaces, compared by id.

    Attributes:
        is_changed: bool [rows]; False if the old file has the id with the same text, carried
            columns and vector, bit for bit. All rows of a file with other columns are changed.
        deleted: ids of the old file that the partition no longer has.
        previous_rows_version: of the old file.
    """

    is_changed: np.ndarray
    deleted: pa.Array
    previous_rows_version: str

    def wanted_ids(self, first_row: int, ids: pa.Array) -> pa.Array:
        """Return those ids of consecutive rows that were added or changed."""
        return ids.filter(pa.array(self.is_changed[first_row : first_row + len(ids)]))


class RowComparison:
    """Finds the rows of an old file by their ids.

    Args:
        reserve: reserves bytes of memory; False if they do not fit.
        include_text: whether the new file has a text column.

    Attributes:
        is_possible: whether the ids could be read, and are of the partition's type.
    """

    def __init__(
        self, reader: OutputFile, reserve: Callable[[int], bool], *, include_text: bool
    ) -> None:
        self.is_possible = True
        self._previous_version = reader.facts.rows_version
        self._has_same_text = include_text == ("text" in reader.columns.names)
        self._is_changed: list[np.ndarray] = []
        carried = carried_columns(reader.columns)
        self._carried_names = [] if carried is None else carried.names
        parts: list[pa.RecordBatch] = []
        for batch in reader.read(columns=["id", *self._carried_names]):
            parts.append(batch)
            if not reserve(_COPIES * batch.nbytes + (LOOKUP_BYTES + 2) * len(batch)):
                self.is_possible = False
                return
        ids = pa.array([], reader.columns.field("id").type)
        self._carried: pa.Table | None = None
        if parts:
            ids = pa.concat_arrays([part.column("id") for part in parts])
            if self._carried_names:
                self._carried = pa.Table.from_batches(parts).drop_columns(["id"])
        self._ids = OldValues(ids)
        self._seen = np.zeros(reader.facts.rows, np.bool_)

    def old_rows(self, ids: pa.Array) -> np.ndarray | None:
        """Return the row of each of the next ids in the old file, -1 if it has none.

        None if the comparison is not possible.
        """
        if not self.is_possible or ids.type != self._ids.values.type:
            self.is_possible = False
            return None
        old = self._ids.rows(ids)
        self._seen[old[old != NO_ROW]] = True
        return old

    def add(
        self, old_rows: np.ndarray, is_same: np.ndarray, carried: pa.RecordBatch | None
    ) -> None:
        """Add the next rows; `is_same` marks those with the text and vector of the old row."""
        is_same = is_same & self._has_same_carried(old_rows, carried)
        self._is_changed.append(~is_same | (old_rows == NO_ROW))

    def _has_same_carried(self, old_rows: np.ndarray, carried: pa.RecordBatch | None) -> np.ndarray:
        """Return which rows have the carried columns of the old row, or no old row."""
        names = [] if carried is None else carried.schema.names
        has_same_columns = self._has_same_text and names == self._carried_names
        same = np.full(len(old_rows), has_same_columns)
        if carried is None or self._carried is None or not has_same_columns:
            return same
        known = np.flatnonzero(old_rows != NO_ROW)
        old_columns = self._carried.take(pa.array(old_rows[known]))
        new_columns = carried.take(pa.array(known))
        for name in names:
            new = new_columns.column(name)
            old = old_columns.column(name).combine_chunks()
            if new.type != old.type:
                return np.zeros(len(old_rows), np.bool_)
            same[known] &= same_values(new, old)
        return same

    def result(self) -> RowChanges | None:
        """Return the changes after the last row; None if the rows could not be compared."""
        if not self.is_possible:
            return None
        is_changed = np.concatenate([np.zeros(0, np.bool_), *self._is_changed])
        deleted = self._ids.values.filter(pa.array(~self._seen))
        return RowChanges(is_changed, deleted, self._previous_version)
