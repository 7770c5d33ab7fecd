"""Parquet files of a source: their rows in bounded pieces, and what their footers declare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.sources.batching import (
    BATCH_BYTES,
    BATCH_ROWS,
    names_with_fields,
    select,
    small,
    together,
)
from surge_dagster.engine.sources.file_read import FileRead
from surge_dagster.engine.sources.partition import KEY_METADATA, SOURCE_VERSION_METADATA, within
from surge_dagster.engine.sources.selection import DEFAULT_MAX_TEXT_BYTES
from surge_dagster.engine.support.unreadable import UNREADABLE
from surge_dagster.engine.support.values import value_lengths

# Most that a read may decode to, however few bytes are stored: rows may share a dictionary's entry
# or the beginning of a text.
_DECODED_BYTES = 16 * 1024 * 1024
# Memory of reading a row group, as a multiple of its uncompressed size: a page may hold all of it,
# compressed and uncompressed, and its long texts may come in one batch (measured: 3.0).
_COPIES = 3
# In larger row groups the longest value of dictionaries is looked up.
_UNSEEN_BYTES = 256 * 1024
_VERSION_BYTES = 250  # a database index has room for little
# Columns are read with checksums, and in pieces of their pages.
_OPTIONS: dict[str, Any] = {
    "pre_buffer": False,
    "buffer_size": 1 << 20,
    "page_checksum_verification": True,
}


@dataclass(frozen=True, slots=True)
class Footer:
    """What the footer of a file declares.

    Attributes:
        version, key: of the partition, if the file declares them.
        row_bytes: of all columns, uncompressed.
        group_bytes: memory that reading the largest row group may take.
    """

    version: str | None
    key: str | None
    rows: int
    row_bytes: int
    group_bytes: int


def read_footer(file: pa.NativeFile) -> Footer:
    """Return what the footer of an open file declares; raises one of `UNREADABLE` for damage."""
    footer = pq.read_metadata(file)
    declared = footer.metadata or {}
    # Of all columns, as an estimate of the texts: reading facts of one column may end the process
    # (see `unreadable`).
    groups = [footer.row_group(group).total_byte_size for group in range(footer.num_row_groups)]
    version = _declared(declared, SOURCE_VERSION_METADATA)
    return Footer(
        version=version and _recordable(version),
        key=_declared(declared, KEY_METADATA),
        rows=footer.num_rows,
        row_bytes=sum(groups),
        group_bytes=_COPIES * max(groups, default=0),
    )


def _declared(metadata: dict[bytes, bytes], name: bytes) -> str | None:
    value = metadata.get(name)
    return None if value is None else value.decode("utf-8", "replace")


def read_parquet(request: FileRead) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, or those of the requested range."""
    with request.file.open() as source, pq.ParquetFile(source, **_OPTIONS) as reader:
        schema = reader.schema_arrow
        request.require_columns(names_with_fields(schema))
        if not reader.metadata.num_rows:
            yield request.empty(schema)
            return
        read = _rows(request, reader, source)
        if any(pa.types.is_dictionary(kind) for kind in schema.types):
            read = (piece for batch in read for piece in small(batch))
        for batch in together(read):
            yield from small(select(batch, request.columns))


def _rows(
    request: FileRead, reader: pq.ParquetFile, source: pa.NativeFile
) -> Iterator[pa.RecordBatch]:
    """Yield the rows one row group after the other, without a bound on what they decode to."""

    def rows_of(group: int) -> int:
        return reader.metadata.row_group(group).num_rows

    def read(group: int) -> Iterator[pa.RecordBatch]:
        return _rows_of_group(reader, source, request.columns, group)

    groups = range(reader.num_row_groups)
    if request.rows is None:
        for group in groups:
            yield from read(group)
        return
    for group, first, last in within(groups, *request.rows, rows_of):
        for batch, begin, end in within(read(group), first, last):
            yield batch.slice(begin, end - begin)


def _recordable(version: str) -> str:
    """Return a declared version that any database can keep: its digest if it is long or has control
    characters."""
    raw = version.encode()
    if len(raw) <= _VERSION_BYTES and version.isprintable():
        return version
    return hashlib.sha256(raw).hexdigest()[:32]


def _rows_of_group(
    reader: pq.ParquetFile, source: pa.NativeFile, columns: list[str], group: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a row group, so many at a time that what is decoded is bounded.

    How many they are depends on facts of columns, which are safe to read only after their pages. So
    the first row is read before the others, unless all fit however long the shared values are.
    """
    facts = reader.metadata.row_group(group)
    fits = facts.num_rows * facts.total_byte_size <= _DECODED_BYTES
    rows = max(1, facts.num_rows) if fits else 1
    batches = reader.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)
    for first in batches:
        yield first
        if not fits:
            rows = rows_per_read(reader, source, columns, group)
            reader.reader.set_batch_size(max(1, rows - 1))  # `together` joins the first row to them
        break
    yield from batches


def rows_per_read(
    reader: pq.ParquetFile, source: pa.NativeFile, columns: list[str], group: int
) -> int:
    """Return how many rows of a row group to read at once, so that what is decoded is bounded; call
    it after one of its rows was read."""
    facts = reader.metadata.row_group(group)
    # The mean deceives if rows share what is stored once.
    by_mean = BATCH_BYTES * facts.num_rows // max(1, facts.total_byte_size)
    # Rows with a longer text are refused in any case.
    least = _DECODED_BYTES // DEFAULT_MAX_TEXT_BYTES
    by_longest = max(least, _DECODED_BYTES // _longest_shared(reader, source, columns, group))
    return max(1, min(BATCH_ROWS, by_mean, by_longest))


def _longest_shared(
    reader: pq.ParquetFile, source: pa.NativeFile, columns: list[str], group: int
) -> int:
    """Return the bytes of a row that has the longest shared value in each column, or more."""
    facts = reader.metadata.row_group(group)
    stored = max(1, facts.total_byte_size)  # no value is longer
    schema = reader.metadata.schema
    shared: list[str] = []
    for place in range(reader.metadata.num_columns):
        column = schema.column(place)
        if column.path not in columns or column.physical_type != "BYTE_ARRAY":
            continue
        chunk = facts.column(place)
        if "DELTA_BYTE_ARRAY" in chunk.encodings:  # its texts may begin as others do
            return stored
        if chunk.has_dictionary_page:
            shared.append(column.path)
    if not shared:
        return 1
    if stored <= _UNSEEN_BYTES:
        return stored
    return _longest_in_dictionaries(reader, source, shared, group)


def _longest_in_dictionaries(
    reader: pq.ParquetFile, source: pa.NativeFile, columns: list[str], group: int
) -> int:
    """Return the bytes of a row that has the longest value of each of these dictionaries."""
    options = _OPTIONS | {"read_dictionary": columns, "metadata": reader.metadata}
    try:
        with pq.ParquetFile(source, **options) as dictionaries:
            rows = dictionaries.iter_batches(
                1, row_groups=[group], columns=columns, use_threads=False
            )
            first = select(next(rows), columns)
    except (*UNREADABLE, KeyError, StopIteration):  # reading itself reports what cannot be read
        return max(1, reader.metadata.row_group(group).total_byte_size)

    longest = 1
    for column in first.columns:
        if isinstance(column, pa.DictionaryArray):
            values = column.dictionary.cast(pa.large_binary())
            longest += int(value_lengths(values).max(initial=0))
    return longest
