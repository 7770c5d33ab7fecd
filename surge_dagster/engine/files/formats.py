"""Output files in the format of their space: writing, opening, and reading what a file states about itself.

A space has one format, Parquet or Arrow's own, which its space.json names; the names of its files end with it. Rows,
columns and facts are the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files import arrow, parquet
from surge_dagster.engine.files.arrow import ArrowFile, ArrowWriter
from surge_dagster.engine.files.facts import FileFacts, InvalidFile, explained, guarded_metadata
from surge_dagster.engine.files.parquet import ParquetFile, ParquetWriter
from surge_dagster.engine.files.rows import FileRows, FileWriter, OutputFile, schema
from surge_dagster.engine.model.spec import FileFormat
from surge_dagster.engine.store.store import Store, StoredObject, Upload
from surge_dagster.engine.support.columns import value_parts
from surge_dagster.engine.support.keys import encode_key

SUFFIXES: dict[FileFormat, str] = {"parquet": ".parquet", "arrow": ".arrow"}
END_BYTES = 8 * 1024
# Texts of fewer bytes are not compressed: it would not save a block of a disk, and takes a third of the time that
# writing a file of ten texts takes.
LEAST_COMPRESSED_BYTES = 4096
# Files with less content are put together in memory and written with one system call.
_HELD_WHOLE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A valid output file: where it lies, and what it states about itself."""

    stored: StoredObject
    facts: FileFacts
    columns: pa.Schema


def file_name(space: str, key: str, file_format: FileFormat = "parquet") -> str:
    """The name of a partition's output file within the store."""
    return f"{space}/{encode_key(key)}{SUFFIXES[file_format]}"


def format_of(name: str) -> FileFormat | None:
    """The format of a file by its name; None where it is no output file."""
    return next((known for known, suffix in SUFFIXES.items() if name.endswith(suffix)), None)


def new_writer(
    file_format: FileFormat, sink: pa.NativeFile, columns: pa.Schema, facts: FileFacts, *, compress: bool = True
) -> FileWriter:
    """A writer of one file; `compress` ids and texts in Parquet; in Arrow they never are."""
    if file_format == "arrow":
        return ArrowWriter(sink, columns, guarded_metadata(facts, arrow.FORMAT))
    return ParquetWriter(sink, columns, guarded_metadata(facts, parquet.FORMAT), compress=compress)


def write_file(file_format: FileFormat, upload: Upload, rows: FileRows, facts: FileFacts) -> None:
    """Write a whole output file."""
    texts, matrix = rows.texts, rows.matrix
    include_text, further = texts is not None, rows.carried_columns
    columns = schema(rows.id_type, matrix.shape[1], str(matrix.dtype), include_text=include_text, carried=further)
    text_bytes = 0 if texts is None else len(value_parts(texts)[1])
    content = matrix.nbytes + text_bytes + sum(part.nbytes for part in (*rows.ids, *rows.carried))
    is_small = content <= _HELD_WHOLE_BYTES
    held = pa.BufferOutputStream() if is_small else None
    compress = texts is None or text_bytes >= LEAST_COMPRESSED_BYTES
    with new_writer(file_format, held or upload.sink, columns, facts, compress=compress) as writer:
        writer.append_table(rows.table(columns))
        writer.close()
    if held is not None:
        upload.sink.write(held.getvalue())


def open_output_file(
    source: pa.NativeFile, file_format: FileFormat, *, buffer_size: int = 0, mapped: bool = False
) -> OutputFile:
    """Open an output file for reading; its source is closed with it.

    Args:
        buffer_size: bytes of a Parquet file to read at a time; zero is a column of a row group.
        mapped: map an Arrow file on a local disk into memory: its rows are the file itself then.
    """
    if file_format == "arrow":
        return ArrowFile(source, mapped=mapped)
    return ParquetFile(source, buffer_size)


def read_shape(source: pa.NativeFile, file_format: FileFormat) -> tuple[pa.Schema, int]:
    """The columns and the number of rows of a file, whatever its metadata promise; damage raises as in `UNREADABLE`."""
    if file_format == "arrow":
        reader = pa.ipc.open_file(source)
        return reader.schema, sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
    footer = pq.read_metadata(source)
    groups = (footer.row_group(group).num_rows for group in range(footer.num_row_groups))
    return footer.schema.to_arrow_schema(), sum(groups)  # what readers give, whatever the file as a whole counts


def read_published_file(store: Store, name: str) -> PublishedFile:
    """What a file states about itself now, from one read of its end where that is enough; raises as `explained`."""
    form = arrow if format_of(name) == "arrow" else parquet
    with explained(store.location(name)):
        end = store.read_end(name, END_BYTES)
        needed = _footer_bytes(end.content, end.stored.size, form.MAGIC) + 4 + len(form.MAGIC)
        if needed > len(end.content):
            whole = store.read_end(name, needed)
            if whole.stored != end.stored:
                raise TransientError(f"{store.location(name)!r} was replaced while it was read. Run again.")
            end = whole
        return PublishedFile(end.stored, *form.facts_at_end(end.content))


def _footer_bytes(end: bytes, file_bytes: int, magic: bytes) -> int:
    """Length of the footer: both formats end with it, its length in four bytes, and their magic bytes."""
    trailer = 4 + len(magic)
    if end[-len(magic) :] != magic:
        raise InvalidFile(f"it does not end with {magic.decode()}: it was cut off, or is something else")
    length = int.from_bytes(end[-trailer : -len(magic)], "little")
    if not 0 < length <= file_bytes - trailer - len(magic):
        raise InvalidFile(f"its footer is said to take {length:,} bytes of {file_bytes:,}, which is impossible")
    return length
