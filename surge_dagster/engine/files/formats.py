"""Write and open output files, and read what a file states about itself."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.facts import FileFacts, InvalidFile, explained
from surge_dagster.engine.files.parquet import MAGIC, FileWriter, facts_at_end
from surge_dagster.engine.files.rows import FileRows, schema
from surge_dagster.engine.store.store import Store, StoredObject, Upload
from surge_dagster.engine.support.keys import encode_key

SUFFIX = ".parquet"
END_BYTES = 8 * 1024
_TRAILER_BYTES = 4 + len(MAGIC)


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A valid output file: where it lies, and what it states about itself."""

    stored: StoredObject
    facts: FileFacts
    columns: pa.Schema


def file_name(space: str, key: str) -> str:
    """Return the name of a partition's output file within the store."""
    return f"{space}/{encode_key(key)}{SUFFIX}"


def write_file(upload: Upload, rows: FileRows, facts: FileFacts) -> None:
    """Write a whole output file."""
    texts = rows.texts
    columns = schema(
        rows.id_type,
        rows.matrix.shape[1],
        str(rows.matrix.dtype),
        include_text=texts is not None,
        carried=rows.carried_columns,
    )
    with FileWriter(upload.sink, columns, facts) as writer:
        writer.append_table(rows.table(columns))
        writer.close()


def read_shape(source: pa.NativeFile) -> tuple[pa.Schema, int]:
    """Return the columns and the number of rows of a file, whatever its metadata promise; damage
    raises as in `UNREADABLE`."""
    footer = pq.read_metadata(source)
    groups = (footer.row_group(group).num_rows for group in range(footer.num_row_groups))
    # what readers give, whatever the file as a whole counts
    return footer.schema.to_arrow_schema(), sum(groups)


def read_published_file(store: Store, name: str) -> PublishedFile:
    """Return what a file states about itself now, from one read of its end if that is enough;
    raises as `explained`."""
    with explained(store.location(name)):
        end = store.read_end(name, END_BYTES)
        needed = _footer_bytes(end.content, end.stored.size) + _TRAILER_BYTES
        if needed > len(end.content):
            whole = store.read_end(name, needed)
            if whole.stored != end.stored:
                raise TransientError(
                    f"{store.location(name)!r} was replaced while it was read. Run again."
                )
            end = whole
        return PublishedFile(end.stored, *facts_at_end(end.content))


def _footer_bytes(end: bytes, file_bytes: int) -> int:
    """Return the length of the footer: a file ends with it, its length in four bytes, and the magic
    bytes."""
    if end[-len(MAGIC) :] != MAGIC:
        raise InvalidFile(
            f"it does not end with {MAGIC.decode()}: it was cut off, or is something else"
        )
    length = int.from_bytes(end[-_TRAILER_BYTES : -len(MAGIC)], "little")
    if not 0 < length <= file_bytes - _TRAILER_BYTES - len(MAGIC):
        raise InvalidFile(
            f"its footer is said to take {length:,} bytes of {file_bytes:,}, which is impossible"
        )
    return length
