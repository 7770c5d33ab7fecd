"""Finds the rows that are set aside, all of a batch at once, and names them.

A reader of files gives a row that it cannot parse as nulls, and says why in the column `REASON`,
so that the rows after it keep their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.casting import plain_column
from surge_dagster.engine.sources.partition import Place, RejectedRow, RowBatch, id_keys

REASON = "\0\0reason"
_NOT_UTF8 = "Invalid UTF8 sequence"


class Reasons:
    """Why rows of a batch are bad; the first reason of each row counts."""

    def __init__(self, rows: int) -> None:
        self._found: dict[int, tuple[str, str]] = {}  # reason and remedy by row
        self.is_sound = np.ones(rows, np.bool_)

    def add(self, is_bad: np.ndarray, reason: str | Sequence[str], remedy: str = "") -> None:
        """Add one reason for these rows, or one for each of them."""
        if not is_bad.any():
            return
        rows = np.flatnonzero(is_bad).tolist()
        reasons = [reason] * len(rows) if isinstance(reason, str) else reason
        for row, each in zip(rows, reasons, strict=True):
            self._found.setdefault(row, (each, remedy))
        self.is_sound &= ~is_bad

    def require_none(self, key: str, numbers: np.ndarray, place: Place | None = None) -> None:
        """Raise `DataError` for the first row that has a reason."""
        if not self._found:
            return
        offset = min(self._found)
        row = int(numbers[offset])
        shown = place and place(row)
        raise DataError(key, *self._found[offset], row, shown)

    def rejected(self, numbers: np.ndarray, ids: pa.Array, place: Place) -> list[RejectedRow]:
        """Name the rows that have a reason; `numbers` are theirs in the partition."""
        rejected: list[RejectedRow] = []
        for offset, (reason, _) in sorted(self._found.items()):
            row = int(numbers[offset])
            rejected.append(RejectedRow(row, place(row), _readable_id(ids[offset]), reason))
        return rejected


def reasons_of(batch: pa.RecordBatch) -> pa.Array:
    """Return why the reader of a batch could not parse a row; null if it could."""
    if REASON in batch.schema.names:
        return batch.column(REASON)
    return pa.nulls(len(batch), pa.string())


def with_reason(batch: pa.RecordBatch, reason: str) -> pa.RecordBatch:
    """Give this reason to each row that has none."""
    names = [name for name in batch.schema.names if name != REASON]
    return batch.select(names).append_column(REASON, reasons_of(batch).fill_null(reason))


class FirstIds:
    """The ids of a partition so far, as 64-bit hashes in sorted runs.

    It takes 8 bytes for each id, and twice that while runs are merged. Numbers are their own
    hashes. Of ten million strings two have the same one in one of 100,000 partitions, and the
    second is set aside.
    """

    ROW_BYTES = 16

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def add(self, ids: pa.Array) -> np.ndarray:
        """Add the next ids; return which of them came for the first time, bool [rows]."""
        keys, places = np.unique(id_keys(ids), return_index=True)
        for run in self._runs:
            found = np.minimum(np.searchsorted(run, keys), len(run) - 1)
            is_new = run[found] != keys
            keys = keys[is_new]
            places = places[is_new]
        if len(keys):
            self._append(keys)

        is_first = np.zeros(len(ids), np.bool_)
        is_first[places] = True
        return is_first

    def _append(self, keys: np.ndarray) -> None:
        """Add a run; merge it with those that are not much longer, so that few remain."""
        while self._runs and len(self._runs[-1]) < 2 * len(keys):
            keys = np.concatenate([self._runs.pop(), keys])
            keys.sort(kind="stable")  # which merges sorted runs
        self._runs.append(keys)


def with_first_ids(
    batch: RowBatch, numbers: np.ndarray, place: Place, first_ids: FirstIds
) -> RowBatch:
    """Set aside the rows whose id an earlier row has; `numbers` are theirs in the partition."""
    is_first = first_ids.add(batch.ids)
    if is_first.all():
        return batch
    repeated = Reasons(len(batch))
    repeated.add(~is_first, "the id is repeated; the first row that has it is kept")
    return without_bad_rows(batch, repeated, numbers, place)


def without_bad_rows(
    batch: RowBatch, reasons: Reasons, numbers: np.ndarray, place: Place
) -> RowBatch:
    """Set aside the rows that have a reason; `numbers` are theirs in the partition."""
    if reasons.is_sound.all():
        return batch
    mask = pa.array(reasons.is_sound)
    kept = numbers[reasons.is_sound]
    sound = RowBatch(
        batch.ids.filter(mask),
        batch.texts.filter(mask),  # pyright: ignore[reportArgumentType]
        batch.skipped,
        None if batch.carried is None else batch.carried.filter(mask),
        lambda row: place(int(kept[row])),
        rejected=batch.rejected,
        numbers=kept,
        passages=None if batch.passages is None else batch.passages[reasons.is_sound],
    )
    return with_rejected(sound, reasons.rejected(numbers, batch.ids, place))


def with_rejected(batch: RowBatch, rejected: Sequence[RejectedRow]) -> RowBatch:
    """Add rejected rows to those of a batch, in the partition's order."""
    if not rejected:
        return batch
    both = sorted((*batch.rejected, *rejected), key=lambda each: each.row)
    return replace(batch, rejected=tuple(both))


def plain_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with columns that Arrow can filter."""
    columns: list[pa.Array] = []
    is_changed = False
    for raw in batch.columns:
        column = plain_column(raw)
        if pa.types.is_string_view(column.type):  # not checked here whether it is UTF-8
            column = column.cast(pa.large_binary()).view(pa.large_string())
        elif pa.types.is_binary_view(column.type):
            column = column.cast(pa.large_binary())
        is_changed |= column is not raw
        columns.append(column)
    if not is_changed:
        return batch
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def is_not_utf8(key: str, name: str, column: pa.Array) -> np.ndarray:
    """Return which values have text that is not UTF-8, bool [rows].

    Raises:
        DataError: the column is damaged.
    """
    is_bad = np.zeros(len(column), np.bool_)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if _NOT_UTF8 not in str(error):
            reason = f"the {name} column is damaged ({error})"
            raise DataError(key, reason, "Write it again in the source.") from error
    else:
        return is_bad

    # Arrow names only the first one, and of a list the place among the values of all lists.
    for row, value in enumerate(column):
        try:
            value.as_py()
        except UnicodeDecodeError:
            is_bad[row] = True
    return is_bad


def _readable_id(value: pa.Scalar) -> str | None:
    """Return the text of an id; None if it is null or cannot be decoded."""
    try:
        plain = value.as_py()
    except UnicodeDecodeError:
        return None
    return None if plain is None else id_text(plain)


def id_text(value: Any) -> str:
    """Return an id as rejected rows name it."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)
