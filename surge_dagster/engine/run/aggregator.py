"""The aggregator: gathers whole partitions into SuperBatches between two thresholds.

How many rows a partition has is unknown while it streams in, so the rule looks at what is held.
Closed partitions are *pending*; the one being read is *current*. When pending and current together
would exceed B_max, pending is flushed and current moves to an empty slot. When only current would
exceed B_max it is oversized: what is held of it is emitted as a segment, and so on until its tail,
which is batched with what follows. At a partition's end, pending texts at or past B_min are
flushed. So a partition that fits is never split, and no SuperBatch ever holds more than B_max.

Rows that an earlier run staged are skipped (`skip`): the rows on either side are segments of their
own. Rows that take their vectors from the partition's old file lie in the slot like all others and
are not encoded: B_min counts the rows to encode, B_max all rows. If little is encoded, a SuperBatch
is flushed when it is full. The first ones, whose B_min is a part of the later one, are flushed when
they have that part of B_max.

Both thresholds exist in texts and in bytes. SURGE (section 3.2 and lemma 3) counts only texts,
which bounds no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.arena import KnownVectors, Slot
from surge_dagster.engine.errors import DataError
from surge_dagster.engine.run.superbatch import (
    PartitionToRead,
    ReadPartition,
    Segment,
    SuperBatch,
    row_bytes,
)
from surge_dagster.engine.run.thresholds import PARTITION_OVERHEAD_BYTES, Bounds
from surge_dagster.engine.sources.partition import RowBatch


@dataclass(slots=True)
class _Held:
    """Rows of one partition in the slot being filled."""

    partition: PartitionToRead
    start: int
    first_row: int
    bytes: int = PARTITION_OVERHEAD_BYTES  # counted once per partition, with its first rows
    vector_bytes: int = 0  # of rows that have vectors already
    rows: int = 0
    new_rows: int = 0  # rows to encode
    ids: list[pa.Array] = field(default_factory=list)
    carried: list[pa.RecordBatch] = field(default_factory=list)
    read: ReadPartition | None = None

    def segment(self) -> Segment:
        return Segment(
            self.partition,
            self.start,
            self.start + self.rows,
            self.first_row,
            tuple(self.ids),
            self.read,
            tuple(self.carried),
        )


@dataclass(slots=True)
class _Pending:
    """Closed partitions in the slot being filled, and their sums."""

    held: list[_Held] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    vector_bytes: int = 0
    new_rows: int = 0
    new_bytes: int = 0  # of rows to encode: their part of the bytes

    def add(self, held: _Held) -> None:
        self.held.append(held)
        self.rows += held.rows
        self.bytes += held.bytes
        self.vector_bytes += held.vector_bytes
        self.new_rows += held.new_rows
        if held.rows:
            self.new_bytes += held.bytes * held.new_rows // held.rows
        else:
            self.new_bytes += held.bytes


class Aggregator:
    """Gathers a stream of partitions into SuperBatches.

    Args:
        acquire: gives an empty slot for B_max texts of B_max bytes; it may wait until one is free.
        reserve: books bytes before they are held; it may wait until there is room. The receiver of
            a SuperBatch releases its `held_bytes`, the caller of `discard` the bytes that it
            returns.

    Call `open`, then `add` (or `skip`) for each row batch, then `close` (or `discard` when the
    partition is refused), and `finish` after the last partition. `add`, `close` and `finish` are
    generators of the SuperBatches that became ready; each must be run to its end. A SuperBatch's
    slot belongs to its receiver.
    """

    def __init__(
        self,
        bounds: Bounds,
        acquire: Callable[[], Slot],
        reserve: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._bounds = bounds
        self._acquire = acquire
        self._reserve = reserve
        self._slot: Slot | None = None
        self._pending = _Pending()
        self._current: _Held | None = None
        self._emitted = 0

    @property
    def held_texts(self) -> int:
        return self._pending.rows + (self._current.rows if self._current else 0)

    @property
    def held_bytes(self) -> int:
        """Bytes of ids, texts and overhead in the slot being filled."""
        return self._pending.bytes + (self._current.bytes if self._current else 0)

    def open(self, partition: PartitionToRead) -> None:
        """Begin a partition; the one before must be closed or discarded."""
        assert self._current is None
        self._reserve(PARTITION_OVERHEAD_BYTES)
        self._current = _Held(partition, start=self._pending.rows, first_row=partition.first_row)

    def add(self, batch: RowBatch, known: KnownVectors | None = None) -> Iterator[SuperBatch]:
        """Take the next rows of the open partition.

        Args:
            known: vectors that some of them have already.

        Raises:
            DataError: a single row is larger than B_max in bytes; raised by the call, before any
                row was taken.
        """
        current = self._require_open()
        limit = self._bounds.b_max_bytes
        if batch.value_bytes > limit - PARTITION_OVERHEAD_BYTES:
            sizes = row_bytes(batch)
            largest = int(sizes.max())
            if largest > limit - PARTITION_OVERHEAD_BYTES:
                raise DataError(
                    current.partition.key,
                    f"the row has {largest:,} bytes and a SuperBatch holds at most {limit:,}",
                    f"Shorten its values, or raise max_text_bytes to {largest:,}.",
                    current.first_row + current.rows + int(sizes.argmax()),
                )
        return self._take(batch, known) if len(batch) else iter(())

    def _take(self, batch: RowBatch, known: KnownVectors | None) -> Iterator[SuperBatch]:
        bounds = self._bounds
        has_room = batch.value_bytes <= bounds.b_max_bytes - self.held_bytes
        if has_room and len(batch) <= bounds.b_max - self.held_texts:
            self._append(batch, known, batch.value_bytes)
            return

        ends = np.cumsum(row_bytes(batch))
        done = 0
        while done < len(batch):
            before = int(ends[done - 1]) if done else 0
            room = bounds.b_max_bytes - self.held_bytes
            fitting = int(np.searchsorted(ends, before + room, side="right")) - done
            rows = min(fitting, bounds.b_max - self.held_texts, len(batch) - done)
            if rows > 0:
                stop = done + rows
                part = None if known is None else known.between(done, stop)
                self._append(batch.rows(done, stop), part, int(ends[stop - 1]) - before)
                done = stop
            elif self._pending.held:
                yield self._flush_pending()
            else:
                yield self._emit_segment()

    def skip(self, batch: RowBatch) -> None:
        """Skip the next rows of the open partition: they need no encoding."""
        current = self._require_open()
        first_row = current.first_row + current.rows + len(batch)
        if current.rows:
            self._pending.add(current)
            self._current = _Held(
                current.partition, start=self._pending.rows, first_row=first_row, bytes=0
            )
        else:
            current.first_row = first_row

    def close(self, read: ReadPartition) -> Iterator[SuperBatch]:
        current = self._require_open()
        bounds = self._bounds
        size = read.rejected.table.nbytes
        if self._pending.held and self.held_bytes + size > bounds.b_max_bytes:
            # the overhead of an empty partition did not fit, or a list of rejected rows
            yield self._flush_pending()
        if size:
            self._reserve(size)
            current.bytes += size
        current.read = read
        self._current = None
        pending = self._pending
        pending.add(current)
        b_min = bounds.b_min_of(self._emitted)
        is_enough = pending.new_rows >= b_min or pending.new_bytes >= bounds.b_min_bytes
        if is_enough or pending.rows >= max(1, bounds.b_max * b_min // bounds.b_min):
            yield self._flush_pending()

    def discard(self) -> tuple[int, int]:
        """Drop the rows of the open partition that were gathered last; its earlier segments are
        still emitted. Return the texts and bytes, also of vectors, that are no longer held."""
        current = self._require_open()
        self._current = None
        if self._slot is not None and current.rows:
            self._slot.truncate(current.start)
        return current.rows, current.bytes + current.vector_bytes

    def finish(self) -> Iterator[SuperBatch]:
        if self._pending.held:
            yield self._flush_pending()

    def _require_open(self) -> _Held:
        assert self._current is not None, "no partition is open"
        return self._current

    def _append(self, batch: RowBatch, known: KnownVectors | None, size: int) -> None:
        # Only what fits is booked: a reader that waited while it holds more than a SuperBatch could
        # wait for itself. Known vectors are a part of the SuperBatch's result, which is booked when
        # it is flushed.
        current = self._require_open()
        rows = len(batch)
        vector_bytes = 0 if known is None else known.matrix.nbytes
        if self._slot is None:
            self._slot = self._acquire()
        self._reserve(size + vector_bytes)
        self._slot.append(batch.texts, (batch.text_offsets, batch.text_values), known)
        current.ids.append(batch.ids)
        if batch.carried is not None:
            current.carried.append(batch.carried)
        current.rows += rows
        current.new_rows += rows if known is None else rows - len(known)
        current.bytes += size
        current.vector_bytes += vector_bytes

    def _flush_pending(self) -> SuperBatch:
        pending = self._pending
        self._pending = _Pending()
        full = self._acquire() if self._slot is None else self._slot
        self._slot = None
        current = self._current
        size = pending.bytes
        if current is not None:
            if current.rows:
                # the tail lies in both slots until the full one is released
                self._reserve(current.bytes)
                size += current.bytes
                self._slot = self._acquire()
                full.move_tail(current.start, self._slot)
            current.start = 0
        return self._emit(full, pending.held, size, pending.vector_bytes)

    def _emit_segment(self) -> SuperBatch:
        current = self._require_open()
        full = self._slot
        assert full is not None
        self._slot = None
        self._current = _Held(
            current.partition, start=0, first_row=current.first_row + current.rows, bytes=0
        )
        return self._emit(full, [current], current.bytes, current.vector_bytes)

    def _emit(self, slot: Slot, held: list[_Held], size: int, vector_bytes: int) -> SuperBatch:
        segments = tuple(each.segment() for each in held)
        batch = SuperBatch(self._emitted, slot, segments, size, vector_bytes)
        self._emitted += 1
        return batch
