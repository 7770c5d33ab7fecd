"""Write and open output files, and read what a file states about itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.files.facts import FileFacts, explained
from surge_dagster.engine.files.parquet import FileWriter, read_facts
from surge_dagster.engine.files.rows import FileRows, schema
from surge_dagster.engine.store.store import Store, StoredObject, Upload
from surge_dagster.engine.support.keys import encode_key

SUFFIX = ".parquet"
END_BYTES = 8 * 1024


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
        try:
            footer = pq.read_metadata(pa.BufferReader(end.content))
        except pa.ArrowInvalid:  # it is longer, or damaged
            with store.open(name, end.stored) as source:
                footer = pq.read_metadata(source)
        columns = footer.schema.to_arrow_schema().remove_metadata()
        return PublishedFile(end.stored, read_facts(footer, columns), _shared(columns))


@lru_cache(maxsize=64)
def _shared(columns: pa.Schema) -> pa.Schema:
    """Return one object for all files with these columns: a listing keeps the columns of each
    file."""
    return columns
