"""Output files in Arrow's own format, for readers that map them into memory.

The columns, the facts and the digest over them are those of the Parquet files (`embedding_file.py`). Rows lie in record
batches as large as those files' row groups, uncompressed, so that a mapped file is the table.

A batch is copied once, as the message that its checksum is taken of. Its strings are kept to a quarter of a megabyte,
unless one row alone has more: with that, writing takes no more memory than is booked for Parquet (`piece_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from surge_dagster.engine.files.arrow_footer import (
    BEGINNING,
    MESSAGE_PREFIX_BYTES,
    Block,
    Part,
    end_of_file,
    part_of,
    schema_message,
)
from surge_dagster.engine.files.checked_file import CheckedFile, end_of
from surge_dagster.engine.files.embedding_file import (
    FileFacts,
    FileRows,
    InvalidFile,
    embedding_table,
    row_group_rows,
    schema,
)
from surge_dagster.engine.store.store import Upload
from surge_dagster.engine.support.columns import value_lengths
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line, is_systems

_BATCH_STRING_BYTES = 256 * 1024
_HELD_WHOLE_BYTES = 256 * 1024


def write_arrow_file(upload: Upload, rows: FileRows, facts: FileFacts) -> None:
    """Write a whole output file."""
    texts, matrix = rows.texts, rows.matrix
    strings = sum(part.nbytes for part in rows.ids) + (0 if texts is None else texts.nbytes)
    small = matrix.nbytes + strings <= _HELD_WHOLE_BYTES
    sink: Any = pa.BufferOutputStream() if small else upload.sink
    with ArrowFileWriter(
        sink, rows.id_type, matrix.shape[1], str(matrix.dtype), include_text=texts is not None
    ) as writer:
        writer.append(pa.chunked_array(list(rows.ids), type=rows.id_type), texts, matrix)
        writer.close(facts)
    if small:
        upload.write(sink.getvalue().to_pybytes())


class ArrowFileWriter:
    """Writes one partition, in one piece or in several, as record batches; as `EmbeddingFileWriter` does row groups.

    Args:
        sink: an open Arrow output stream or file-like object; the caller closes it.
        id_type: string, int64 or binary.
        dimension, dtype: of the vectors.
        include_text: whether the file has a text column.
    """

    def __init__(
        self, sink: pa.NativeFile, id_type: pa.DataType, dimension: int, dtype: str, *, include_text: bool
    ) -> None:
        self.schema = schema(id_type, dimension, dtype, include_text=include_text)
        self.row_group_rows = row_group_rows(dimension, np.dtype(dtype).itemsize)
        self.rows = 0
        self._sink = sink
        self._blocks: list[Block] = []
        self._parts: list[Part] = []
        self._written = 0
        self._write(BEGINNING + schema_message(self.schema))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held that would have to be let go."""

    def append(self, ids: pa.Array | pa.ChunkedArray, texts: pa.Array | None, matrix: np.ndarray) -> None:
        """Write rows; `matrix` has shape [rows, dimension], is contiguous and is referred to, not copied."""
        self.append_table(embedding_table(self.schema, ids, texts, matrix))

    def append_table(self, table: pa.Table) -> None:
        """Write rows that have the file's schema already."""
        start = 0
        for stop in _borders(table, self.row_group_rows):
            [batch] = table.slice(start, stop - start).combine_chunks().to_batches()
            message = batch.serialize()
            header = MESSAGE_PREFIX_BYTES + int.from_bytes(message[4:8], "little")
            self._blocks.append(Block(self._written, header, len(message) - header))
            self._write(message.slice(0, header))
            self._write(message.slice(header))
            start = stop
        self.rows += table.num_rows

    def close(self, facts: FileFacts) -> None:
        """Write the file's end, with the facts that are known only now."""
        self._sink.write(end_of_file(self.schema, self._blocks, self._parts, facts))

    def _write(self, content: bytes | pa.Buffer) -> None:
        self._parts.append(part_of(content))
        self._sink.write(content)
        self._written += len(content)


class ArrowFile:
    """An open output file whose every byte is compared with its checksum before it is used.

    Args:
        source: the file; it is closed with this.
        mapped: map the file where it lies on a local disk: what is read of it is the file's own memory then.

    Raises:
        InvalidFile: it is not a complete embedding file.
    """

    def __init__(self, source: pa.NativeFile, *, mapped: bool = False) -> None:
        end = end_of(source)
        self.facts = end.facts
        self.schema = end.schema
        self._bodies = [part.length for part in end.parts[2::2]]
        self._file = pa.PythonFile(CheckedFile(source, end, mapped=mapped), mode="r")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def groups(self) -> int:
        """Number of record batches."""
        return len(self._bodies)

    def group_bytes(self, group: int) -> int:
        """What one of them takes in memory."""
        return self._bodies[group]

    def reading_bytes(self, widest_row: int) -> int:
        """What reading takes at once: a whole batch, however few of its rows are asked for."""
        return max(self._bodies, default=0)

    def read(
        self, *, columns: list[str] | None = None, batch_rows: int = 4096, groups: list[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Stream rows.

        Args:
            columns: None is all.
            groups: numbers of record batches; None is all.

        Raises:
            InvalidFile: what is read is damaged.
            OSError: the system did not give it.
        """
        rows = 0
        try:
            wanted = None if columns is None else [self.schema.get_field_index(name) for name in columns]
            reader = pa.ipc.open_file(self._file, options=pa.ipc.IpcReadOptions(included_fields=wanted))
            for number in range(self.groups) if groups is None else groups:
                batch = reader.get_batch(number)
                rows += batch.num_rows
                for start in range(0, batch.num_rows, batch_rows):
                    yield batch.slice(start, batch_rows)
        except UNREADABLE as error:
            if is_systems(error):
                raise
            raise InvalidFile(f"its record batches cannot be read ({first_line(error)})") from error
        if groups is None and rows != self.facts.rows:
            raise InvalidFile(f"its metadata promise {self.facts.rows:,} rows and it has {rows:,}")


def _borders(table: pa.Table, most_rows: int) -> list[int]:
    """Where record batches end: full ones, or as many rows as may lie together."""
    rows = table.num_rows
    strings = [table.column(name) for name in ("id", "text") if name in table.column_names]
    if 0 < rows <= most_rows and sum(column.nbytes for column in strings) <= _BATCH_STRING_BYTES:
        return [rows]  # as nearly always
    ends = np.cumsum(_string_bytes(table))
    borders: list[int] = []
    start = 0
    while start < rows:
        before = int(ends[start - 1]) if start else 0
        fit = int(np.searchsorted(ends, before + _BATCH_STRING_BYTES, side="right"))
        start = min(max(fit, start + 1), start + most_rows, rows)
        borders.append(start)
    return borders


def _string_bytes(table: pa.Table) -> np.ndarray:
    """Bytes of ids and texts of each row."""
    total = np.zeros(table.num_rows, np.int64)
    for name in ("id", "text"):
        if name in table.column_names and not pa.types.is_int64(table.schema.field(name).type):
            total += np.concatenate([value_lengths(chunk) for chunk in table.column(name).chunks] or [total])
    return total
