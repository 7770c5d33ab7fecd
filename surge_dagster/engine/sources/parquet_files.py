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
# A chunk with them has a dictionary, even if its footer does not state where: parquet-mr before
# 1.12, which Spark 3.1 has, left that out.
_DICTIONARY_ENCODINGS = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
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
    # DuckDB before 2023 left the size at 0.
    fits = 0 < facts.num_rows * facts.total_byte_size <= _DECODED_BYTES
    rows = BATCH_ROWS if fits else 1
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
    stored = _stored_bytes(reader, columns, group)
    # The mean deceives if rows share what is stored once.
    by_mean = BATCH_BYTES * reader.metadata.row_group(group).num_rows // stored
    # Rows with a longer text are refused in any case.
    least = _DECODED_BYTES // DEFAULT_MAX_TEXT_BYTES
    by_longest = max(least, _DECODED_BYTES // _longest_shared(reader, source, columns, group))
    return max(1, min(BATCH_ROWS, by_mean, by_longest))


def _stored_bytes(reader: pq.ParquetFile, columns: list[str], group: int) -> int:
    """Return the bytes of a row group, uncompressed: only of these columns if its own size is 0."""
    facts = reader.metadata.row_group(group)
    size = facts.total_byte_size
    if not size:
        for place in range(reader.metadata.num_columns):
            if reader.metadata.schema.column(place).path in columns:
                size += facts.column(place).total_uncompressed_size
    return max(1, size)


def _longest_shared(
    reader: pq.ParquetFile, source: pa.NativeFile, columns: list[str], group: int
) -> int:
    """Return the bytes of a row that has the longest shared value in each column, or more."""
    facts = reader.metadata.row_group(group)
    stored = _stored_bytes(reader, columns, group)  # no value is longer
    schema = reader.metadata.schema
    shared: list[str] = []
    for place in range(reader.metadata.num_columns):
        column = schema.column(place)
        if column.path not in columns or column.physical_type != "BYTE_ARRAY":
            continue
        chunk = facts.column(place)
        if "DELTA_BYTE_ARRAY" in chunk.encodings:  # its texts may begin as others do
            return stored
        if chunk.has_dictionary_page or _DICTIONARY_ENCODINGS.intersection(chunk.encodings):
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
        return _stored_bytes(reader, columns, group)

    longest = 1
    for column in first.columns:
        if isinstance(column, pa.DictionaryArray):
            values = column.dictionary.cast(pa.large_binary())
            longest += int(value_lengths(values).max(initial=0))
    return longest
