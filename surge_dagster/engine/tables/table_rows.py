"""The rows of a table's files, with the same types in every file, and the key of each row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.sources.batching import together
from surge_dagster.engine.sources.casting import (
    UnfitValue,
    as_strings,
    canonical_type,
    is_typeless,
    plain_column,
)
from surge_dagster.engine.sources.file_read import SourceFile
from surge_dagster.engine.sources.formats import batches
from surge_dagster.engine.sources.listing import SourceFiles
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.keys import joined_key
from surge_dagster.engine.tables.grouping import Block

# Stands for every value that cannot be a key, as hive writers name it.
NO_KEY = "__HIVE_DEFAULT_PARTITION__"
_BLOCK_BYTES = 16 * 1024 * 1024
_BLOCK_ROWS = 256 * 1024


class FileTable:
    """Files whose rows are one table.

    Attributes:
        parts: name and rows of each file that was read last.
    """

    def __init__(
        self, files: SourceFiles, partition_by: Sequence[str], selection: Selection
    ) -> None:
        self.url = files.url
        self.identity = files.identity
        self.parts: list[tuple[str, int]] = []
        self._files = files
        self._listed: list[SourceFile] = []
        self._types: dict[str, tuple[pa.DataType, str]] = {}
        self._partition_by = partition_by
        self._columns = selection.columns
        self._read = partial(batches, encoding=selection.encoding, escape=selection.escape)

    def version(self) -> str | None:
        """List the files, and return their version; None if there are none."""
        self._listed = self._files.list()
        if not self._listed:
            return None
        lines = "".join(f"{file.relative}\0{file.size}\0{file.token}\n" for file in self._listed)
        return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:24]

    def blocks(self) -> Iterator[Block]:
        """Yield the rows of the listed files in large blocks, with their keys."""
        first_row = 0
        for rows in together(self._rows(), _BLOCK_BYTES, _BLOCK_ROWS):
            named = [(name, rows.column(f"\0{name}")) for name in self._partition_by]
            keys, places = keys_of(named)
            yield Block(first_row, rows.select(self._columns), keys, places)
            first_row += len(rows)

    def _rows(self) -> Iterator[pa.RecordBatch]:
        needed = list(dict.fromkeys((*self._columns, *self._partition_by)))
        self._types = {}
        self.parts = []
        for place, file in enumerate(self._listed):
            count = 0
            for raw in self._read(file, needed):
                count += len(raw)
                if len(raw):  # a file without rows states no types
                    yield self._uniform(place, raw)
            self.parts.append((file.shown, count))

    def _uniform(self, place: int, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Return the selected columns in one type for all files, and key columns as strings.

        The names of key columns begin with NUL, since a column may be both.
        """
        columns: dict[str, pa.Array] = {}
        for name in self._columns:
            columns[name] = self._in_type(place, name, plain_column(raw.column(name)))
        for name in self._partition_by:
            shown = self._listed[place].shown
            columns[f"\0{name}"] = key_strings(shown, name, raw.column(name))
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _in_type(self, place: int, name: str, column: pa.Array) -> pa.Array:
        if name not in self._types:
            self._types[name] = self._type(place, name, column.type)
        kind, first = self._types[name]
        wanted = canonical_type(column.type)
        if wanted != kind and not is_typeless(column.type):
            shown = self._listed[place].shown
            raise ConfigError(
                f"the column {name!r} has type {kind} in {first} and {wanted} in {shown}; a table "
                "has one type for each column. Write the files again with the same types."
            )
        return column.cast(kind)

    def _type(self, place: int, name: str, kind: pa.DataType) -> tuple[pa.DataType, str]:
        """Return a column's type and the file that states it; a column of nulls states none."""
        shown = self._listed[place].shown
        for file in self._listed[place + 1 :]:
            if not is_typeless(kind):
                break
            shown = file.shown
            kind = self._first_type(file, name)
        return canonical_type(kind), shown

    def _first_type(self, file: SourceFile, name: str) -> pa.DataType:
        for batch in self._read(file, [name]):
            if len(batch):
                return plain_column(batch.column(name)).type
        return pa.null()


def key_strings(place: str, name: str, raw: pa.Array) -> pa.Array:
    """Return the values of a key's column as strings; `place` names the table for messages."""
    column = plain_column(raw)
    kind = column.type
    is_plain = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_date(kind)
    if canonical_type(kind) != pa.string() and not is_plain:
        raise ConfigError(
            f"the column {name!r} of {place} has type {kind} and cannot be a key. Use "
            "strings, integers, booleans or dates: cast it, or partition by another column."
        )
    try:
        return as_strings(column).cast(pa.string())
    except UnfitValue as error:
        raise ConfigError(
            f"the column {name!r} of {place} {error.reason}. Correct it in the source, or "
            "partition by another column."
        ) from error


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
