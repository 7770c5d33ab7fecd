"""Output files of a few rows, put together in one go: the same bytes as pyarrow's in a third to a half of the time.

Pyarrow takes half a millisecond to set up, fill and close a writer, however little is written. Where partitions have
ten rows that is most of what a run does after its encoding. A file of one row group with one uncompressed page for
each column has a simple form: three pages, each behind a header with its checksum, and a footer.

See `parquet_proof` for why that may be trusted.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from surge_dagster.engine.files import parquet_encoding as parquet
from surge_dagster.engine.files.embedding_file import (
    LEAST_COMPRESSED_BYTES,
    EmbeddingFileWriter,
    FileFacts,
    FileRows,
    matrix_of,
    schema,
)
from surge_dagster.engine.files.parquet_columns import plain_values
from surge_dagster.engine.files.parquet_encoding import ColumnChunk, Frame
from surge_dagster.engine.files.parquet_proof import FileForm, Proofs
from surge_dagster.engine.store.store import Upload
from surge_dagster.engine.support.columns import value_offsets

MAX_ROWS = 64
MAX_VECTOR_BYTES = 128 * 1024  # a page is cut at 256 KiB
_MAX_ID_BYTES = 64 * 1024
_MADE_UP_ROWS = 5


def write_file(upload: Upload, rows: FileRows, facts: FileFacts) -> None:
    """Write a whole output file, in the way that is fastest for its size."""
    small = small_file(rows, facts)
    if small is not None:
        upload.write(small)
        return
    texts, matrix = rows.texts, rows.matrix
    compress = texts is None or _string_bytes(texts) >= LEAST_COMPRESSED_BYTES
    include_text, dtype = texts is not None, str(matrix.dtype)
    with EmbeddingFileWriter(
        upload.sink, rows.id_type, matrix.shape[1], dtype, include_text=include_text, compress=compress
    ) as writer:
        writer.append(pa.chunked_array(list(rows.ids), type=rows.id_type), texts, matrix)
        writer.close(facts)


def small_file(rows: FileRows, facts: FileFacts) -> bytes | None:
    """A whole output file, equal to what `EmbeddingFileWriter` writes without compression.

    Returns:
        None for what is not small, and where pyarrow's own files are of another form: then that is to write it.
    """
    id_type, texts, matrix = rows.id_type, rows.texts, rows.matrix
    count, dimension = matrix.shape
    if not 0 < count <= MAX_ROWS or matrix.nbytes > MAX_VECTOR_BYTES:
        return None
    include_text = texts is not None
    form = FileForm(id_type, dimension, matrix.dtype, include_text, compress=False)
    frame = _proofs.frame(form, lambda: schema(id_type, dimension, str(matrix.dtype), include_text=include_text))
    if frame is None:
        return None
    columns: list[bytes | pa.Buffer] = [b"".join(map(plain_values, rows.ids))]
    if len(columns[0]) > _MAX_ID_BYTES:
        return None
    if texts is not None:
        if _string_bytes(texts) >= LEAST_COMPRESSED_BYTES:
            return None
        columns.append(plain_values(texts))
    return _assembled(form, frame, columns, matrix, facts.to_metadata())


def _string_bytes(column: pa.Array) -> int:
    offsets = value_offsets(column)
    return int(offsets[-1]) - int(offsets[0])


def _assembled(
    form: FileForm,
    frame: Frame,
    columns: Sequence[bytes | pa.Buffer],
    matrix: np.ndarray,
    entries: Mapping[bytes, bytes],
) -> bytes:
    """The whole file: one row group, one page for each column."""
    rows, dimension = matrix.shape
    parts, chunks, described = [parquet.MAGIC], [], []
    place = len(parquet.MAGIC)
    for name, page in zip((b"id", b"text"), columns, strict=False):
        header = parquet.page_header(len(page), len(page), zlib.crc32(page), rows)
        chunks.append(ColumnChunk.of_page(place, header, len(page)))
        numbers = name == b"id" and pa.types.is_int64(form.id_type)
        string_bytes = None if numbers else len(page) - 4 * rows
        described.append(parquet.plain_column(name, parquet.UNCOMPRESSED, rows, chunks[-1], string_bytes))
        parts += (header, page)
        place += chunks[-1].size
    levels, checksum = parquet.list_levels(rows, dimension)
    vectors = matrix.data.cast("B")
    size = len(levels) + len(vectors)
    header = parquet.page_header(size, size, zlib.crc32(vectors, checksum), matrix.size)
    chunks.append(ColumnChunk.of_page(place, header, size))
    described.append(parquet.vector_column(form.vector_kind, rows, dimension, chunks[-1]))
    group = parquet.row_group(described, chunks, rows)
    return b"".join([*parts, header, levels, vectors, parquet.file_end(frame, rows, [group], entries)])


def _of_tables(form: FileForm, frame: Frame, tables: Sequence[pa.Table], entries: Mapping[bytes, bytes]) -> bytes:
    [batch] = tables[0].to_batches()
    return _assembled(form, frame, [*map(plain_values, batch.columns[:-1])], matrix_of(batch), entries)


_proofs = Proofs(lambda form: [_MADE_UP_ROWS], _of_tables)
