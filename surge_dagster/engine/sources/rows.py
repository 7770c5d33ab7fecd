"""The check and conversion of raw columns to row batches.

A null, a text that is not UTF-8 and a text beyond the maximum are refused here, where the number of
the row is still known. Arrow does not check that Parquet's strings are UTF-8, and a wrong byte
would end a worker in its tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.casting import (
    UnfitValue,
    canonical_type,
    cast_column,
    plain_column,
)
from surge_dagster.engine.sources.partition import Place, RowBatch
from surge_dagster.engine.support.values import stored_type, value_lengths

_NOT_UTF8 = re.compile(r"Invalid UTF8 sequence at string index (\d+)")
_NO_WIDTH = "\u00ad\u180e\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"
_BLANK = "".join(filter(str.isspace, map(chr, range(0x3001)))) + _NO_WIDTH
DEFAULT_MAX_TEXT_BYTES = 4 * 1024 * 1024


def row_batch(
    key: str,
    raw_ids: pa.Array,
    raw_texts: pa.Array,
    rows: Sequence[int] | np.ndarray,
    max_text_bytes: int,
    skipped: int = 0,
    carried: pa.RecordBatch | None = None,
    place: Place | None = None,
) -> RowBatch:
    """Check and convert one batch; `rows` are its numbers in the partition, for `place`."""
    ids = _canonical_ids(key, plain_column(raw_ids), rows)
    texts = canonical_texts(key, raw_texts)
    for name, column in (("id", ids), ("text", texts)):
        if column.null_count:
            offset = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            further = "" if name == "id" else ", or set missing_text to skip or empty"
            raise DataError(
                key,
                f"the {name} is null; every row needs one",
                f"Fill or drop the {name} in the source, then run again{further}.",
                int(rows[offset]),
            )
        _require_valid(key, name, column, rows)
    lengths = value_lengths(texts)
    if lengths.max(initial=0) > max_text_bytes:
        offset = int(np.argmax(lengths > max_text_bytes))
        raise DataError(
            key,
            f"the text has {lengths[offset]:,} bytes; at most {max_text_bytes:,} are allowed",
            "Shorten it in the source, or raise max_text_bytes (a model reads only its first "
            "tokens).",
            int(rows[offset]),
        )
    if carried is not None:
        for name, column in zip(carried.schema.names, carried.columns, strict=True):
            _require_valid(key, name, column, rows)
    return RowBatch(ids, texts, skipped, carried, place and (lambda row: place(int(rows[row]))))


def carried_columns(
    key: str, batch: pa.RecordBatch, names: Sequence[str], first_row: int
) -> pa.RecordBatch:
    """Return the carried columns in types that every source and every output file can have."""
    rows = range(first_row, first_row + len(batch))
    columns: list[pa.Array] = []
    for name in names:
        column = plain_column(batch.column(name))
        try:
            columns.append(cast_column(column, _carried_type(column.type)))
        except UnfitValue as error:
            raise error.refused(key, name, rows) from error
    return pa.RecordBatch.from_arrays(columns, list(names))


def _carried_type(kind: pa.DataType) -> pa.DataType:
    try:
        return stored_type(canonical_type(kind))
    except TypeError:
        raise UnfitValue(f"has type {kind}, which cannot be carried into files") from None


def is_blank(texts: pa.LargeStringArray) -> np.ndarray:
    """Return which texts are empty or only white space, zero-width characters among it.

    bool [rows]; nulls are not blank.
    """
    try:
        rest = pc.utf8_trim(texts, characters=_BLANK)  # pyright: ignore[reportAttributeAccessIssue]
    except pa.ArrowInvalid:  # what is not UTF-8 is refused anyway
        return np.zeros(len(texts), np.bool_)
    return pc.equal(rest, "").fill_null(False).to_numpy(zero_copy_only=False)  # pyright: ignore[reportAttributeAccessIssue]


def null_where(mask: np.ndarray, texts: pa.Array) -> pa.Array:
    if not mask.any():
        return texts
    null = pa.scalar(None, texts.type)
    return pc.if_else(pa.array(mask), null, texts)  # pyright: ignore[reportAttributeAccessIssue]


def _canonical_ids(key: str, column: pa.Array, rows: Sequence[int] | np.ndarray) -> pa.Array:
    """Return ids as string, int64 or binary; a column without rows may have any type."""
    kind = canonical_type(column.type)
    if pa.types.is_integer(column.type):
        kind = pa.int64()
    if kind not in (pa.string(), pa.int64(), pa.binary()):
        if not len(column):
            return pa.array([], pa.string())
        raise DataError(
            key,
            f"the id column has type {column.type}; expected string, integer or binary",
            "Cast it in the source, or name another id column.",
        )
    try:
        return cast_column(column, kind)
    except UnfitValue as error:
        raise error.refused(key, "id", rows) from error


def canonical_texts(key: str, column: pa.Array) -> pa.LargeStringArray:
    """Return texts as large_string; raise `DataError` for a column of another type."""
    plain = plain_column(column)
    if canonical_type(plain.type) != pa.string():
        raise DataError(
            key,
            f"the text column has type {column.type}; expected string",
            "Cast it in the source, or name another text column.",
        )
    return cast_column(plain, pa.large_string())  # pyright: ignore[reportReturnType]


def _require_valid(key: str, name: str, column: pa.Array, rows: Sequence[int] | np.ndarray) -> None:
    """Refuse a column with values that Arrow does not accept."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if (found := _NOT_UTF8.match(str(error))) is None:
            reason = f"the {name} column is damaged ({error})"
            raise DataError(key, reason, "Write it again in the source.") from error
        raise DataError(
            key,
            f"the {name} is not valid UTF-8",
            "Re-encode it in the source, or set encoding for a CSV file, then run again.",
            int(rows[int(found[1])]),
        ) from error
