"""Checks the rows of a source, and converts them for the run.

A source passes the raw batches of a partition to `checked_rows`. A null, a text that is not UTF-8
and a text beyond the maximum are found here, where the number of the row is still known. The first
bad row refuses the partition, or all of them are set aside. Arrow does not check that Parquet's
strings are UTF-8, and a wrong byte would end a worker in its tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.bad_rows import (
    FirstIds,
    Reasons,
    is_not_utf8,
    plain_batch,
    reasons_of,
    with_first_ids,
    with_rejected,
)
from surge_dagster.engine.sources.casting import (
    UnfitValue,
    canonical_type,
    cast_column,
    is_blank,
    null_where,
)
from surge_dagster.engine.sources.partition import Place, RejectedRow, RowBatch, row_in_words
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support.values import stored_type, value_lengths

_SET_ASIDE = "set bad_rows to set_aside"


def checked_rows(
    selection: Selection,
    key: str,
    batches: Iterable[pa.RecordBatch],
    first_row: int = 0,
    place: Place = row_in_words,
    first_ids: FirstIds | None = None,
) -> Iterator[RowBatch]:
    """Check and convert the rows of consecutive batches; yield all that are neither skipped nor
    set aside.

    Args:
        batches: of at least the selected `columns`, dictionary-encoded or not; a few megabytes.
        first_row: of the first batch, zero-based, in the partition.
        place: of a row of the partition.
        first_ids: of the rows before these, if the partition is not read in one call.
    """
    checks = _Checks(selection, key, place, first_ids or FirstIds())
    for batch in batches:
        numbers = np.arange(first_row, first_row + len(batch))
        try:
            yield checks.checked(batch, numbers)
        except DataError as error:
            if error.row is None:
                raise
            shown = place(error.row)
            raise DataError(error.key, error.reason, error.remedy, error.row, shown) from error
        first_row += len(batch)


@dataclass(frozen=True, slots=True)
class _Checks:
    """The checks of one partition's rows, whose numbers in the partition are `numbers`."""

    selection: Selection
    key: str
    place: Place
    first_ids: FirstIds

    def checked(self, batch: pa.RecordBatch, numbers: np.ndarray) -> RowBatch:
        """Return the rows that are neither bad nor skipped."""
        batch = plain_batch(batch)
        rejected: list[RejectedRow] = []
        sets_aside = self.selection.bad_rows == "set_aside"
        if sets_aside and reasons_of(batch).null_count < len(batch):
            reasons = _reasons_of_reader(batch)
            rejected += reasons.rejected(numbers, batch.column(self.selection.id), self.place)
            batch = batch.filter(pa.array(reasons.is_sound))
            numbers = numbers[reasons.is_sound]

        kind = self._id_type(batch)
        texts = self._texts(batch, numbers)
        is_missing = _is_null(texts)
        reasons = self._reasons(batch, texts, is_missing)
        if sets_aside:
            rejected += reasons.rejected(numbers, batch.column(self.selection.id), self.place)
        else:
            reasons.require_none(self.key, numbers)

        is_kept = reasons.is_sound
        skipped = 0
        if self.selection.missing_text == "skip":
            skipped = int((is_kept & is_missing).sum())
            is_kept = is_kept & ~is_missing
        if not is_kept.all():
            mask = pa.array(is_kept)
            batch = batch.filter(mask)
            texts = texts.filter(mask)
            numbers = numbers[is_kept]
        rows = self._converted(batch, kind, texts, numbers, skipped)
        if sets_aside:
            rows = with_first_ids(rows, numbers, self.place, self.first_ids)
        return with_rejected(rows, rejected)

    def _reasons(self, batch: pa.RecordBatch, texts: pa.Array, is_missing: np.ndarray) -> Reasons:
        """Find the bad rows. A row that is skipped is not a bad one."""
        selection = self.selection
        is_checked = np.ones(len(batch), np.bool_)
        if selection.missing_text == "skip":
            is_checked = ~is_missing
        reasons = Reasons(len(batch))
        self._check_utf8(reasons, "text", texts, is_checked)
        if selection.missing_text == "refuse":
            remedy = "Fill it or drop the row in the source, or set missing_text to skip or empty."
            reasons.add(is_missing, "the text is null or blank; every row needs one", remedy)
        elif selection.missing_text == "refuse_nulls":
            remedy = (
                "Fill or drop the text in the source, then run again, or set missing_text to skip "
                f"or empty, or {_SET_ASIDE}."
            )
            reasons.add(is_missing, "the text is null; every row needs one", remedy)

        self._check_lengths(reasons, texts, ~is_missing)
        is_without_id = is_checked & _is_null(batch.column(selection.id))
        remedy = f"Fill or drop the id in the source, then run again, or {_SET_ASIDE}."
        reasons.add(is_without_id, "the id is null; every row needs one", remedy)
        self._check_utf8(reasons, "id", batch.column(selection.id), is_checked)
        for name in selection.carried:
            self._check_utf8(reasons, name, batch.column(name), is_checked)
        return reasons

    def _check_utf8(
        self, reasons: Reasons, name: str, column: pa.Array, is_checked: np.ndarray
    ) -> None:
        is_bad = is_checked & is_not_utf8(self.key, name, column)
        remedy = "Re-encode it in the source, or set encoding for a CSV file, then run again."
        reasons.add(is_bad, f"the {name} is not valid UTF-8", remedy)

    def _check_lengths(self, reasons: Reasons, texts: pa.Array, has_text: np.ndarray) -> None:
        lengths = value_lengths(texts)
        limit = self.selection.max_text_bytes
        if lengths.max(initial=0) <= limit:
            return
        is_long = has_text & (lengths > limit)
        reasons.add(
            is_long,
            [
                f"the text has {length:,} bytes; at most {limit:,} are allowed"
                for length in lengths[is_long].tolist()
            ],
            "Shorten it in the source, raise max_text_bytes (a model reads only its first tokens), "
            f"or {_SET_ASIDE}.",
        )

    def _texts(self, batch: pa.RecordBatch, numbers: np.ndarray) -> pa.Array:
        """Return the texts; null if they are missing. Without rows, columns may have any type."""
        selection = self.selection
        if not len(batch):
            return pa.array([], pa.large_string())
        blank_is_null = selection.missing_text != "refuse_nulls"
        if selection.template is not None:
            return selection.template.texts(self.key, batch, numbers, blank_is_null=blank_is_null)
        texts = self._canonical_texts(batch.column(selection.text))
        return null_where(is_blank(texts), texts) if blank_is_null else texts

    def _canonical_texts(self, column: pa.Array) -> pa.LargeStringArray:
        if canonical_type(column.type) != pa.string():
            raise DataError(
                self.key,
                f"the text column has type {column.type}; expected string",
                "Cast it in the source, or name another text column.",
            )
        return cast_column(column, pa.large_string())  # pyright: ignore[reportReturnType]

    def _id_type(self, batch: pa.RecordBatch) -> pa.DataType:
        """Return string, int64 or binary; a column without rows may have any type."""
        kind = batch.column(self.selection.id).type
        if pa.types.is_integer(kind):
            return pa.int64()
        canonical = canonical_type(kind)
        if canonical in (pa.string(), pa.binary()):
            return canonical
        if not len(batch):
            return pa.string()
        raise DataError(
            self.key,
            f"the id column has type {kind}; expected string, integer or binary",
            "Cast it in the source, or name another id column.",
        )

    def _converted(
        self,
        batch: pa.RecordBatch,
        id_type: pa.DataType,
        texts: pa.Array,
        numbers: np.ndarray,
        skipped: int,
    ) -> RowBatch:
        """Return sound rows in types that every source and every output file can have."""
        selection = self.selection
        carried = None
        if selection.carried:
            carried = self._carried(batch, numbers)
        passages = None
        if selection.passage is not None and selection.template is not None and len(batch):
            passages = selection.template.passages(self.key, batch, numbers, selection.passage)
        ids = self._ids(batch, id_type, numbers)
        if selection.missing_text == "empty":
            texts = texts.fill_null("")
        place = self.place
        return RowBatch(
            ids,
            texts,  # pyright: ignore[reportArgumentType]
            skipped,
            carried,
            lambda row: place(int(numbers[row])),
            numbers=numbers,
            passages=passages,
        )

    def _carried(self, batch: pa.RecordBatch, numbers: np.ndarray) -> pa.RecordBatch:
        columns: list[pa.Array] = []
        for name in self.selection.carried:
            column = batch.column(name)
            try:
                columns.append(cast_column(column, _carried_type(column.type)))
            except UnfitValue as error:
                raise error.refused(self.key, name, numbers) from error
        return pa.RecordBatch.from_arrays(columns, list(self.selection.carried))

    def _ids(self, batch: pa.RecordBatch, kind: pa.DataType, numbers: np.ndarray) -> pa.Array:
        if not len(batch):
            return pa.array([], kind)
        try:
            return cast_column(batch.column(self.selection.id), kind)
        except UnfitValue as error:
            raise error.refused(self.key, "id", numbers) from error


def _is_null(column: pa.Array) -> np.ndarray:
    if not column.null_count:
        return np.zeros(len(column), np.bool_)
    return column.is_null().to_numpy(zero_copy_only=False)


def _reasons_of_reader(batch: pa.RecordBatch) -> Reasons:
    given = reasons_of(batch)
    reasons = Reasons(len(batch))
    reasons.add(given.is_valid().to_numpy(zero_copy_only=False), given.drop_null().to_pylist())
    return reasons


def _carried_type(kind: pa.DataType) -> pa.DataType:
    try:
        return stored_type(canonical_type(kind))
    except TypeError:
        raise UnfitValue(f"has type {kind}, which cannot be carried into files") from None
