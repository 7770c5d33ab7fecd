"""The one place where the values of a column get another type.

An extension column counts as what it is stored as, but a UUID as its usual text. What Arrow cannot
convert becomes `UnfitValue`, which names the first row; the caller adds the partition or the file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.support.printable import first_line

_ERRORS = (pa.ArrowException, ValueError, OverflowError)
_NO_WIDTH = "\u00ad\u180e\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"
_BLANK = "".join(filter(str.isspace, map(chr, range(0x3001)))) + _NO_WIDTH
_STRINGS = (pa.string(), pa.large_string(), pa.string_view(), pa.null())
_BINARIES = (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1))
_INTEGERS = (
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32()),
)
_CANONICAL = {
    **{kind.id: pa.string() for kind in _STRINGS},
    **{kind.id: pa.binary() for kind in _BINARIES},
    **{kind.id: pa.int64() for kind in _INTEGERS},
}
_OUT_OF_RANGE = "<value out of range"  # what Arrow writes for a time outside of its calendar


class UnfitValue(Exception):
    """A value, or the type of its column, cannot be converted.

    Args:
        reason: the end of a sentence that begins with the column.
        row: of the value in its column; None if the type is wrong.
    """

    def __init__(self, reason: str, row: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.row = row

    def refused(self, key: str, name: str, rows: Sequence[int] | np.ndarray) -> DataError:
        """Return the error that refuses the partition; `rows` are the numbers of its rows."""
        return DataError(
            key,
            f"the column {name!r} {self.reason}",
            "Correct it or cast the column in the source, or leave the column out.",
            None if self.row is None else int(rows[self.row]),
        )


def plain_column(column: pa.Array) -> pa.Array:
    """Return a column without its dictionary, run lengths or extension type."""
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(column, pa.DictionaryArray):
        # pyarrow cannot decode the views of polars.
        if pa.types.is_string_view(column.dictionary.type):
            values = column.dictionary.cast(pa.large_string())
            column = pa.DictionaryArray.from_arrays(column.indices, values)
        column = column.dictionary_decode()
    if not isinstance(column, pa.ExtensionArray):
        return column
    if column.type == pa.uuid():
        return pa.array(map(_uuid_text, column.storage.to_pylist()), pa.string())
    return column.storage


def _uuid_text(value: bytes | None) -> str | None:
    if value is None:
        return None
    digits = value.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def is_typeless(kind: pa.DataType) -> bool:
    """Return whether a column of this type can only have nulls, or lists and structs of nulls."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return is_typeless(kind.value_type)
    if pa.types.is_struct(kind):
        return all(is_typeless(field.type) for field in kind.fields)
    return pa.types.is_null(kind)


def canonical_type(kind: pa.DataType) -> pa.DataType:
    """Return one type for all that differ only in their layout.

    Outside of lists and structs, integers of any size are int64.
    """
    if kind.id in _CANONICAL:
        return _CANONICAL[kind.id]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_inner_type(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_inner_type(kind.value_type), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([(each.name, _inner_type(each.type)) for each in kind.fields])
    return kind


def _inner_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind):
        return kind
    return canonical_type(kind)


def cast_column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the column in another type; raise `UnfitValue` if a value does not fit."""
    if column.type == kind:
        return column
    try:
        return column.cast(kind)
    except _ERRORS as error:
        reason = f"cannot be read as {kind} ({first_line(error)})"

    def is_unfit_until(row: int) -> bool:
        try:
            column.slice(0, row + 1).cast(kind)
        except _ERRORS:
            return True
        return False

    row = bisect_left(range(len(column) - 1), True, key=is_unfit_until)
    raise UnfitValue(reason, row)


def as_strings(column: pa.Array) -> pa.Array:
    """Return a plain column as large_string, as Arrow writes numbers, booleans and times."""
    kind = column.type
    is_bytes = (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )
    if is_bytes or pa.types.is_nested(kind) or pa.types.is_interval(kind):
        raise UnfitValue(
            f"has type {kind}; a text is put together from strings, numbers, booleans and times"
        )
    strings = cast_column(column, pa.large_string())
    if pa.types.is_temporal(kind):
        unzoned = strings
        if pa.types.is_timestamp(kind) and kind.tz is not None:  # Arrow writes such a time wrongly
            unzoned = column.cast(pa.timestamp(kind.unit)).cast(pa.large_string())
        is_out = pc.starts_with(unzoned, _OUT_OF_RANGE).fill_null(False)  # pyright: ignore[reportAttributeAccessIssue]
        if (row := pc.index(is_out, True).as_py()) >= 0:  # pyright: ignore[reportAttributeAccessIssue]
            raise UnfitValue(f"has a {kind} outside of the calendar", row)
    return strings


def is_blank(texts: pa.LargeStringArray) -> np.ndarray:
    """Return which texts are empty or only white space, zero-width characters among it.

    bool [rows]; nulls are not blank.
    """
    try:
        rest = pc.utf8_trim(texts, characters=_BLANK)  # pyright: ignore[reportAttributeAccessIssue]
    except pa.ArrowInvalid:  # a text is not UTF-8; Arrow does not say which
        return np.array([_is_blank_text(text) for text in texts], np.bool_)
    # A null has no length. Comparing strings with "" would take six times as long for a few rows.
    lengths = pc.binary_length(rest)  # pyright: ignore[reportAttributeAccessIssue]
    return lengths.to_numpy(zero_copy_only=False) == 0


def _is_blank_text(text: pa.Scalar) -> bool:
    try:
        value = text.as_py()
    except UnicodeDecodeError:
        return False
    return value is not None and not value.strip(_BLANK)


def null_where(mask: np.ndarray, texts: pa.Array) -> pa.Array:
    if not mask.any():
        return texts
    null = pa.scalar(None, texts.type)
    return pc.if_else(pa.array(mask), null, texts)  # pyright: ignore[reportAttributeAccessIssue]
