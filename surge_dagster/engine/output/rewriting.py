"""Files written from vectors that the store has already: assembled from staged segments, or republished.

Rows pass through in small batches. At most one row group of the new file is resident, so a partition of any size
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.facts import WRITER, InvalidFile
from surge_dagster.engine.files.formats import FileWriter, PublishedFile, new_writer, open_output_file
from surge_dagster.engine.files.parquet import STRING_COPIES, levels_bytes
from surge_dagster.engine.files.rows import READ_BYTES, check_schema, rows_at_a_time, schema
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.space_target import SpaceTarget, require_unchanged
from surge_dagster.engine.output.staging import Staging
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.superbatch import OpenPartition, StagedRows
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line, is_systems

# Memory of a row group while it is held and written; together with what reading takes, less than the reader's share.
_GROUP_BYTES = 24 * 1024 * 1024


def assemble(
    target: SpaceTarget,
    staging: Staging,
    partition: OpenPartition,
    segments: Sequence[StagedRows],
    require_not_over: Callable[[], None],
) -> PublishedFile:
    """Write a partition's file from segments that cover it, in order and without a gap.

    Args:
        partition: read to its end, its content digest known.
        require_not_over: called before each row group; what it raises ends the work.

    Raises:
        TransientError: a segment is not what it was when it was staged, the file cannot be written, or the source has
            changed.
    """
    source, space = partition.source, target.space
    require_unchanged(source)  # checked again at the publication; this spares the work
    rows = _SegmentRows(staging, partition, segments)
    truncated = sum(segment.truncated for segment in segments)
    facts = target.facts(partition, rows=partition.rows, truncated=truncated)
    with (
        target.create(partition.key) as upload,
        new_writer(space.file_format, upload.sink, target.columns(partition), facts) as writer,
    ):
        for group in _row_groups(rows, writer, space):
            require_not_over()
            writer.append_table(group)
        if writer.rows != partition.rows:
            raise RuntimeError(f"partition {partition.key!r}: {writer.rows:,} rows are staged of {partition.rows:,}")
        writer.close()
        return PublishedFile(upload.publish(lambda: require_unchanged(source)), facts, writer.columns)


def republish(
    target: SpaceTarget,
    published: PublishedFile,
    partition: Partition,
    *,
    widest_row: int,
    held: Callable[[int], AbstractContextManager[None]],
) -> PublishedFile:
    """Copy a file's rows to a new file that names the partition's present source version; nothing is encoded.

    Args:
        published: the file as it was listed. It may have been replaced since: the new file has the facts of the one
            that is read.
        widest_row: largest row, in bytes of id and text.
        held: books what wide rows take, in bytes; the caller books the rest.

    Raises:
        InvalidFile: the file is damaged, or has other content by now; it is left as it is.
        TransientError: the new file cannot be written, or the source has changed once more.
        OSError: the system does not give the old file, so that nothing is known of it.
    """
    store, space, name = target.store, target.space, published.stored.name
    try:
        with (
            store.open(name) as source,
            open_output_file(source, space.file_format, buffer_size=READ_BYTES) as reader,
            held(reader.reading_bytes(widest_row) + (1 + STRING_COPIES) * widest_row),
            store.create(name) as upload,
        ):
            if reader.facts.desired_version != published.facts.desired_version:
                raise InvalidFile("it was replaced by a file with other content since it was listed")
            facts = replace(reader.facts, source_version=partition.source_version, writer=WRITER)
            check_schema(reader.columns, dimension=space.dimension, dtype=space.dtype)
            id_type, include_text = reader.columns.field("id").type, "text" in reader.columns.names
            columns = schema(id_type, space.dimension, space.dtype, include_text=include_text)
            with new_writer(space.file_format, upload.sink, columns, facts) as writer:
                rows = rows_at_a_time(widest_row, space.dimension, np.dtype(space.dtype).itemsize)
                for group in _row_groups(reader.read(batch_rows=rows), writer, space):
                    writer.append_table(group)
                if writer.rows != facts.rows:
                    raise InvalidFile(f"{writer.rows:,} rows could be read of {facts.rows:,}")
                writer.close()
            stored = upload.publish(lambda: require_unchanged(partition))
    except UNREADABLE as error:
        if is_systems(error) and not isinstance(error, FileNotFoundError):
            raise
        raise InvalidFile(f"it cannot be read ({first_line(error)})") from error
    target.sync()
    return PublishedFile(stored, facts, columns)


class _SegmentRows:
    """The rows of all segments from the store."""

    def __init__(self, staging: Staging, partition: OpenPartition, segments: Sequence[StagedRows]) -> None:
        self._staging = staging
        self._partition = partition
        self._segments = segments

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for segment in self._segments:
            try:
                yield from self._rows_of(segment)
            except FileNotFoundError as error:
                raise self._lost(segment, "it was removed; another run may have published the partition") from error
            except (InvalidFile, OSError) as error:
                raise self._lost(segment, str(error)) from error

    def _rows_of(self, segment: StagedRows) -> Iterator[pa.RecordBatch]:
        with self._staging.open(self._partition.source, segment.start, segment.stop) as (facts, batches):
            if facts.content_digest != segment.digest:
                raise InvalidFile("it holds other rows than those that were staged")
            rows = 0
            for batch in batches:
                rows += batch.num_rows
                yield batch
            if rows != facts.rows:
                raise InvalidFile(f"{rows:,} rows could be read of {facts.rows:,}")

    def _lost(self, segment: StagedRows, reason: str) -> TransientError:
        return TransientError(
            f"partition {self._partition.key!r}: its staged rows {segment.start:,} to {segment.stop:,} cannot be used: "
            f"{reason}. Run again.",
            self._partition.key,
        )


def _row_groups(batches: Iterable[pa.RecordBatch], writer: FileWriter, space: Space) -> Iterator[pa.Table]:
    """Small batches as row groups of a file: full ones, or as large as may be held while they are written."""
    held: list[pa.RecordBatch] = []
    size = rows = 0
    dimension, itemsize = space.dimension, np.dtype(space.dtype).itemsize
    for batch in batches:
        held.append(batch)
        values = batch.num_rows * dimension
        strings = batch.nbytes - values * itemsize
        size += values * (itemsize + levels_bytes(itemsize)) + (1 + STRING_COPIES) * strings
        rows += batch.num_rows
        if size >= _GROUP_BYTES or rows >= writer.row_group_rows:
            table = pa.Table.from_batches(held, schema=writer.columns)
            group = min(rows, writer.row_group_rows)
            yield table.slice(0, group)
            held = table.slice(group).to_batches()  # rows beyond a full row group begin the next one
            size, rows = size * (rows - group) // rows, rows - group
    if held:
        yield pa.Table.from_batches(held, schema=writer.columns)
