"""A table with rows in any order: each key of its columns is a partition.

The first listing reads the table once and groups its rows on the disk of the cache. What it finds
is kept in the cache too, so that later listings of the same version read nothing. A process that
reads partitions it did not list groups the table again. The version of a partition is the digest
of its rows.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.sources.bad_rows import REASON, reasons_of
from surge_dagster.engine.sources.batching import together
from surge_dagster.engine.sources.casting import (
    UnfitValue,
    as_strings,
    canonical_type,
    is_typeless,
    plain_column,
)
from surge_dagster.engine.sources.file_read import SourceFile
from surge_dagster.engine.sources.formats import ENDINGS_IN_WORDS, batches
from surge_dagster.engine.sources.listing import SourceFiles
from surge_dagster.engine.sources.partition import Partition, row_in_words
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support import disk_cache
from surge_dagster.engine.support.keys import joined_key
from surge_dagster.engine.tables.grouping import (
    NO_KEY,
    Block,
    Group,
    GroupedRows,
    grouped_partitions,
)

_BLOCK_BYTES = 16 * 1024 * 1024
_BLOCK_ROWS = 256 * 1024
# Time in which a table is not looked at again: thousands of partitions are published one by one.
_LOOKED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Index:
    """The partitions of one version of a table."""

    version: str
    groups: Sequence[Group]
    parts: Sequence[tuple[str, int]]

    def shown(self, row: int) -> str:
        """Return a row of the table for messages."""
        begin = 0
        for name, rows in self.parts:
            if row < begin + rows:
                return f"{row_in_words(row - begin)} of {name}"
            begin += rows
        return row_in_words(row)


class TableSource(ABC):
    """A table as a `Source`: a partition per key, in the order of the encoded keys.

    Args:
        identity: distinguishes this table from every other one, without secrets.
    """

    def __init__(
        self,
        url: str,
        identity: str,
        partition_by: Sequence[str],
        selection: Selection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self._partition_by = partition_by
        self._selection = selection
        self._clock = clock
        dialect = (selection.encoding, selection.escape, selection.bad_rows)
        identified = [identity, partition_by, selection.columns, dialect]
        described = json.dumps(identified).encode("utf-8", "surrogatepass")
        self._cached_as = f"tables/{hashlib.sha256(described).hexdigest()[:24]}.json"
        self._parts: list[tuple[str, int]] = []  # name and rows of each file, if rows have files
        self._looked: tuple[float, str | None] = (float("-inf"), None)
        self._known: _Index | None = None
        self._grouped: tuple[_Index, GroupedRows] | None = None
        self._lock = threading.RLock()

    @abstractmethod
    def _version(self) -> str | None:
        """Look at the table, and return its version now; None if there is no such table."""

    @abstractmethod
    def _blocks(self) -> Iterator[Block]:
        """Yield the rows of the version that was looked at last."""

    def __iter__(self) -> Iterator[Partition]:
        """Yield the partitions; read the table unless this version of it is known."""
        index = self._index()
        yield from grouped_partitions(
            index.groups,
            partial(self._rows, index),
            self._selection,
            self._partition_by,
            partial(self._current_version, index),
            index.shown,
        )

    def _index(self) -> _Index:
        with self._lock:
            version = self._look()
            if version is None:
                raise ConfigError(
                    f"the table {self.url!r} has no file that ends in {ENDINGS_IN_WORDS}. Give the "
                    "path of one, of a folder, or a pattern such as 'tables/*.parquet'."
                )
            known = self._known
            if known is None or known.version != version:
                known = self._cached(version) or self._group(version)[0]
                self._known = known
            return known

    def _rows(self, index: _Index) -> GroupedRows:
        """Return the rows of the partitions that were listed."""
        with self._lock:
            grouped = self._grouped
            if grouped is None or grouped[0].version != index.version:
                if self._look() != index.version:
                    raise self._changed("after it was listed")
                grouped = self._group(index.version)
            return grouped[1]

    def _group(self, version: str) -> tuple[_Index, GroupedRows]:
        """Read the table, group its rows, and cache its index."""
        grouped = GroupedRows(self._blocks())
        index = _Index(version, list(grouped.groups.values()), self._parts)
        if self._look() != version:
            raise self._changed("while it was read")

        disk_cache.write_json(self._cached_as, asdict(index))
        self._grouped = index, grouped
        return self._grouped

    def _cached(self, version: str) -> _Index | None:
        document = disk_cache.read_json(self._cached_as)
        try:
            index = _Index(**(document or {}))
            groups = [Group(*values) for values in index.groups]
        except TypeError:  # there is none, or it is damaged
            return None
        if index.version != version:
            return None
        return replace(index, groups=groups)

    def _look(self) -> str | None:
        version = self._version()
        self._looked = (self._clock(), version)
        return version

    def _current_version(self, index: _Index, version: str) -> str | None:
        with self._lock:
            if self._clock() - self._looked[0] > _LOOKED_SECONDS:
                self._look()
            now = self._looked[1]
        if now is None or now == index.version:
            return now and version
        return f"unknown, since the table changed ({now})"

    def _changed(self, when: str) -> TransientError:
        return TransientError(f"the table {self.url!r} changed {when}. Run again.")


class FileTable(TableSource):
    """Files whose rows are one table."""

    def __init__(
        self, files: SourceFiles, partition_by: Sequence[str], selection: Selection, **options: Any
    ) -> None:
        super().__init__(files.url, files.identity, partition_by, selection, **options)
        self._files = files
        self._listed: list[SourceFile] = []
        self._types: dict[str, tuple[pa.DataType, str]] = {}
        self._columns = selection.columns
        self._sets_aside = selection.bad_rows == "set_aside"
        self._read = partial(
            batches,
            encoding=selection.encoding,
            escape=selection.escape,
            sets_aside=self._sets_aside,
        )

    def _version(self) -> str | None:
        """List the files, and return their version; None if there are none."""
        self._listed = self._files.list()
        if not self._listed:
            return None
        lines = "".join(f"{file.relative}\0{file.size}\0{file.token}\n" for file in self._listed)
        return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:24]

    def _blocks(self) -> Iterator[Block]:
        """Yield the rows of the listed files in large blocks, with their keys."""
        first_row = 0
        for rows in together(self._file_rows(), _BLOCK_BYTES, _BLOCK_ROWS):
            named = [(name, rows.column(f"\0{name}")) for name in self._partition_by]
            keys, places = keys_of(named)
            columns = [*self._columns, REASON] if self._sets_aside else self._columns
            yield Block(first_row, rows.select(columns), keys, places)
            first_row += len(rows)

    def _file_rows(self) -> Iterator[pa.RecordBatch]:
        needed = list(dict.fromkeys((*self._columns, *self._partition_by)))
        self._types = {}
        self._parts = []
        for place, file in enumerate(self._listed):
            count = 0
            for raw in self._read(file, needed):
                count += len(raw)
                if len(raw):  # a file without rows states no types
                    yield self._uniform(place, raw)
            self._parts.append((file.shown, count))

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
        if self._sets_aside:
            columns[REASON] = reasons_of(raw)
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
