"""One way to write and to read output files, whichever format their space has: Parquet, or Arrow's own.

A space has one format, which its space.json names, and the names of its files end with it. Rows, columns and facts are
the same in both; what differs lies behind `FileWriter` and `OutputFile`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.files.arrow_file import ArrowFile, ArrowFileWriter, write_arrow_file
from surge_dagster.engine.files.checked_file import CheckedFile, end_of
from surge_dagster.engine.files.embedding_file import (
    EmbeddingFileWriter,
    FileFacts,
    FileRows,
    InvalidFile,
    page_bytes,
    read_facts,
    read_rows,
    write_parquet_file,
)
from surge_dagster.engine.model.spec import FileFormat
from surge_dagster.engine.store.store import Upload
from surge_dagster.engine.support.keys import encode_key

SUFFIXES: dict[FileFormat, str] = {"parquet": ".parquet", "arrow": ".arrow"}


def file_name(space: str, key: str, file_format: FileFormat = "parquet") -> str:
    """The name of a partition's output file within the store."""
    return f"{space}/{encode_key(key)}{SUFFIXES[file_format]}"


def format_of(name: str) -> FileFormat | None:
    """The format that a file's name tells; None when it is no output file's."""
    return next((known for known, suffix in SUFFIXES.items() if name.endswith(suffix)), None)


class FileWriter(Protocol):
    """Writes one partition, in one piece or in several."""

    schema: pa.Schema
    row_group_rows: int
    rows: int

    def append_table(self, table: pa.Table) -> None: ...

    def close(self, facts: FileFacts) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class OutputFile(Protocol):
    """An open output file; every byte that it gives is compared with a checksum.

    Attributes:
        facts: what it says of itself.
        schema: of its rows.
        groups: number of its row groups or record batches.
    """

    @property
    def facts(self) -> FileFacts: ...

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def groups(self) -> int: ...

    def group_bytes(self, group: int) -> int:
        """What one of them takes in memory."""
        ...

    def reading_bytes(self, widest_row: int) -> int:
        """Upper estimate of what reading takes beside the rows that are read; `widest_row` in bytes of id and text."""
        ...

    def read(
        self, *, columns: list[str] | None = None, batch_rows: int = 4096, groups: list[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Stream rows; `InvalidFile` when what is read is damaged, `OSError` when the system does not give it."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_output_file(
    source: pa.NativeFile, file_format: FileFormat, *, buffer_size: int = 0, mapped: bool = False
) -> OutputFile:
    """Open an output file for reading.

    Args:
        buffer_size: bytes of a Parquet file to read at a time; zero is a column of a row group.
        mapped: map an Arrow file on a local disk into memory.

    Raises:
        InvalidFile: it is not a complete embedding file; what cannot be read at all raises as in `UNREADABLE`.
    """
    if file_format == "arrow":
        return ArrowFile(source, mapped=mapped)
    return _ParquetFile(source, buffer_size)


def open_checked(source: pa.NativeFile, file_format: FileFormat) -> pa.NativeFile:
    """A file as pyarrow's own readers may read it without missing damage; that of a Parquet file they look for.

    Raises:
        OSError: it is no complete embedding file; while it is read: it is damaged.
    """
    if file_format != "arrow":
        return source
    try:
        end = end_of(source)
    except InvalidFile as error:
        source.close()
        raise OSError(str(error)) from error
    return pa.PythonFile(CheckedFile(source, end, mapped=True), mode="r")


def new_writer(
    file_format: FileFormat,
    sink: pa.NativeFile,
    id_type: pa.DataType,
    dimension: int,
    dtype: str,
    *,
    include_text: bool,
) -> FileWriter:
    """A writer; see `EmbeddingFileWriter`."""
    kind = ArrowFileWriter if file_format == "arrow" else EmbeddingFileWriter
    return kind(sink, id_type, dimension, dtype, include_text=include_text)


def write_file(file_format: FileFormat, upload: Upload, rows: FileRows, facts: FileFacts) -> None:
    """Write a whole output file."""
    write = write_arrow_file if file_format == "arrow" else write_parquet_file
    write(upload, rows, facts)


class _ParquetFile:
    """A Parquet file, whose pages have checksums of their own."""

    def __init__(self, source: pa.NativeFile, buffer_size: int) -> None:
        self._file = pq.ParquetFile(source, pre_buffer=False, buffer_size=buffer_size, page_checksum_verification=True)
        self.facts = read_facts(self._file.metadata)
        self.schema = self._file.schema_arrow
        self.groups = self._file.num_row_groups

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def group_bytes(self, group: int) -> int:
        return self._file.metadata.row_group(group).total_byte_size

    def reading_bytes(self, widest_row: int) -> int:
        return page_bytes(self._file.metadata, widest_row)

    def read(
        self, *, columns: list[str] | None = None, batch_rows: int = 4096, groups: list[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        return read_rows(self._file, columns=columns, batch_rows=batch_rows, row_groups=groups)
