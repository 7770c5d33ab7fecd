"""The rows of a table's files, with the same types in every file, and the key of each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.sources.casting import plain_column
from surge_dagster.engine.sources.formats import batches
from surge_dagster.engine.sources.listing import SourceFile
from surge_dagster.engine.sources.rows import canonical_type, together
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.keys import joined_key
from surge_dagster.engine.tables.grouping import Block

# Stands for every value that cannot be a key, as hive writers name it.
NO_KEY = "__HIVE_DEFAULT_PARTITION__"
_BLOCK_BYTES = 16 * 1024 * 1024
_BLOCK_ROWS = 256 * 1024


class TableRows:
    """The selected columns of a table; `file_rows` counts the rows of each file read."""

    def __init__(
        self, files: Sequence[SourceFile], partition_by: Sequence[str], selection: Selection
    ) -> None:
        self.file_rows: list[int] = []
        self._files = files
        self._partition_by = partition_by
        self._columns = selection.columns
        self._encoding = selection.encoding
        self._types: dict[str, tuple[pa.DataType, SourceFile]] = {}

    def blocks(self) -> Iterator[Block]:
        """Yield all rows in large blocks, with their keys."""
        first_row = 0
        for rows in together(self._all(), _BLOCK_BYTES, _BLOCK_ROWS):
            named = [(name, rows.column(f"\0{name}")) for name in self._partition_by]
            keys, places = keys_of(named)
            yield Block(first_row, rows.select(list(self._columns)), keys, places)
            first_row += len(rows)

    def _all(self) -> Iterator[pa.RecordBatch]:
        needed = list(dict.fromkeys((*self._columns, *self._partition_by)))
        self.file_rows = []
        for file in self._files:
            self.file_rows.append(0)
            for raw in batches(file, needed, encoding=self._encoding):
                self.file_rows[-1] += len(raw)
                batch = self._uniform(file, raw)
                if len(batch):
                    yield batch

    def _uniform(self, file: SourceFile, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Return the selected columns in the types of the first file, and key columns as strings.

        The names of key columns begin with NUL, since a column may be both.
        """
        columns: dict[str, pa.Array] = {}
        for name in self._columns:
            columns[name] = self._in_type(file, name, plain_column(raw.column(name)))
        for name in self._partition_by:
            key = plain_column(raw.column(name))
            columns[f"\0{name}"] = _key_strings(file, name, key)
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _in_type(self, file: SourceFile, name: str, column: pa.Array) -> pa.Array:
        wanted = canonical_type(column.type)
        kind, first = self._types.setdefault(name, (wanted, file))
        if wanted != kind and not pa.types.is_null(column.type):
            raise ConfigError(
                f"the column {name!r} has type {kind} in {first.shown} and {wanted} in "
                f"{file.shown}; a table has one type for each column. Write the files again with "
                "the same types."
            )
        return column.cast(kind)


def _key_strings(file: SourceFile, name: str, column: pa.Array) -> pa.Array:
    kind = column.type
    is_plain = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_date(kind)
    if canonical_type(kind) != pa.string() and not is_plain:
        raise ConfigError(
            f"the column {name!r} of {file.shown} has type {kind} and cannot be a key. Use "
            "strings, integers, booleans or dates: cast it, or partition by another column."
        )
    return column.cast(pa.string())


def without_key(key: str, rows: int, columns: Sequence[str], first: str = "") -> DataError:
    """Return the error that refuses rows without a key; `first` is the first one, if known."""
    names = " or ".join(map(repr, columns))
    reason = f"{counted(rows, 'row')} without a key, since {names} is null, empty or not UTF-8"
    remedy = "Give those rows a value, or remove them from the source"
    if not first:
        return DataError(key, reason, f"{remedy}.")
    encoding = "for a CSV file that is not UTF-8, set encoding"
    return DataError(key, f"{reason}; the first is {first}", f"{remedy}; {encoding}.")


def keys_of(columns: Sequence[tuple[str, pa.Array]]) -> tuple[list[str], np.ndarray]:
    """Return the different keys in the order of their first rows, and each row's place in them."""
    encoded: list[Any] = [column.dictionary_encode(null_encoding="encode") for _, column in columns]
    values = [_texts(each.dictionary) for each in encoded]
    codes = encoded[0].indices.to_numpy()
    combinations = [(value,) for value in values[0]]
    for each, column in zip(encoded[1:], values[1:], strict=True):
        # Numbered again after each column: numbers of all possible combinations may not fit.
        numbers = codes.astype(np.int64) * len(column) + each.indices.to_numpy()
        both: Any = pa.array(numbers).dictionary_encode()
        codes = both.indices.to_numpy()
        pairs = [divmod(number, len(column)) for number in both.dictionary.to_pylist()]
        combinations = [(*combinations[first], column[second]) for first, second in pairs]
    names = [name for name, _ in columns]
    return [_joined(names, key) for key in combinations], codes


def _joined(names: Sequence[str], values: Sequence[str | None]) -> str:
    key: dict[str, str] = {}
    for name, value in zip(names, values, strict=True):
        if not value or value == NO_KEY:
            return NO_KEY
        key[name] = value
    return joined_key(key)


def _texts(values: pa.Array) -> list[str | None]:
    """Return the values, None for what is not UTF-8."""
    try:
        return values.to_pylist()
    except UnicodeDecodeError:
        return [raw and _decoded(raw) for raw in values.cast(pa.binary()).to_pylist()]


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
