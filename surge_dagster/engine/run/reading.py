"""The reader: from decisions to SuperBatches.

Rows that an earlier run staged have their vectors in the store and are read only to be checked.
Rows whose text the old file has take their vectors from there. All checks on the rows of a
partition as a whole are made here, and a partition is closed only after every one has passed. If it
is refused, what the SuperBatch being gathered holds of it is dropped.

Of a divided partition a range of rows is read, and staged. Once every row of it is staged, by
whichever runs, the run that finds this reads all rows: the checks on the partition as a whole are
made then.

Staged rows are read too, and are compared by a digest. If the source has others now, what is staged
of the partition is removed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.arena import KnownVectors
from surge_dagster.engine.errors import DataError, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.output.ended_workers import EndedWorkers
from surge_dagster.engine.output.rejected import RejectedRowsBuilder
from surge_dagster.engine.run.aggregator import Aggregator
from surge_dagster.engine.run.old_rows import OldRows, ReuseCheck, open_old_rows
from surge_dagster.engine.run.read_again import ReadAgain
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.staging import Staging
from surge_dagster.engine.run.superbatch import (
    PartitionToRead,
    ReadPartition,
    SpaceTarget,
    StagedRows,
    SuperBatch,
)
from surge_dagster.engine.sources.casting import is_blank
from surge_dagster.engine.sources.partition import (
    ContentDigest,
    IdSet,
    RowBatch,
    refuse_repeated_id,
)


class StagedRowsCheck:
    """Cuts the rows of a partition where its staged rows begin and end, and compares their digests.

    Args:
        staged: ascending, none empty, no two overlapping.
        row: the first row that is read; no staged row is before it.

    Attributes:
        row: the first row after the last piece.
    """

    def __init__(
        self, staging: Staging, key: str, staged: Sequence[StagedRows], row: int = 0
    ) -> None:
        self._staging = staging
        self._key = key
        self.row = row
        self._coming = deque(staged)
        self._digest = ContentDigest()

    def cut(self, batch: RowBatch) -> Iterator[tuple[RowBatch, StagedRows | None]]:
        """Yield the next rows in order, in pieces, each with the staged rows that it is part of.

        Raises:
            TransientError: staged rows ended here and were not these.
        """
        done = 0
        while done < len(batch):
            staged = self._coming[0] if self._coming else None
            is_staged = staged is not None and staged.start <= self.row
            stop = len(batch)
            if staged is not None:
                border = staged.stop if is_staged else staged.start
                stop = min(stop, done + border - self.row)
            piece = batch if stop - done == len(batch) else batch.rows(done, stop)
            self.row += len(piece)
            done = stop
            if staged is not None and is_staged:
                self._digest.update(piece)
                if self.row == staged.stop:
                    self._end(staged)
            yield piece, staged if is_staged else None

    def _end(self, staged: StagedRows) -> None:
        if self._digest.hexdigest() != staged.digest:
            rows = f"{staged.start:,} to {staged.stop:,}"
            self._refuse(f"its rows {rows} are not those that were staged")
        self._coming.popleft()
        self._digest = ContentDigest()

    def finish(self) -> None:
        """Check the end of the partition; raises `TransientError` if it ends before its staged rows
        do."""
        if self._coming:
            last = self._coming[-1].stop
            self._refuse(f"it has {self.row:,} rows, and {last:,} were there when it was staged")

    def _refuse(self, reason: str) -> None:
        self._staging.remove(self._key)
        raise TransientError(
            f"partition {self._key!r}: {reason}. What an earlier run staged of it is removed; run "
            "again.",
            self._key,
        )


def superbatches(
    decisions: Iterable[Receipt | Failure | PartitionToRead],
    target: SpaceTarget,
    staging: Staging,
    memory: RunMemory,
    dropped: set[PartitionToRead],
    reuse_check: ReuseCheck,
    read_again: ReadAgain | None = None,
    *,
    records_changes: bool = False,
) -> Generator[SuperBatch | Receipt | Failure]:
    """Read what was decided to be read, in this order; receipts and failures pass.

    Args:
        decisions: see `deciding.decide`, which also lists what is raised.
        read_again: partitions that the publisher wants once more, without some of their rows; None
            if it wants none.
        records_changes: whether rows are compared with those of old files.
        memory: books each SuperBatch; its receiver releases it.
    """
    aggregator = Aggregator(memory.bounds, memory.acquire, memory.reserve)
    reader = _RowReader(target, staging, memory, reuse_check, records_changes)
    gatherer = _Gatherer(reader, aggregator, dropped)
    divided: dict[str, PartitionToRead] = {}
    for decision in decisions:
        if isinstance(decision, Receipt):
            staging.remove(decision.key)
        if not isinstance(decision, PartitionToRead):
            yield decision
            continue
        if not decision.reuse:
            staging.remove(decision.key)
        if decision.range is not None:
            divided[decision.key] = replace(decision, range=None, must_be_staged=True)
        elif read_again is not None:
            left_out = staging.left_out(decision.source)
            decision = read_again.without_known(decision, left_out)
        yield from gatherer.rows_of(decision)
    yield from gatherer.last()

    memory.in_flight.wait_until_none(memory.stop)  # until then ranges are not staged
    yield from gatherer.rows_of_all(divided.values())
    if read_again is not None:
        yield from gatherer.rows_again(read_again)


@dataclass(frozen=True, slots=True)
class _Gatherer:
    """Gathers the rows of partitions into SuperBatches; what another stage has dropped is read no
    further."""

    reader: _RowReader
    aggregator: Aggregator
    dropped: set[PartitionToRead]

    def rows_again(self, read_again: ReadAgain) -> Iterator[SuperBatch | Failure]:
        """Gather partitions that the publisher wants once more, until it wants none."""
        memory = self.reader.memory
        memory.in_flight.wait_until_none(memory.stop)
        while again := read_again.take():
            for partition, first_row in again:
                # rows behind those that are left out have moved
                self.reader.staging.remove_from(partition.source, first_row)
            yield from self.rows_of_all(partition for partition, _ in again)
            memory.in_flight.wait_until_none(memory.stop)

    def rows_of_all(self, partitions: Iterable[PartitionToRead]) -> Iterator[SuperBatch | Failure]:
        """Gather the rows of partitions, and emit the last SuperBatch of them."""
        for partition in partitions:
            yield from self.rows_of(partition)
        yield from self.last()

    def last(self) -> Iterator[SuperBatch]:
        """Emit what is gathered."""
        return map(self.reader.memory.booked, self.aggregator.finish())

    def rows_of(self, partition: PartitionToRead) -> Iterator[SuperBatch | Failure]:
        """Gather the rows of a partition."""
        memory = self.reader.memory
        aggregator = self.aggregator
        read: ReadPartition | None = None
        failure: Failure | None = None
        aggregator.open(partition)
        try:
            with contextlib.closing(self.reader.pieces(partition)) as pieces:
                for piece in pieces:
                    if partition in self.dropped:
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
            failure = partition.failure(error)
            if isinstance(error, DataError):  # before other errors, what was read is staged
                self.dropped.add(partition)
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
    reuse_check: ReuseCheck
    records_changes: bool

    def pieces(self, partition: PartitionToRead) -> Generator[_Piece | ReadPartition]:
        """Yield all rows of a partition or a range, checked, and then what is known of it.

        Taking the next piece raises what is wrong with the partition.
        """
        staged = self._staged(partition)
        if staged is None:
            return
        rows = self.memory.batches(partition.source, partition.range)
        with (
            self._old_rows(partition, staged) as old_rows,
            contextlib.closing(rows) as batches,
            _Ids(partition, self.memory, old_rows) as ids,
        ):
            check = StagedRowsCheck(self.staging, partition.key, staged, partition.first_row)
            content = _Content()
            for batch in batches:
                batch = content.add(batch, partition.ended_workers)
                ids.add(batch)
                yield from _with_vectors(batch, check, old_rows)
            check.finish()
            content.require_announced(partition)
            refuse_repeated_id(partition.source, ids.repeated())
            read = content.read(staged, old_rows)
        yield read  # after the memory of reading it was given back

    def _old_rows(
        self, partition: PartitionToRead, staged: Sequence[StagedRows]
    ) -> contextlib.AbstractContextManager[OldRows | None]:
        can_reuse = partition.reuse and partition.old_file is not None
        takes_vectors = (
            can_reuse and not partition.must_be_staged and self.reuse_check.allows_reuse()
        )
        return open_old_rows(
            partition,
            self.target,
            self.memory,
            is_compared=self.records_changes and partition.range is None,
            takes_vectors=takes_vectors,
            reused_rows=partial(self.staging.reused_rows, partition.source) if staged else None,
        )

    def _staged(self, partition: PartitionToRead) -> list[StagedRows] | None:
        """Return rows that are staged and can be used; None if not all are that must be."""
        source = partition.source
        staged: list[StagedRows] = []
        if self.staging.has(partition.key):
            with self.memory.held(self.memory.plan.reader):
                staged = self.staging.find(source, partition.range)
        if partition.must_be_staged and sum(rows.rows for rows in staged) != source.rows:
            return None
        return staged


def _with_vectors(
    batch: RowBatch, check: StagedRowsCheck, old_rows: OldRows | None
) -> Iterator[_Piece]:
    """Yield the next rows of a partition in pieces, with the vectors that they have already."""
    for rows, staged in check.cut(batch):
        if staged is not None and old_rows is not None:
            old_rows.skip(rows, staged, check.row - len(rows) - staged.start)
        if staged is not None or old_rows is None:
            yield _Piece(rows, is_staged=staged is not None)
        else:
            for piece, vectors in old_rows.pieces(rows):
                yield _Piece(piece, vectors)


class _Content:
    """What is known of the rows of a partition, or a range, as they come."""

    def __init__(self) -> None:
        self._rows = 0
        self._source_rows = 0
        self._digest = ContentDigest()
        self._skipped_rows = 0
        self._blank_texts = 0
        self._rejected = RejectedRowsBuilder()
        self._id_type: pa.DataType = pa.string()
        self._carried_columns: pa.Schema | None = None

    def add(self, batch: RowBatch, ended_workers: EndedWorkers) -> RowBatch:
        """Add the next rows; return them without those that are left out."""
        first_row = self._source_rows
        self._source_rows += batch.source_rows + batch.skipped + len(batch.rejected)
        batch, left_out = ended_workers.split(batch, first_row)
        self._rejected.add([*left_out, *batch.rejected])
        self._rows += len(batch)
        self._digest.update(batch)
        self._skipped_rows += batch.skipped
        self._blank_texts += int(np.count_nonzero(is_blank(batch.texts)))
        self._id_type = batch.ids.type
        if batch.carried is not None:
            self._carried_columns = batch.carried.schema
        return batch

    def require_announced(self, partition: PartitionToRead) -> None:
        """Raise `TransientError` if other than the announced rows came."""
        within = partition.range
        announced = partition.source.source_rows
        if within is not None:
            announced = within.stop - within.start
        if announced not in (None, self._source_rows):
            raise TransientError(
                f"{within or f'partition {partition.key!r}'}: {announced:,} rows were announced "
                f"and {self._source_rows:,} came. Its source changed while it was read; run again.",
                partition.key,
            )

    def read(self, staged: Sequence[StagedRows], old_rows: OldRows | None) -> ReadPartition:
        return ReadPartition(
            self._rows,
            self._digest.hexdigest(),
            self._id_type,
            self._source_rows,
            self._skipped_rows,
            self._blank_texts,
            self._rejected.rejected(),
            tuple(staged),
            old_rows.changes() if old_rows is not None else None,
            self._carried_columns,
        )


class _Ids(contextlib.AbstractContextManager["_Ids"]):
    """Finds a repeated id of a partition; its memory is booked until the block ends."""

    def __init__(
        self, partition: PartitionToRead, memory: RunMemory, old_rows: OldRows | None
    ) -> None:
        self._source = partition.source
        self._memory = memory
        self._available = memory.source_bytes(partition.source)
        if old_rows is not None:
            self._available -= old_rows.held
        self._ids = IdSet()
        self._rows = 0
        if partition.range is not None:  # at last they are compared with all others
            self._require_room(partition.source.rows or 0)

    def add(self, batch: RowBatch) -> None:
        """Take the next rows; raises `DataError` if they take too much memory."""
        self._require_room(len(batch))
        self._memory.reserve(self._source.bytes_of_ids(len(batch)))
        self._rows += len(batch)
        if not self._source.id_bytes:
            self._ids.add(batch.ids)

    def _require_room(self, rows: int) -> None:
        needed = self._source.bytes_of_ids(self._rows + rows)
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
        self._memory.ledger.release(self._source.bytes_of_ids(self._rows))
