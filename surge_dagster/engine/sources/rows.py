"""The check and conversion of raw columns to row batches: every row that would cause harm later is
refused here.

A null, a text that is not UTF-8 or one beyond the maximum is found on the way in, where its row
number is still known. Arrow does not check that Parquet's strings are UTF-8, and a byte that is not
would end a worker in its tokenizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.partition import Place, RowBatch
from surge_dagster.engine.support.columns import value_lengths, value_parts
from surge_dagster.engine.support.values import stored_type

_BATCH_BYTES = 2 * 1024 * 1024
_BATCH_ROWS = 8192
# the last byte of ASCII that is white space, the first byte of other white space
_SPACE, _FIRST_SPACE = 0x20, 0xC2
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
    """Check and convert one batch; `rows` are its zero-based numbers in the partition, which
    `place` puts in words."""
    ids = _canonical_ids(key, without_dictionary(raw_ids))
    texts = canonical_texts(key, without_dictionary(raw_texts))
    for name, column in (("id", ids), ("text", texts)):
        if column.null_count:
            offset = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            further = "" if name == "id" else ", or say with missing_text what becomes of such rows"
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
        raise overlong(key, int(lengths[offset]), max_text_bytes, int(rows[offset]))
    if carried is not None:
        for name, column in zip(carried.schema.names, carried.columns, strict=True):
            _require_valid(key, name, column, rows)
    return RowBatch(ids, texts, skipped, carried, place and (lambda row: place(int(rows[row]))))


def overlong(key: str, text_bytes: int, max_text_bytes: int, row: int) -> DataError:
    return DataError(
        key,
        f"the text has {text_bytes:,} bytes; at most {max_text_bytes:,} are allowed",
        "Shorten it in the source or raise max_text_bytes (the model reads only its first tokens anyway).",
        row,
    )


def without_dictionary(column: pa.Array) -> pa.Array:
    if not isinstance(column, pa.DictionaryArray):
        return column
    # of polars; pyarrow has no kernel that takes from a view
    if pa.types.is_string_view(column.dictionary.type):
        column = pa.DictionaryArray.from_arrays(
            column.indices, column.dictionary.cast(pa.large_string())
        )
    return column.dictionary_decode()


def small(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch without dictionaries, in pieces of at most 8,192 rows and, unless one row has more,
    two megabytes."""
    if len(batch) > 1 and (
        len(batch) > _BATCH_ROWS or sum(map(_decoded_bytes, batch.columns)) > _BATCH_BYTES
    ):
        middle = len(batch) // 2
        yield from small(batch.slice(0, middle))
        yield from small(batch.slice(middle))
    elif len(batch):
        plain = [without_dictionary(column) for column in batch.columns]
        yield pa.RecordBatch.from_arrays(plain, batch.schema.names)


def _decoded_bytes(column: pa.Array) -> int:
    """Bytes of a column without its dictionary, of which each value may be long and stand for many
    rows."""
    if not isinstance(column, pa.DictionaryArray):
        return column.nbytes
    try:
        lengths = value_lengths(column.dictionary.cast(pa.large_binary()))
    except pa.ArrowNotImplementedError:  # neither strings nor bytes
        return column.indices.nbytes
    # An index beyond the dictionary is found when the column is decoded.
    return (
        int(lengths.take(column.indices.fill_null(0).to_numpy(), mode="clip").sum())
        if len(lengths)
        else 0
    )


def together(
    batches: Iterable[pa.RecordBatch], most_bytes: int = _BATCH_BYTES, most_rows: int = _BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Consecutive batches put together, as far as they have no more bytes and rows than this."""
    held, size, rows = list[pa.RecordBatch](), 0, 0
    for batch in batches:
        size, rows = size + batch.nbytes, rows + len(batch)
        if held and (size > most_bytes or rows > most_rows):
            yield pa.concat_batches(held) if len(held) > 1 else held[0]
            held, size, rows = [], batch.nbytes, len(batch)
        held.append(batch)
    if held:
        yield pa.concat_batches(held) if len(held) > 1 else held[0]


def canonical_type(kind: pa.DataType) -> pa.DataType:
    """One type for all that differ in their layout or, outside of lists and structs, in the size of
    their integers."""
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
    return pa.int64() if pa.types.is_integer(kind) and not pa.types.is_uint64(kind) else kind


def _inner_type(kind: pa.DataType) -> pa.DataType:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind if pa.types.is_integer(kind) else canonical_type(kind)


def carried_columns(key: str, batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Further columns that travel with the rows, in types that each kind of source and each output
    file has."""
    columns: list[pa.Array] = []
    for name in names:
        plain = without_dictionary(batch.column(name))
        column = plain.storage if isinstance(plain, pa.ExtensionArray) else plain
        try:
            kind = stored_type(canonical_type(column.type))
        except TypeError:
            raise DataError(
                key,
                f"the column {name!r} has type {plain.type}, which cannot be carried into output files",
                "Carry plain values, lists or structs of them: cast it in the source, or leave it out of columns.",
            ) from None
        columns.append(column if column.type == kind else column.cast(kind))
    return pa.RecordBatch.from_arrays(columns, list(names))


def is_blank(texts: pa.LargeStringArray) -> np.ndarray:
    """Which texts are empty or nothing but white space, bool [rows]; nulls are not."""
    if texts.null_count:
        texts = texts.fill_null("no space")
    offsets, content = value_parts(texts)
    blank = offsets[1:] == offsets[:-1]
    begins = np.frombuffer(content, np.uint8)[(offsets[:-1] - offsets[0])[~blank]]
    # seldom, and asking Arrow takes longer
    if ((begins <= _SPACE) | (begins >= _FIRST_SPACE)).any():
        with contextlib.suppress(pa.ArrowInvalid):  # what is not UTF-8 is refused anyway
            blank |= pc.utf8_is_space(texts).to_numpy(zero_copy_only=False)  # pyright: ignore[reportAttributeAccessIssue]
    return blank


def null_where(mask: np.ndarray, texts: pa.Array) -> pa.Array:
    if not mask.any():
        return texts
    null = pa.scalar(None, texts.type)
    return pc.if_else(pa.array(mask), null, texts)  # pyright: ignore[reportAttributeAccessIssue]


def _canonical_ids(key: str, column: pa.Array) -> pa.Array:
    kind = pa.int64() if pa.types.is_integer(column.type) else canonical_type(column.type)
    if kind not in (pa.string(), pa.int64(), pa.binary()):
        raise DataError(
            key,
            f"the id column has type {column.type}; expected string, integer or binary",
            "Cast it in the source, or name another id column.",
        )
    try:
        return column if column.type == kind else column.cast(kind)
    except pa.ArrowInvalid as error:
        raise DataError(
            key, f"an id does not fit in int64 ({error})", "Store such ids as strings."
        ) from error


def canonical_texts(key: str, column: pa.Array) -> pa.LargeStringArray:
    """The texts as large_string; `DataError` where the column has another type than strings."""
    kind = column.type
    if canonical_type(kind) != pa.string():
        raise DataError(
            key,
            f"the text column has type {kind}; expected string",
            "Cast it in the source, or name another text column.",
        )
    return column if pa.types.is_large_string(kind) else column.cast(pa.large_string())  # pyright: ignore[reportReturnType]


def _require_valid(key: str, name: str, column: pa.Array, rows: Sequence[int] | np.ndarray) -> None:
    """Refuse a column with values that Arrow does not accept; strings that are not UTF-8 by their
    row."""
    try:
        column.validate(full=True)
        return
    except pa.ArrowInvalid as error:
        damage = error
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    # a value that begins outside of the data must not be looked at
    with contextlib.suppress(pa.ArrowInvalid):
        raw = (
            column.view(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
            if is_text
            else column
        )
        raw.validate(full=True)
        for offset, value in enumerate(raw):
            try:
                (value.as_py() or b"").decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    key,
                    f"the {name} is not valid UTF-8 ({error})",
                    "Re-encode it in the source, or set encoding for a CSV file of another one, then run again.",
                    int(rows[offset]),
                ) from error
    raise DataError(
        key, f"the {name} column is damaged ({damage})", "Write it again in the source."
    ) from damage
