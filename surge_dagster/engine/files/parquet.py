"""Output files in Parquet, format 3: id, text, text_hash, carried columns and embedding.

Embeddings go from the result matrix to pyarrow's writer without becoming Python objects: a
contiguous slice becomes a fixed-size list by reference, stored plain (vectors do not compress) and
without statistics. Ids and texts are compressed with zstd. Page checksums are on, because an
unnoticed bit flip in a vector is a wrong vector.

Parquet stores repetition and definition levels of a list, and pyarrow builds them for a whole row
group. A row group has at most 1 MiB of embeddings, which bounds the memory that writing takes: 4
MiB are neither written nor read faster and take three times the memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.files.facts import (
    FileFacts,
    InvalidFile,
    explained,
    facts_of,
    guarded_metadata,
)
from surge_dagster.engine.files.rows import (
    carried_columns,
    group_rows,
    require_carried,
    require_dimension,
    row_group_rows,
)

STRING_COPIES = 3
WRITE_BATCH_ROWS = 1024
PAGE_BYTES = 256 * 1024
_PIECE_BYTES = 64 * 1024
_VECTORS = "embedding.list.item"
_COMPRESSED = {"id": "zstd", "text": "zstd", "text_hash": "none", _VECTORS: "none"}


def write_file(
    sink: pa.NativeFile, columns: pa.Schema, facts: FileFacts, tables: Iterable[pa.Table]
) -> None:
    """Write one file of tables that have its columns; the caller opens and closes the sink, and
    discards the file after an error."""
    carried = carried_columns(columns)
    compression = _COMPRESSED | dict.fromkeys(carried.names if carried else (), "zstd")
    writer = pq.ParquetWriter(
        sink,
        columns,
        version="2.6",
        use_dictionary=False,
        write_statistics=False,
        compression=compression,  # pyright: ignore[reportArgumentType]
        write_page_checksum=True,
        write_batch_size=WRITE_BATCH_ROWS,
        data_page_size=PAGE_BYTES,
        # the list's values are called "item", as Arrow calls them
        use_compliant_nested_type=False,
    )
    try:
        writer.add_key_value_metadata(guarded_metadata(facts))  # pyright: ignore[reportArgumentType]
        for table in tables:
            if table.num_rows:
                writer.write_table(table, row_group_size=group_rows(columns))
    except BaseException:
        # It does not matter that the footer of a file that is thrown away cannot be written either.
        with contextlib.suppress(OSError, pa.ArrowException):
            writer.close()
        raise
    writer.close()


class OutputFile:
    """An open output file whose rows are compared with checksums as they are read.

    Attributes:
        groups: number of its row groups.
        location: in messages.

    Args:
        buffer_size: bytes to read at a time; zero is a column of a row group.
    """

    def __init__(self, source: pa.NativeFile, buffer_size: int = 0, location: str = "") -> None:
        self.location = location
        self._file = pq.ParquetFile(
            source, pre_buffer=False, buffer_size=buffer_size, page_checksum_verification=True
        )
        self.columns = self._file.schema_arrow.remove_metadata()
        self.facts = read_facts(self._file.metadata, self.columns)
        self.groups = self._file.num_row_groups

    def read(
        self,
        *,
        columns: list[str] | None = None,
        batch_rows: int = 4096,
        groups: list[int] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Stream rows, at most `batch_rows` at a time: of all columns and row groups, or of some;
        see `explained`."""
        rows = 0
        with explained(self.location):
            batches = self._file.iter_batches(
                batch_rows, columns=columns, row_groups=groups, use_threads=False
            )
            for batch in batches:
                rows += batch.num_rows
                yield batch
            # pages and row groups count rows without a checksum
            if groups is None and rows != self.facts.rows:
                raise InvalidFile(
                    f"its metadata promise {self.facts.rows:,} rows and it has {rows:,}"
                )

    def group_ends(self) -> np.ndarray:
        """Return the row after each row group, int64."""
        groups = (self._file.metadata.row_group(group) for group in range(self.groups))
        return np.cumsum([group.num_rows for group in groups], dtype=np.int64)

    def group_bytes(self, group: int) -> int:
        """Return an upper bound of the memory that one row group takes, in bytes."""
        return self._file.metadata.row_group(group).total_byte_size


def read_facts(footer: pq.FileMetaData, columns: pa.Schema | None = None) -> FileFacts:
    """Return the facts in the footer of an output file, compared with its rows and its columns.

    Readers give as many rows as the row groups state, whatever the file as a whole does.

    Args:
        columns: those of the footer, if the caller has read them.
    """
    facts = facts_of(footer.metadata)
    groups = (footer.row_group(group).num_rows for group in range(footer.num_row_groups))
    for rows in (footer.num_rows, sum(groups)):
        if rows != facts.rows:
            raise InvalidFile(
                f"its metadata promise {facts.rows:,} rows and it has {rows:,}", "rows"
            )

    if columns is None:
        columns = footer.schema.to_arrow_schema()
    require_dimension(columns, facts.dimension)
    require_carried(facts.carried_columns, columns)
    return facts


def piece_bytes(rows: int, dimension: int, itemsize: int) -> int:
    """Return an upper estimate of the memory that writing the embeddings of `rows` rows takes in
    addition to the rows, in bytes.

    Embeddings need repetition and definition levels, four bytes per value of a row group, in
    buffers that grow by copying; float16, a fixed-size binary to Parquet, needs a pointer per value
    too. Strings are written before them: they take at most `STRING_COPIES` times what is collected
    for a page, by `WRITE_BATCH_ROWS`: plain, compressed and on the way.
    """
    values = min(rows, row_group_rows(dimension, itemsize)) * dimension
    pages = min(2 * rows * dimension * itemsize, 2 * PAGE_BYTES)
    return _PIECE_BYTES + values * levels_bytes(itemsize) + pages


def levels_bytes(itemsize: int) -> int:
    """Return the memory that writing one value of an embedding takes, in bytes."""
    return 8 if itemsize == 4 else 16
