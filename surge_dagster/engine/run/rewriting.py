"""Files written from vectors that the store has already: assembled from staged segments, or
republished.

Rows pass through in small batches. At most one row group of the new file is resident, so a
partition of any size passes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import reduce

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.files.facts import WRITER, FileFacts, InvalidFile, VectorFacts
from surge_dagster.engine.files.formats import PublishedFile, new_writer
from surge_dagster.engine.files.opening import open_published
from surge_dagster.engine.files.parquet import STRING_COPIES, FileWriter, levels_bytes
from surge_dagster.engine.files.rows import READ_BYTES, rows_at_a_time, vector_bytes
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.failures import failure_of, require_unchanged
from surge_dagster.engine.run.observer import PublicationObserver
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.space_target import SpaceTarget
from surge_dagster.engine.run.staging import Staging
from surge_dagster.engine.run.superbatch import (
    MissingTexts,
    PartitionToRead,
    ReadPartition,
    StagedRows,
    row_bytes,
)
from surge_dagster.engine.sources.content import ContentDigest
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Upload

log = logging.getLogger(__name__)

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
    observer: PublicationObserver | None = None,
) -> PublishedFile:
    """Write a partition's file from its staged segments.

    Args:
        staged: all rows of the partition, in any order.
        require_not_over: called before each batch of rows; what it raises ends the work.

    Raises:
        TransientError: a segment is not what it was when it was staged, the file cannot be written,
            or the source has changed.
    """
    source = partition.source
    require_unchanged(source)  # checked again at the publication; this saves the work
    vectors = reduce(VectorFacts.plus, (segment.vectors for segment in staged), VectorFacts())
    facts = target.facts(partition, read, vectors)
    columns = target.columns(read.id_type, read.carried_columns)
    wanted_ids: list[pa.Array] = []

    def rows() -> Iterator[pa.RecordBatch]:
        row = 0
        for batch in _staged_rows(staging, source, staged):
            require_not_over()
            if read.changes is not None:
                wanted_ids.append(read.changes.wanted_ids(row, batch.column("id")))
            row += len(batch)
            yield batch

    with target.create(partition.key) as upload:
        try:
            write_rows(target.space, upload, columns, facts, rows())
        except InvalidFile as error:
            reason = (
                f"partition {partition.key!r}: its staged rows cannot be used: {error}. Run again."
            )
            raise TransientError(reason, partition.key) from error
        if observer is not None and read.changes is not None:
            observer.publishing(facts, read.changes, wanted_ids)
        return PublishedFile(upload.publish(lambda: require_unchanged(source)), facts, columns)


def republish(
    decisions: Iterable[Receipt | Failure | PartitionToRead],
    target: SpaceTarget,
    staging: Staging,
    memory: RunMemory,
) -> Iterator[Receipt | Failure | PartitionToRead]:
    """Give unchanged content a file under its new source version, and pass everything else on.

    One reading computes the content digest. Where it is that of the old file, the rows of this one
    are copied, and nothing is encoded. What earlier runs staged of a partition that needs no
    encoding is removed.
    """
    for decision in decisions:
        if (
            isinstance(decision, PartitionToRead)
            and decision.replaced
            and decision.reuse
            and not decision.range
        ):
            try:
                copy = _republished(decision.source, decision.replaced, target, memory)
            except StoreUnavailable:
                raise
            except (SurgeError, OSError) as error:
                decision = failure_of(decision.source, error)
            else:
                if copy is not None:
                    location = target.store.location(copy.stored.name)
                    decision = Receipt.of(copy.facts, copy.stored, location, action="republished")
        if isinstance(decision, Receipt):
            staging.remove(decision.key)
        yield decision


def _republished(
    partition: Partition, published: PublishedFile, target: SpaceTarget, memory: RunMemory
) -> PublishedFile | None:
    """The file under the partition's present source version; None where its content differs or
    cannot be copied."""
    digest, widest_row, missing = _content(partition, memory)
    if digest != published.facts.content_digest:
        return None
    try:
        return _copy(target, published, partition, widest_row, missing, memory)
    except (InvalidFile, FileNotFoundError) as error:
        log.warning("partition %r is encoded again: %s", partition.key, error)
        return None


def _copy(
    target: SpaceTarget,
    published: PublishedFile,
    partition: Partition,
    widest_row: int,
    missing: MissingTexts,
    memory: RunMemory,
) -> PublishedFile:
    """Copy a file's rows to a new file that names the partition's present source version.

    Args:
        published: the file as it was listed. It may have been replaced since: the new file has the
            facts of the one that is read.
        widest_row: largest row, in bytes of id and text.

    Raises:
        InvalidFile, FileNotFoundError: the file is damaged, removed, or has other content by now;
            it is left as it is.
        TransientError: the old file cannot be read now or the new one be written, or the source has
            changed once more.
    """
    space, name = target.space, published.stored.name
    share = memory.plan.reader + target.store.upload_bytes
    with (
        _held(memory, share),
        open_published(target.store, space, name, buffer_size=READ_BYTES) as reader,
        _held(
            memory,
            reader.reading_bytes(widest_row) + (1 + STRING_COPIES) * widest_row,
            beside=share,
        ),
        target.store.create(name) as upload,
    ):
        if reader.facts.desired_version != published.facts.desired_version:
            raise InvalidFile("it was replaced by a file with other content since it was listed")
        facts, columns = reader.facts, reader.columns
        facts = replace(
            facts, source_version=partition.source_version, writer=WRITER, **asdict(missing)
        )
        rows = rows_at_a_time(widest_row, space.dimension, np.dtype(space.dtype).itemsize)
        write_rows(space, upload, columns, facts, reader.read(batch_rows=rows))
        stored = upload.publish(lambda: require_unchanged(partition))
    target.sync()
    return PublishedFile(stored, facts, columns)


def _content(partition: Partition, memory: RunMemory) -> tuple[str, int, MissingTexts]:
    """The content digest of a partition, its largest row in bytes of id and text, and its missing
    texts."""
    digest, widest, missing = ContentDigest(), 0, MissingTexts()
    with contextlib.closing(memory.batches(partition)) as batches:
        for batch in batches:
            digest.update(batch)
            missing = missing.plus(batch)
            widest = max(widest, int(row_bytes(batch).max(initial=0)))
    return digest.hexdigest(), widest, missing


@contextlib.contextmanager
def _held(memory: RunMemory, size: int, beside: int = 0) -> Iterator[None]:
    available = memory.plan.beside_superbatch
    if size + beside > available:
        raise InvalidFile(
            f"reading it takes {size + beside:,} bytes at a time and {available:,} are available; "
            "a higher memory_limit_bytes would avoid that"
        )
    with memory.held(size):
        yield


def _staged_rows(
    staging: Staging, partition: Partition, staged: Sequence[StagedRows]
) -> Iterator[pa.RecordBatch]:
    for segment in sorted(staged, key=lambda rows: rows.start):
        try:
            with staging.open(partition, segment.start, segment.stop) as reader:
                if reader.facts.content_digest != segment.digest:
                    raise InvalidFile("it holds other rows than those that were staged")
                yield from staging.rows(reader)
        except StoreUnavailable:
            raise
        except (InvalidFile, FileNotFoundError, TransientError) as error:
            removed = "it was removed; another run may have published the partition"
            reason = (
                removed
                if isinstance(error, FileNotFoundError)
                else str(error).removesuffix(". Run again.")
            )
            raise TransientError(
                f"partition {partition.key!r}: its staged rows {segment.start:,} to {segment.stop:,} cannot be used: "
                f"{reason}. Run again.",
                partition.key,
            ) from error


def write_rows(
    space: Space,
    upload: Upload,
    columns: pa.Schema,
    facts: FileFacts,
    batches: Iterable[pa.RecordBatch],
) -> None:
    """Write a file of the space; `InvalidFile` where `batches` do not have as many rows as the
    facts say."""
    with new_writer(upload.sink, columns, facts) as writer:
        for group in _row_groups(batches, writer, space):
            writer.append_table(group)
        if writer.rows != facts.rows:
            raise InvalidFile(f"{writer.rows:,} rows could be read of {facts.rows:,}")
        writer.close()


def _row_groups(
    batches: Iterable[pa.RecordBatch], writer: FileWriter, space: Space
) -> Iterator[pa.Table]:
    """Small batches as row groups of a file: full ones, or as large as may be held while they are
    written."""
    held: list[pa.RecordBatch] = []
    size = rows = 0
    vector = vector_bytes(writer.columns.field("embedding").type)
    levels = (
        0
        if vector <= space.dimension
        else space.dimension * levels_bytes(vector // space.dimension)
    )
    for batch in batches:
        held.append(batch)
        strings = batch.nbytes - batch.num_rows * vector
        size += batch.num_rows * (vector + levels) + (1 + STRING_COPIES) * strings
        rows += batch.num_rows
        if size >= _GROUP_BYTES or rows >= writer.row_group_rows:
            table = pa.Table.from_batches(held, schema=writer.columns)
            group = min(rows, writer.row_group_rows)
            yield table.slice(0, group)
            # rows beyond a full row group begin the next one
            held = table.slice(group).to_batches()
            size, rows = size * (rows - group) // rows, rows - group
    if held:
        yield pa.Table.from_batches(held, schema=writer.columns)
