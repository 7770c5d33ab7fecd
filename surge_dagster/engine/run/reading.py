"""The reader: from decisions to SuperBatches.

Rows that an earlier run staged have their vectors in the store and are read only to be checked.
Rows whose text the old file has take their vectors from there. All checks on the rows of a
partition as a whole are made here, and a partition is closed only after every one has passed. If it
is refused, what the SuperBatch being gathered holds of it is dropped.

Of a divided partition a range of rows is read, and staged. Once every row of it is staged, by
whichever runs, the run that finds this reads all rows: the checks on the partition as a whole are
made then.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.known_vectors import KnownVectors
from surge_dagster.engine.errors import DataError, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.run.aggregator import Aggregator
from surge_dagster.engine.run.failures import DroppedPartitions, failure_of
from surge_dagster.engine.run.observer import PublicationObserver
from surge_dagster.engine.run.previous_rows import (
    PreviousRows,
    is_truncation_certain,
    open_previous_rows,
)
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
    """Read what was decided to be read, in this order; receipts and failures pass.

    Args:
        decisions: see `deciding.decide`, which also lists what is raised.
        memory: books each SuperBatch; its receiver releases it.
    """
    aggregator = Aggregator(memory.bounds, memory.acquire, memory.reserve)
    reader = _RowReader(target, staging, memory, reuse, observer)
    divided: dict[str, PartitionToRead] = {}
    for decision in decisions:
        if isinstance(decision, Receipt):
            staging.remove(decision.key)
        if not isinstance(decision, PartitionToRead):
            yield decision
            continue
        if decision.range is not None:
            divided[decision.key] = replace(decision, range=None, reuse=False)
        yield from _gather(decision, reader, aggregator, dropped)
    yield from map(memory.booked, aggregator.finish())

    memory.in_flight.wait_until_none(memory.stop)  # until then ranges are not staged
    for partition in divided.values():
        yield from _gather(partition, reader, aggregator, dropped)
    yield from map(memory.booked, aggregator.finish())


def _gather(
    partition: PartitionToRead,
    reader: _RowReader,
    aggregator: Aggregator,
    dropped: DroppedPartitions,
) -> Iterator[SuperBatch | Failure]:
    """Gather the rows of a partition. What another stage has dropped is read no further."""
    memory = reader.memory
    read: ReadPartition | None = None
    failure: Failure | None = None
    aggregator.open(partition)
    try:
        with contextlib.closing(reader.pieces(partition)) as pieces:
            for piece in pieces:
                if partition in dropped:
                    break
                if isinstance(piece, ReadPartition):
                    read = piece
                elif piece.is_staged:
                    aggregator.skip(piece.rows)
                else:
                    ready = aggregator.add(piece.rows, piece.vectors)
                    memory.in_flight.add(len(piece.rows))
                    yield from map(memory.booked, ready)
    except StoreUnavailable:
        raise
    except (SurgeError, OSError) as error:
        failure = failure_of(partition.source, error)
        if not failure.transient:
            dropped.refuse(partition)
        elif isinstance(error, DataError):  # before other errors, what was read is staged
            dropped.add(partition)
    finally:
        if read is None:
            texts, size = aggregator.discard()
            memory.ledger.release(size)
            memory.in_flight.remove(texts)
    if read is not None:
        yield from map(memory.booked, aggregator.close(read))
    if failure is not None:
        yield failure


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive rows of a partition.

    Attributes:
        vectors: of those rows that have one already; None if none has.
        is_staged: whether an earlier run has staged them, so that they need no encoding.
    """

    rows: RowBatch
    vectors: KnownVectors | None = None
    is_staged: bool = False


@dataclass(frozen=True, slots=True)
class _RowReader:
    target: SpaceTarget
    staging: Staging
    memory: RunMemory
    reuse: ReuseCheck
    observer: PublicationObserver | None

    def pieces(self, partition: PartitionToRead) -> Generator[_Piece | ReadPartition]:
        """Yield all rows of a partition or a range, checked, and then what is known of it.

        Taking the next piece raises what is wrong with the partition.
        """
        with contextlib.ExitStack() as opened:
            staged = self._staged(partition)
            if staged is None:
                return
            opened.enter_context(self._without_wrong_rows(partition))
            previous = opened.enter_context(self._previous_rows(partition))
            rows = self.memory.batches(partition.source, partition.range)
            batches = opened.enter_context(contextlib.closing(rows))
            ids = opened.enter_context(_Ids(partition, self.memory, previous))
            check = StagedRowsCheck(staged, partition.first_row)
            content = _Content()
            for batch in batches:
                content.add(batch)
                ids.add(batch)
                yield from _with_vectors(batch, check, previous)
            check.finish()
            content.require_announced(partition)
            refuse_repeated_id(partition.source, ids.repeated())
            read = content.read(staged, previous)
        yield read  # after the memory of reading it was given back

    def _previous_rows(
        self, partition: PartitionToRead
    ) -> contextlib.AbstractContextManager[PreviousRows | None]:
        observer = self.observer if partition.range is None else None
        reuse = partition.reuse and partition.replaced is not None and self.reuse.allows_reuse()
        return open_previous_rows(
            partition,
            self.target,
            self.memory,
            observer,
            reuse=reuse,
            has_same_content=reuse and self._has_same_content(partition),
        )

    def _has_same_content(self, partition: PartitionToRead) -> bool:
        """Return whether a partition has the rows of its old file, if its texts do not say which
        of them were truncated: then it is read once more."""
        file = partition.replaced
        if file is None or partition.range is not None or is_truncation_certain(file.facts):
            return False
        digest = ContentDigest()
        with contextlib.closing(self.memory.batches(partition.source)) as batches:
            for batch in batches:
                digest.update(batch)
        return digest.hexdigest() == file.facts.content_digest

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
                f"partition {source.key!r}: {error}. What an earlier run staged of it was removed; "
                "run again.",
                source.key,
            ) from error

    def _staged(self, partition: PartitionToRead) -> list[StagedRows] | None:
        """Return rows that earlier runs staged and that can be used; None for a divided partition
        whose rows are not all staged."""
        source = partition.source
        if partition.is_divided and partition.range is None:
            with self.memory.held(self.memory.plan.reader):
                return self.staging.complete(source)
        if partition.reuse and self.staging.has(partition.key):
            with self.memory.held(self.memory.plan.reader):
                return self.staging.usable(source, partition.range)
        if partition.range is None:
            self.staging.remove(partition.key)
        elif not partition.reuse:
            self.staging.remove_range(source, partition.range)
        return []


def _with_vectors(
    batch: RowBatch, check: StagedRowsCheck, previous: PreviousRows | None
) -> Iterator[_Piece]:
    """Yield the next rows of a partition in pieces, with the vectors that they have already."""
    row = check.row
    for rows, is_staged in check.cut(batch):
        if is_staged and previous is not None:
            previous.skip(rows, row)
        if is_staged or previous is None:
            yield _Piece(rows, is_staged=is_staged)
        else:
            for piece, vectors in previous.known(rows, row):
                yield _Piece(piece, vectors)
        row += len(rows)


class _Content:
    """What is known of the rows of a partition, or a range, as they come."""

    def __init__(self) -> None:
        self._rows = 0
        self._digest = ContentDigest()
        self._missing = MissingTexts()
        self._id_type: pa.DataType = pa.string()
        self._carried_columns: pa.Schema | None = None

    def add(self, batch: RowBatch) -> None:
        self._rows += len(batch)
        self._digest.update(batch)
        self._missing = self._missing.plus(batch)
        self._id_type = batch.ids.type
        if batch.carried is not None:
            self._carried_columns = batch.carried.schema

    def require_announced(self, partition: PartitionToRead) -> None:
        """Raise `TransientError` if other than the announced rows came."""
        within = partition.range
        announced = partition.source.rows if within is None else within.stop - within.start
        read_rows = self._rows + self._missing.skipped_rows
        if announced not in (None, read_rows):
            raise TransientError(
                f"{within or f'partition {partition.key!r}'}: {announced:,} rows were announced "
                f"and {read_rows:,} came. Its source changed while it was read; run again.",
                partition.key,
            )

    def read(self, staged: Sequence[StagedRows], previous: PreviousRows | None) -> ReadPartition:
        return ReadPartition(
            self._rows,
            self._digest.hexdigest(),
            self._id_type,
            self._missing,
            tuple(staged),
            previous.changes() if previous is not None else None,
            self._carried_columns,
        )


class _Ids(contextlib.AbstractContextManager["_Ids"]):
    """Finds a repeated id of a partition; its memory is booked until the block ends."""

    def __init__(
        self, partition: PartitionToRead, memory: RunMemory, previous: PreviousRows | None
    ) -> None:
        self._source = partition.source
        self._memory = memory
        self._previous = previous
        pages = max(0, partition.source.page_bytes - memory.plan.reader_pages)
        self._available = memory.plan.source - pages
        self._ids = IdSet()
        if partition.range is not None:  # at last they are compared with all others
            self._require_room(partition.source.rows or 0)

    def add(self, batch: RowBatch) -> None:
        """Take the next rows; the old file gives up its memory if they need it."""
        needed = self._ids.bytes_after(len(batch))
        if self._previous is not None and needed + self._previous.held > self._available:
            self._previous.give_up()
        self._require_room(len(batch))
        self._memory.reserve(needed - self._ids.bytes)
        self._ids.add(batch.ids)

    def _require_room(self, rows: int) -> None:
        needed = self._ids.bytes_after(rows)
        if needed > self._available:
            raise DataError(
                self._source.key,
                f"finding repeated ids takes {needed:,} bytes and {self._available:,} are set "
                "aside",
                "Raise the memory limit, or split the partition in the source.",
            )

    def repeated(self) -> np.ndarray:
        return self._ids.repeated()

    def __exit__(self, *error: object) -> None:
        self._memory.ledger.release(self._ids.bytes)
