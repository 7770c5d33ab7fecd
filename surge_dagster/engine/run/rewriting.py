"""Files assembled from staged segments.

Rows pass through in small batches. At most one row group of the new file is resident, so a
partition of any size passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce

import pyarrow as pa

from surge_dagster.engine.files.facts import FileFacts, InvalidFile, VectorFacts
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.files.parquet import STRING_COPIES, levels_bytes, write_file
from surge_dagster.engine.files.rows import group_rows, vector_bytes
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.change_feed import write_changes
from surge_dagster.engine.run.report import require_unchanged
from surge_dagster.engine.run.staging import Staging
from surge_dagster.engine.run.superbatch import (
    PartitionToRead,
    ReadPartition,
    SpaceTarget,
    StagedRows,
)
from surge_dagster.engine.store.store import Upload

# Memory of a row group while it is held and written; together with what reading takes, less than
# the reader's share.
_GROUP_BYTES = 24 * 1024 * 1024


def assemble(
    target: SpaceTarget,
    staging: Staging,
    partition: PartitionToRead,
    read: ReadPartition,
    staged: Sequence[StagedRows],
    require_not_over: Callable[[], None],
) -> PublishedFile:
    """Write a partition's file from its staged segments.

    Args:
        staged: all rows of the partition, in any order.
        require_not_over: called before each batch of rows; what it raises ends the work.

    Raises:
        TransientError: a segment cannot be used (see `Staging.rows`), the file cannot be written,
            or the source has changed.
    """
    source = partition.source
    require_unchanged(source)  # checked again at the publication; this saves the work
    vectors = reduce(VectorFacts.plus, (segment.vectors for segment in staged), VectorFacts())
    facts = target.facts(partition, read, vectors)
    columns = target.columns(read.id_type, read.carried_columns)
    rows = _rows(staging, partition, staged, require_not_over)

    with target.create(partition.key) as upload:
        write_rows(target.space, upload, columns, facts, rows)
        if read.changes is not None and partition.action(facts) == "encoded":
            write_changes(target.store, facts, read.changes)
        return PublishedFile(upload.publish(lambda: require_unchanged(source)), facts, columns)


def _rows(
    staging: Staging,
    partition: PartitionToRead,
    staged: Sequence[StagedRows],
    require_not_over: Callable[[], None],
) -> Iterator[pa.RecordBatch]:
    for segment in sorted(staged, key=lambda rows: rows.start):
        for batch in staging.rows(partition.source, segment):
            require_not_over()
            yield batch


def write_rows(
    space: Space,
    upload: Upload,
    columns: pa.Schema,
    facts: FileFacts,
    batches: Iterable[pa.RecordBatch],
) -> None:
    """Write a file of the space; raises `InvalidFile` if `batches` have another number of rows than
    the facts."""
    write_file(upload.sink, columns, facts, _row_groups(_counted(batches, facts), columns, space))


def _counted(batches: Iterable[pa.RecordBatch], facts: FileFacts) -> Iterator[pa.RecordBatch]:
    rows = 0
    for batch in batches:
        rows += len(batch)
        yield batch
    if rows != facts.rows:
        raise InvalidFile(f"{rows:,} rows could be read of {facts.rows:,}")


def _row_groups(
    batches: Iterable[pa.RecordBatch], columns: pa.Schema, space: Space
) -> Iterator[pa.Table]:
    """Yield small batches as row groups of a file: full ones, or as large as may be held while they
    are written."""
    held: list[pa.RecordBatch] = []
    size = 0
    rows = 0
    most_rows = group_rows(columns)
    vector = vector_bytes(columns.field("embedding").type)
    levels = 0
    if vector > space.dimension:
        levels = space.dimension * levels_bytes(vector // space.dimension)
    for batch in batches:
        held.append(batch)
        strings = batch.nbytes - batch.num_rows * vector
        size += batch.num_rows * (vector + levels) + (1 + STRING_COPIES) * strings
        rows += batch.num_rows
        if size >= _GROUP_BYTES or rows >= most_rows:
            table = pa.Table.from_batches(held, schema=columns)
            group = min(rows, most_rows)
            yield table.slice(0, group)
            # rows beyond a full row group begin the next one
            held = table.slice(group).to_batches()
            size = size * (rows - group) // rows
            rows -= group
    if held:
        yield pa.Table.from_batches(held, schema=columns)
