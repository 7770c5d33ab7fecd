"""Output files in Arrow's IPC file format, for readers that map them into memory.

Columns and facts are those of the Parquet files; the facts stand in the footer's metadata. Rows lie uncompressed in
record batches. The IPC format has no checksums, so each batch has in its custom metadata the CRC-32 of each of its
columns. A checksum covers the batch's number, the column's type and its values, not pyarrow's encoding of them, so that
files stay valid when another version of pyarrow arranges the same values in another way.

A batch has at most `WRITE_BATCH_ROWS` rows, so that writing and reading take no more memory than for Parquet.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from surge_dagster.engine.files.facts import FileFacts, InvalidFile, facts_of, invalid_when_damaged
from surge_dagster.engine.files.parquet import WRITE_BATCH_ROWS
from surge_dagster.engine.files.rows import (
    OWN_COLUMNS,
    FileWriter,
    OutputFile,
    check_schema,
    require_carried,
    vector_bytes,
)
from surge_dagster.engine.support.columns import value_parts
from surge_dagster.engine.support.text_hash import HASH_BYTES
from surge_dagster.engine.support.unreadable import first_line
from surge_dagster.engine.support.values import value_streams

FORMAT = "arrow-3"
MAGIC = b"ARROW1"
_CHECKSUMS = b"surge.crc32"
_TYPES = {pa.string(): "string", pa.binary(): "binary", pa.int64(): "int64", pa.large_string(): "large_string"}
# Smaller files are read, not mapped: Linux gives a process 65,530 maps by default.
_LEAST_MAPPED_BYTES = 64 * 1024


class ArrowWriter(FileWriter):
    def __init__(self, sink: pa.NativeFile, columns: pa.Schema, metadata: Mapping[bytes, bytes]) -> None:
        super().__init__(columns, WRITE_BATCH_ROWS)
        self._batches_written = 0
        self._writer = pa.ipc.new_file(sink, columns, metadata=dict(metadata))

    def close(self) -> None:
        self._writer.close()

    def _write(self, table: pa.Table) -> None:
        for start in range(0, table.num_rows, self.row_group_rows):
            [batch] = table.slice(start, self.row_group_rows).combine_chunks().to_batches()
            checksums = _checksums(batch, self._batches_written)
            self._writer.write_batch(batch, custom_metadata={_CHECKSUMS: checksums})
            self._batches_written += 1


class ArrowFile(OutputFile):
    def __init__(self, source: pa.NativeFile, *, mapped: bool = False) -> None:
        self._source = map_file(source) if mapped else source
        self._file_bytes = self._source.size()
        self._reader = _open(self._source)
        super().__init__(_facts(self._reader), self._reader.schema, self._reader.num_record_batches)

    def close(self) -> None:
        self._source.close()

    def group_bytes(self, group: int) -> int:
        """The size of the file: pyarrow does not return the sizes of batches, and texts can be of any length."""
        return self._file_bytes

    def reading_bytes(self, widest_row: int) -> int:
        """A whole batch is read, however few of its rows are requested."""
        row = widest_row + vector_bytes(self.columns.field("embedding").type) + 2 * 8 + HASH_BYTES
        return min(self._file_bytes, WRITE_BATCH_ROWS * row)

    def _batches(
        self, columns: list[str] | None, batch_rows: int, groups: list[int] | None
    ) -> Iterator[pa.RecordBatch]:
        with invalid_when_damaged("record batches are"):
            reader = self._reader if columns is None else _open(self._source, columns)
            for number in range(self.groups) if groups is None else groups:
                batch, metadata = reader.get_batch_with_custom_metadata(number)
                _compare(batch, metadata, number)
                for start in range(0, batch.num_rows, batch_rows):
                    yield batch.slice(start, batch_rows)


def facts_at_end(end: bytes) -> tuple[FileFacts, pa.Schema]:
    """The facts and columns of a file from its last bytes, at least its footer and what follows it."""
    # pyarrow checks that a file begins with its magic bytes, and reads nothing else there.
    reader = _open(pa.BufferReader(MAGIC + b"\0\0" + end))
    return _facts(reader), reader.schema


def map_file(source: pa.NativeFile) -> pa.NativeFile:
    """An open local file as a map of its memory, which keeps no descriptor open; other files as they are."""
    if not isinstance(source, pa.OSFile):
        return source
    descriptor = source.fileno()
    if os.fstat(descriptor).st_size < _LEAST_MAPPED_BYTES:
        return source
    with source, pa.memory_map(f"/proc/self/fd/{descriptor}") as mapped:
        return pa.BufferReader(mapped.read_buffer())


def _open(source: pa.NativeFile, columns: list[str] | None = None) -> pa.RecordBatchFileReader:
    with invalid_when_damaged("footer is"):
        reader = pa.ipc.open_file(source)
        if columns is None:
            return reader
        included = [reader.schema.get_field_index(name) for name in columns]
        return pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=included))


def _facts(reader: pa.RecordBatchFileReader) -> FileFacts:
    facts = facts_of(dict(reader.metadata or {}), FileFacts, FORMAT)
    check_schema(reader.schema, dimension=facts.dimension)  # checksums of values do not cover nullability
    require_carried(facts.carried_columns, reader.schema)
    return facts


def _checksums(batch: pa.RecordBatch, number: int) -> str:
    columns = zip(batch.schema.names, batch.columns, strict=True)
    return " ".join(f"{quote(name, safe='')}:{_checksum(name, column, number):08x}" for name, column in columns)


def _compare(batch: pa.RecordBatch, metadata: Mapping[bytes, bytes] | None, number: int) -> None:
    """Raise `InvalidFile` where a batch, or some columns of it, do not have their checksums."""
    try:
        written = dict(entry.split(b":") for entry in (metadata or {}).get(_CHECKSUMS, b"").split())
        batch.validate()
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if written.get(quote(name, safe="").encode()) != b"%08x" % _checksum(name, column, number):
                raise InvalidFile(f"checksum verification failed: column {name!r} of record batch {number} was changed")
    except (ValueError, KeyError, TypeError) as error:  # what it gives is no column of this format
        raise InvalidFile(f"record batch {number} was changed ({first_line(error)})") from error


def _checksum(name: str, column: pa.Array, number: int) -> int:
    """CRC-32 over a batch's number, a column's type and its values, which must not be null but in carried columns."""
    if name not in OWN_COLUMNS:
        kind, parts = str(column.type), value_streams(column)
    elif column.null_count:
        raise ValueError(f"{column.null_count:,} values are null; expected none")
    elif isinstance(column, pa.FixedSizeListArray):
        values = column.flatten()
        if values.null_count:
            raise ValueError(f"{values.null_count:,} components of vectors are null; expected none")
        kind, parts = f"{column.type.list_size} x {values.type.bit_width}", [_raw(values)]
    elif pa.types.is_fixed_size_binary(column.type):
        width = column.type.byte_width
        start = column.offset * width
        kind, parts = f"{width} bytes", [memoryview(column.buffers()[1])[start : start + len(column) * width]]
    elif column.type == pa.int64():
        kind, parts = _TYPES[column.type], [_raw(column)]
    else:
        offsets, strings = value_parts(column)
        kind, parts = _TYPES[column.type], [np.diff(offsets).astype("<i8").data, strings]
    checksum = zlib.crc32(f"{number} {kind} ".encode())
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _raw(numbers: pa.Array) -> memoryview:
    return numbers.to_numpy(zero_copy_only=True).data
