"""From the staged segments of a partition to its file: their rows, one small batch after the other.

What is resident at a time is what makes up one row group of the file, so a partition of any size passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.embedding_file import STRING_COPIES, InvalidFile, levels_bytes
from surge_dagster.engine.files.file_formats import FileWriter, new_writer
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import PublishedFile
from surge_dagster.engine.output.receipts import require_unchanged
from surge_dagster.engine.output.space_target import SpaceTarget
from surge_dagster.engine.output.staging import Staging
from surge_dagster.engine.superbatch import OpenPartition, StagedRows

# What a row group takes while it is held and written; with what reading takes it is less than the reader's share.
_GROUP_BYTES = 24 * 1024 * 1024


def assemble(
    target: SpaceTarget,
    staging: Staging,
    partition: OpenPartition,
    segments: Sequence[StagedRows],
    going_on: Callable[[], None],
) -> PublishedFile:
    """Write a partition's file from segments that cover it, in order and without a gap.

    Args:
        partition: closed, its content digest known.
        going_on: called now and then; what it raises ends the work.

    Raises:
        TransientError: a segment is not what it was when it was staged, the file cannot be written, or the source has
            changed.
    """
    source, space = partition.source, target.space
    require_unchanged(source)  # again before it is published; here it spares the work
    rows = _Rows(staging, partition, segments)
    with (
        target.create(partition.key) as upload,
        new_writer(
            space.file_format,
            upload.sink,
            partition.id_type or pa.string(),
            space.dimension,
            space.dtype,
            include_text=target.include_text,
        ) as writer,
    ):
        for group in row_groups(rows, writer, space):
            going_on()
            writer.append_table(group)
        facts = target.facts(partition, rows=writer.rows, truncated=rows.truncated)
        if writer.rows != partition.rows:
            raise RuntimeError(f"partition {partition.key!r}: {writer.rows:,} rows are staged of {partition.rows:,}")
        writer.close(facts)
        return PublishedFile(upload.publish(lambda: require_unchanged(source)), facts)


class _Rows:
    """The rows of all segments as they lie in the store; `truncated` is complete when the last one was read."""

    def __init__(self, staging: Staging, partition: OpenPartition, segments: Sequence[StagedRows]) -> None:
        self._staging = staging
        self._partition = partition
        self._segments = segments
        self.truncated = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for segment in self._segments:
            try:
                yield from self._of(segment)
            except FileNotFoundError as error:
                raise self._lost(segment, "it has gone; another run may have published the partition") from error
            except (InvalidFile, OSError) as error:
                raise self._lost(segment, str(error)) from error

    def _of(self, segment: StagedRows) -> Iterator[pa.RecordBatch]:
        with self._staging.open(self._partition.source, segment.start, segment.stop) as (facts, batches):
            if facts.content_digest != segment.digest:
                raise InvalidFile("it holds other rows than those that were staged")
            self.truncated += facts.truncated
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


def row_groups(batches: Iterable[pa.RecordBatch], writer: FileWriter, space: Space) -> Iterator[pa.Table]:
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
            table = pa.Table.from_batches(held, schema=writer.schema)
            group = min(rows, writer.row_group_rows)
            yield table.slice(0, group)
            held = table.slice(group).to_batches()  # what a full row group has no room for begins the next one
            size, rows = size * (rows - group) // rows, rows - group
    if held:
        yield pa.Table.from_batches(held, schema=writer.schema)
