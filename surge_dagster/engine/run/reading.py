"""The reader: from decisions to SuperBatches, in two generators, one after the other.

    known_vectors  ──►  gather
    staged by an        rows into
    earlier run, or     SuperBatches
    in the old file

Rows that an earlier run staged have their vectors in the store and are read only to be checked.
Rows whose text the old file has take their vectors from there. All checks on the rows of a
partition as a whole are made here, and a partition is closed only after every one has passed: of
one that is refused, what the SuperBatch being gathered holds is dropped.

Of a divided partition a range of rows is read, and staged. Once every row of it is staged, by
whichever runs, all rows are read by whoever sees that: what is checked of a partition as a whole is
checked then.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.known_vectors import KnownVectors
from surge_dagster.engine.errors import DataError, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.run.aggregator import Aggregator
from surge_dagster.engine.run.failures import DroppedPartitions, failure_of
from surge_dagster.engine.run.observer import PublicationObserver
from surge_dagster.engine.run.previous_rows import PreviousRows, open_previous_rows
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.reuse_check import ReuseCheck
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.space_target import SpaceTarget
from surge_dagster.engine.run.staging import StagedRowsCheck, StagedRowsDiffer, Staging
from surge_dagster.engine.run.superbatch import (
    MissingTexts,
    PartitionToRead,
    ReadPartition,
    StagedRows,
    SuperBatch,
)
from surge_dagster.engine.sources.content import ContentDigest, IdSet, refuse_repeated_id
from surge_dagster.engine.sources.partition import PartitionRange, RowBatch


def superbatches(
    decisions: Iterable[Receipt | Failure | PartitionToRead],
    target: SpaceTarget,
    staging: Staging,
    memory: RunMemory,
    dropped: DroppedPartitions,
    reuse: ReuseCheck,
    observer: PublicationObserver | None = None,
) -> Iterator[SuperBatch | Receipt | Failure]:
    """Read what was decided to be read, in this order; what was decided otherwise passes.

    Args:
        decisions: see `deciding.decide`, which says also what is raised.
        memory: books each SuperBatch; its receiver releases it.
    """
    aggregator = Aggregator(memory.bounds, memory.acquire, memory.reserve)
    ranges = dict[str, PartitionToRead]()
    for to_read in (decisions, _divided(ranges)):
        rows = known_vectors(to_read, target, staging, memory, reuse, observer, ranges)
        yield from gather(rows, aggregator, memory, dropped)
        memory.in_flight.wait_until_none(memory.stop)  # until then ranges are not staged


def _divided(ranges: Mapping[str, PartitionToRead]) -> Iterator[PartitionToRead]:
    """The partitions of which ranges were read, after these."""
    for partition in ranges.values():
        yield replace(partition, range=None, reuse=False)


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Consecutive rows of a partition.

    Attributes:
        vectors: that some of them have already; None where none has.
        is_staged: whether an earlier run has staged them, so that they need no encoding.
    """

    rows: RowBatch
    vectors: KnownVectors | None = None
    is_staged: bool = False


@dataclass(frozen=True, slots=True)
class PartitionRows:
    """A partition and its rows, to be read once. What the pieces yield last is the partition as it
    was read.

    Taking the next piece raises what is wrong with the partition.
    """

    partition: PartitionToRead
    pieces: Generator[RowPiece | ReadPartition]


def known_vectors(
    decisions: Iterable[Receipt | Failure | PartitionToRead],
    target: SpaceTarget,
    staging: Staging,
    memory: RunMemory,
    reuse: ReuseCheck,
    observer: PublicationObserver | None,
    ranges: dict[str, PartitionToRead],
) -> Iterator[Receipt | Failure | PartitionRows]:
    """Open each partition that has to be read; receipts and failures pass. `ranges` takes one of
    each key."""
    reader = _RowReader(target, staging, memory, reuse, observer)
    for decision in decisions:
        if isinstance(decision, PartitionToRead) and decision.range is not None:
            ranges[decision.key] = decision
        yield (
            PartitionRows(decision, reader.pieces(decision))
            if isinstance(decision, PartitionToRead)
            else decision
        )


@dataclass(frozen=True, slots=True)
class _RowReader:
    target: SpaceTarget
    staging: Staging
    memory: RunMemory
    reuse: ReuseCheck
    observer: PublicationObserver | None

    def pieces(self, partition: PartitionToRead) -> Generator[RowPiece | ReadPartition]:
        """All rows of a partition or a range, checked, and then what is known of it."""
        within, first_row = partition.range, partition.first_row
        observer = self.observer if within is None else None
        with contextlib.ExitStack() as opened:
            staged = self._staged(partition)
            if staged is None:
                return
            opened.enter_context(self._without_wrong_rows(partition))
            check = StagedRowsCheck(staged, first_row)
            previous = opened.enter_context(self._previous_rows(partition, observer))
            batches = opened.enter_context(
                contextlib.closing(self.memory.batches(partition.source, within))
            )
            ids = opened.enter_context(_Ids(partition, self.memory, previous))
            if within is not None:
                # at last they are compared with all others
                ids.require_room(partition.source.rows or 0)
            digest, missing, row = ContentDigest(), MissingTexts(), first_row
            id_type, carried_columns = pa.string(), None
            for batch in batches:
                digest.update(batch)
                missing = missing.plus(batch)
                ids.add(batch)
                id_type = batch.ids.type
                if batch.carried is not None:
                    carried_columns = batch.carried.schema
                for rows, is_staged in check.cut(batch):
                    if is_staged and previous is not None:
                        previous.skip(rows, row)
                    if is_staged or previous is None:
                        yield RowPiece(rows, is_staged=is_staged)
                    else:
                        for piece, vectors in previous.known(rows, row):
                            yield RowPiece(piece, vectors)
                    row += len(rows)
            check.finish()
            count, announced = row - first_row, partition.source.rows
            if within is not None:
                announced = within.stop - within.start
            read_rows = count + missing.skipped_rows
            if announced not in (None, read_rows):
                raise TransientError(
                    f"{within or f'partition {partition.key!r}'}: {announced:,} rows were announced and {read_rows:,} "
                    "came. Its source changed while it was read; run again.",
                    partition.key,
                )
            refuse_repeated_id(partition.source, ids.repeated())
            changes = previous.changes() if previous is not None else None
            read = ReadPartition(
                count, digest.hexdigest(), id_type, missing, tuple(staged), changes, carried_columns
            )
        yield read  # after the memory of reading it was given back

    def _previous_rows(
        self, partition: PartitionToRead, observer: PublicationObserver | None
    ) -> contextlib.AbstractContextManager[PreviousRows | None]:
        reuse = partition.reuse and partition.replaced is not None and self.reuse.allows_reuse()
        return open_previous_rows(partition, self.target, self.memory, observer, reuse=reuse)

    @contextlib.contextmanager
    def _without_wrong_rows(self, partition: PartitionToRead) -> Iterator[None]:
        """Remove what is staged of a partition if it is not the partition's; the next run encodes
        it."""
        source = partition.source
        try:
            yield
        except StagedRowsDiffer as error:
            whole = PartitionRange(source.key, source.source_version, 0, sys.maxsize)
            self.staging.remove_range(source, partition.range or whole)
            raise TransientError(
                f"partition {source.key!r}: {error}. What an earlier run staged of it was removed; run again.",
                source.key,
            ) from error

    def _staged(self, partition: PartitionToRead) -> list[StagedRows] | None:
        """Rows that earlier runs staged and that can be used; None of a divided partition of which
        rows still lack."""
        source, within = partition.source, partition.range
        if partition.is_divided and within is None:
            with self.memory.held(self.memory.plan.reader):
                return self.staging.complete(source)
        if partition.reuse and self.staging.knows(partition.key):
            with self.memory.held(self.memory.plan.reader):
                return self.staging.usable(source, within)
        if within is None:
            self.staging.remove(partition.key)
        elif not partition.reuse:
            self.staging.remove_range(source, within)
        return []


class _Ids(contextlib.AbstractContextManager["_Ids"]):
    """Finds a repeated id of a partition; its memory is booked until the block ends."""

    def __init__(
        self, partition: PartitionToRead, memory: RunMemory, previous: PreviousRows | None
    ) -> None:
        self._source = partition.source
        self._memory = memory
        self._previous = previous
        self._available = memory.plan.source - max(
            0, partition.source.page_bytes - memory.plan.reader_pages
        )
        self._ids = IdSet()

    def add(self, batch: RowBatch) -> None:
        """Take the next rows; the old file gives up its memory before there is none for them."""
        needed = self._ids.bytes_after(len(batch))
        if self._previous is not None and needed + self._previous.held > self._available:
            self._previous.give_up()
        self.require_room(len(batch))
        self._memory.reserve(needed - self._ids.bytes)
        self._ids.add(batch.ids)

    def require_room(self, rows: int) -> None:
        """Raise `DataError` where there is no memory for so many more."""
        needed = self._ids.bytes_after(rows)
        if needed > self._available:
            raise DataError(
                self._source.key,
                f"finding repeated ids takes {needed:,} bytes and {self._available:,} are set aside",
                "Raise the memory limit, or split the partition in the source.",
            )

    def repeated(self) -> np.ndarray:
        return self._ids.repeated()

    def __exit__(self, *error: object) -> None:
        self._memory.ledger.release(self._ids.bytes)


def gather(
    items: Iterable[Receipt | Failure | PartitionRows],
    aggregator: Aggregator,
    memory: RunMemory,
    dropped: DroppedPartitions,
) -> Iterator[SuperBatch | Receipt | Failure]:
    """Gather the rows of partitions; receipts and failures pass. What another stage has dropped is
    read no further."""
    for item in items:
        if isinstance(item, PartitionRows):
            yield from _gather_partition(item, aggregator, memory, dropped)
        else:
            yield item
    yield from map(memory.booked, aggregator.finish())


def _gather_partition(
    item: PartitionRows, aggregator: Aggregator, memory: RunMemory, dropped: DroppedPartitions
) -> Iterator[SuperBatch | Failure]:
    partition, read, failure = item.partition, None, None
    aggregator.open(partition)
    try:
        with contextlib.closing(item.pieces) as pieces:
            for piece in pieces:
                if partition in dropped:
                    break  # a later stage dropped it
                if isinstance(piece, ReadPartition):
                    read = piece
                else:
                    yield from _gather_rows(piece, aggregator, memory)
    except StoreUnavailable:
        raise
    except (SurgeError, OSError) as error:
        is_refused = isinstance(error, DataError)
        if dropped.fail(partition, drop=is_refused, refused=is_refused):
            failure = failure_of(partition.source, error)
    finally:
        if read is None:
            texts, size = aggregator.discard()
            memory.ledger.release(size)
            memory.in_flight.remove(texts)
    if read is not None:
        yield from map(memory.booked, aggregator.close(read))
    if failure is not None:
        yield failure


def _gather_rows(
    piece: RowPiece, aggregator: Aggregator, memory: RunMemory
) -> Iterator[SuperBatch]:
    if piece.is_staged:
        aggregator.skip(piece.rows)
        return
    ready = aggregator.add(piece.rows, piece.vectors)
    memory.in_flight.add(len(piece.rows))
    yield from map(memory.booked, ready)
