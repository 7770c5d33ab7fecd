"""Tables of format 1 as Parquet, without pyarrow's writer: the same bytes in two fifths of the time.

Pyarrow computes the repetition and definition levels of a list value by value, which takes longer than everything
else about a file of embeddings. In lists that all have the same length and no nulls they are the same in every page
of as many rows. So they are made once here, and a page is a header, these levels and the vectors as they lie in
memory, which go to the file without being copied. Strings become pages as pyarrow cuts them and by its own codec.

See `parquet_proof` for why that may be trusted.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from surge_dagster.engine.files import parquet_encoding as parquet
from surge_dagster.engine.files.parquet_columns import PlainColumn, Vectors, plain_column, vector_page_rows
from surge_dagster.engine.files.parquet_encoding import ColumnChunk, Frame
from surge_dagster.engine.files.parquet_proof import (
    PAGE_BYTES,
    WRITE_BATCH_ROWS,
    FileForm,
    Proofs,
    TableWriter,
    arrow_writer,
)

_MOST_PAGE_ROWS = 20_000  # pyarrow cuts longer pages here: tiny vectors, whose row groups are longer, are left to it
_GATHERED_BYTES = 64 * 1024  # a page of more is written at once: it would be held twice
_LARGEST_PAGE = 2**31 - 1
_PREPARED_ROWS = 8192  # of ids and texts: what must be known of each takes some memory


def table_writer(sink: pa.NativeFile, form: FileForm, schema: pa.Schema, row_group_rows: int) -> TableWriter:
    """What writes a file of a form fastest.

    Args:
        sink: an open Arrow output stream; the caller closes it.
        row_group_rows: most rows of a row group.
    """
    row_bytes = form.dimension * form.dtype.itemsize
    usual = row_group_rows <= _MOST_PAGE_ROWS and row_bytes <= PAGE_BYTES
    frame = _proofs.frame(form, lambda: schema) if usual else None
    if frame is None:
        return arrow_writer(sink, schema, compress=form.compress)
    return PageWriter(sink, form, frame)


class PageWriter:
    """Does what pyarrow's `ParquetWriter` does for files of one form.

    Args:
        sink: anything with a `write` that takes buffers and takes them whole; the caller closes it.
    """

    def __init__(self, sink: Any, form: FileForm, frame: Frame) -> None:
        self.is_open = True
        self._sink = sink
        self._form = form
        self._frame = frame
        self._itemsize = form.dtype.itemsize
        self._codec = pa.Codec("zstd") if form.compress else None
        self._entries: dict[bytes, bytes] = {}
        self._row_groups: list[bytes] = []
        self._rows = 0
        self._place = 0
        self._waiting: list[bytes | pa.Buffer] = []  # small parts, written with what follows
        self._put(parquet.MAGIC)

    def write_table(self, table: pa.Table, row_group_size: int) -> None:
        """Write rows as row groups of so many, the last one with what is left.

        Raises:
            pyarrow.ArrowInvalid: a value is null.
        """
        vectors = Vectors(table.column("embedding"), self._form.dimension, self._itemsize)
        groups = [
            range(start, min(start + row_group_size, len(table))) for start in range(0, len(table), row_group_size)
        ]
        at_once = max(1, _PREPARED_ROWS // row_group_size)
        for several in (groups[place : place + at_once] for place in range(0, len(groups), at_once)):
            first, stop = several[0].start, several[-1].stop
            columns = [plain_column(column.slice(first, stop - first)) for column in table.columns[:-1]]
            for group in several:
                self._write_row_group(columns, vectors, group.start - first, group.stop - first)
        self._flush()

    def add_key_value_metadata(self, key_value_metadata: Mapping[bytes, bytes]) -> None:
        """Entries for the footer."""
        self._entries |= key_value_metadata

    def close(self) -> None:
        """Write the footer."""
        self.is_open = False
        self._put(parquet.file_end(self._frame, self._rows, self._row_groups, self._entries))
        self._flush()

    def _write_row_group(self, columns: Sequence[PlainColumn], vectors: Vectors, start: int, stop: int) -> None:
        rows, dimension = stop - start, self._form.dimension
        codec = parquet.UNCOMPRESSED if self._codec is None else parquet.ZSTD
        chunks, described = [], []
        for name, column in zip((b"id", b"text"), columns, strict=False):
            chunks.append(self._write_column(column, start, stop))
            described.append(parquet.plain_column(name, codec, rows, chunks[-1], column.string_bytes(start, stop)))
        chunks.append(self._write_vectors(vectors, rows))
        described.append(parquet.vector_column(self._form.vector_kind, rows, dimension, chunks[-1]))
        self._row_groups.append(parquet.row_group(described, chunks, rows))
        self._rows += rows

    def _write_column(self, column: PlainColumn, start: int, stop: int) -> ColumnChunk:
        chunk = ColumnChunk(self._place)
        for end in column.page_ends(start, stop):
            self._write_page(chunk, column.page(start, end), end - start)
            start = end
        return chunk

    def _write_page(self, chunk: ColumnChunk, plain: pa.Buffer, rows: int) -> None:
        if plain.size > _LARGEST_PAGE:
            raise pa.ArrowInvalid(f"a page of {plain.size:,} bytes; Parquet's may have {_LARGEST_PAGE:,}")
        stored = plain if self._codec is None else self._codec.compress(plain)
        header = parquet.page_header(plain.size, stored.size, zlib.crc32(stored), rows)
        chunk.add(header, plain.size, stored.size)
        self._put(header)
        if plain.size <= _GATHERED_BYTES:
            self._put(stored)
        else:
            self._write([stored])

    def _write_vectors(self, vectors: Vectors, rows: int) -> ColumnChunk:
        chunk = ColumnChunk(self._place)
        for page_rows in vectors.page_rows(rows):
            parts, size = vectors.next_page(page_rows)
            levels, checksum = parquet.list_levels(page_rows, self._form.dimension)
            for part in parts:
                checksum = zlib.crc32(part, checksum)
            size += len(levels)
            header = parquet.page_header(size, size, checksum, page_rows * self._form.dimension)
            chunk.add(header, size, size)
            self._put(header)
            self._put(levels)
            self._write(parts)
        return chunk

    def _put(self, part: bytes | pa.Buffer) -> None:
        self._waiting.append(part)
        self._place += len(part)

    def _write(self, parts: Sequence[memoryview | pa.Buffer]) -> None:
        self._flush()
        for part in parts:
            self._sink.write(part)
            self._place += len(part)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._sink.write(b"".join(waiting))


def _made_up_row_groups(form: FileForm) -> list[int]:
    """A row group of several pages of each column that can have several, and a smaller one."""
    pages = vector_page_rows(_MOST_PAGE_ROWS, form.dimension, form.dtype.itemsize)
    return [max(pages[0], WRITE_BATCH_ROWS if pages[0] > 256 else 0) + 3, 2]


def _written(form: FileForm, frame: Frame, tables: Sequence[pa.Table], entries: Mapping[bytes, bytes]) -> bytes:
    sink = pa.BufferOutputStream()
    writer = PageWriter(sink, form, frame)
    for table in tables:
        writer.write_table(table, len(table))
    writer.add_key_value_metadata(entries)
    writer.close()
    return sink.getvalue().to_pybytes()


_proofs = Proofs(_made_up_row_groups, _written)
