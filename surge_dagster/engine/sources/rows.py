"""The check and conversion of raw columns to row batches.

A null, a text that is not UTF-8 and a text beyond the maximum are refused here, where the number of
the row is still known. Arrow does not check that Parquet's strings are UTF-8, and a wrong byte
would end a worker in its tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.casting import UnfitValue, cast_column, plain_column
from surge_dagster.engine.sources.partition import Place, RowBatch
from surge_dagster.engine.support.columns import value_lengths
from surge_dagster.engine.support.values import stored_type

BATCH_BYTES = 2 * 1024 * 1024
BATCH_ROWS = 8192
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


def small(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a batch without dictionaries, in pieces of at most 8,192 rows and two megabytes."""
    is_large = len(batch) > BATCH_ROWS or sum(map(_decoded_bytes, batch.columns)) > BATCH_BYTES
    if is_large and len(batch) > 1:
        middle = len(batch) // 2
        yield from small(batch.slice(0, middle))
        yield from small(batch.slice(middle))
    elif len(batch):
        plain = [plain_column(column) for column in batch.columns]
        yield pa.RecordBatch.from_arrays(plain, batch.schema.names)


def _decoded_bytes(column: pa.Array) -> int:
    """Return the bytes of a column without its dictionary, whose values many rows may share."""
    if not isinstance(column, pa.DictionaryArray):
        return column.nbytes
    try:
        lengths = value_lengths(column.dictionary.cast(pa.large_binary()))
    except pa.ArrowNotImplementedError:  # neither strings nor bytes
        return column.indices.nbytes
    if not len(lengths):
        return 0
    # An index beyond the dictionary is found when the column is decoded.
    return int(lengths.take(column.indices.fill_null(0).to_numpy(), mode="clip").sum())


def together(
    batches: Iterable[pa.RecordBatch], most_bytes: int = BATCH_BYTES, most_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Join consecutive batches, up to these bytes and rows."""
    pending: list[pa.RecordBatch] = []
    size = 0
    rows = 0
    for batch in batches:
        size += batch.nbytes
        rows += len(batch)
        if pending and (size > most_bytes or rows > most_rows):
            yield pa.concat_batches(pending)
            pending = []
            size = batch.nbytes
            rows = len(batch)
        pending.append(batch)
    if pending:
        yield pa.concat_batches(pending)


def canonical_type(kind: pa.DataType) -> pa.DataType:
    """Return one type for all that differ only in their layout.

    Outside of lists and structs, integers of any size are int64.
    """
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_inner_type(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_inner_type(kind.value_type), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([(each.name, _inner_type(each.type)) for each in kind.fields])
    if pa.types.is_null(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if (
        pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    ):
        return pa.binary()
    if pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        return pa.int64()
    return kind


def _inner_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind):
        return kind
    return canonical_type(kind)


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
