"""SuperBatches: the texts of one encode call, gathered from whole partitions between two thresholds.

How many rows a partition has is unknown while it streams in, so the rule looks at what is held. Closed partitions are
*pending*; the one being read is *current*. When pending and current together would exceed B_max, pending is flushed and
current moves to an empty slot. When current alone would exceed B_max it is oversized: what is held of it is emitted as
a segment, and so on until its tail, which is batched with what follows. At a partition's end, pending texts at or past
B_min are flushed. So a partition that fits is never split, and no SuperBatch ever holds more than B_max.

Rows that an earlier run staged are skipped (`skip`): the rows on either side are segments of their own. Rows that take
their vectors from the partition's old file lie in the slot like all others and are not encoded: B_min counts the rows
to encode, B_max all rows. Where little is encoded a SuperBatch is flushed when it is full, and the first ones, whose
B_min is a part of the later one, when they have that part of B_max.

Both thresholds exist in texts and in bytes. SURGE (section 3.2 and lemma 3) counts texts alone, which bounds no memory
when texts are long, and gathers a partition whole before it is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.calls import EncodeMetrics
from surge_dagster.engine.encoder.known_vectors import KnownVectors
from surge_dagster.engine.errors import DataError
from surge_dagster.engine.files.facts import VectorFacts
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.sources.rows import is_blank
from surge_dagster.engine.store.store import StoredObject
from surge_dagster.engine.support.timeline import Span
from surge_dagster.engine.thresholds import PARTITION_OVERHEAD_BYTES, Bounds


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Rows start..stop of one partition, with their vectors, in an object of their own.

    Attributes:
        digest: content digest over the (id, text) rows.
        vectors: where their vectors come from.
    """

    start: int
    stop: int
    digest: str
    vectors: VectorFacts


@dataclass(slots=True)
class MissingTexts:
    """Counts of a partition that is read.

    Attributes:
        skipped_rows: rows of the source that were left out.
        blank_texts: texts that are empty or nothing but white space.
    """

    skipped_rows: int = 0
    blank_texts: int = 0

    def count(self, batch: RowBatch) -> None:
        """Add the next rows."""
        self.skipped_rows += batch.skipped
        self.blank_texts += int(np.count_nonzero(is_blank(batch.texts)))


UNCHANGED, ADDED, CHANGED = 0, 1, 2  # the operations of `RowChanges`


@dataclass(frozen=True, slots=True)
class RowChanges:
    """How a partition's rows differ from those of the file that it replaces, compared by id.

    Attributes:
        operations: one per row, in the partition's order, int8 [rows]: UNCHANGED where the old file has the id with the
            same text, the same carried columns and the same vector, bit for bit; ADDED where it does not have the id;
            CHANGED otherwise.
        deleted: ids of the old file that the partition no longer has, in the old file's order; of the old file's id
            type.
        previous_rows_version: of the old file.
    """

    operations: np.ndarray
    deleted: pa.Array
    previous_rows_version: str


@dataclass(slots=True, eq=False)
class OpenPartition:
    """A partition on its way through a run; written by the reader alone until it is closed.

    Attributes:
        source: the partition as it was listed.
        rows: rows read so far, those included that need no encoding.
        missing: of the source's rows, how many were left out, and how many have a blank text.
        staged: rows that are staged, in any order; those of an earlier run were skipped by the reader.
        reused_texts: how many of them an earlier run had staged.
        content_digest: known once the last row was read and every check on the rows has passed.
        refused: set when the partition failed; other stages drop what they hold of it.
        previous: the old file as it was listed, None where there was none.
        previous_encoded_at: its `oldest_encoded_at`.
        cosines: of new vectors to those of the old file, as far as they were compared.
        distrusted: set when vectors of the old file turned out to be wrong, so that none of them is used from then on.
        kept: set when rows of it that are not all of it got their final vectors from the old file or in an earlier run.
        superbatch, texts_per_second: of the SuperBatch in which it ends, once that was written.
        changes: since the old file, known with the content digest and final when the partition's last segment was
            encoded; None where no change feed is wanted, where there is no old file with a `rows_version`, or where it
            could not be compared (damaged, ids of another type, no memory): consumers then need a snapshot.
        carried_columns: those that travel with its rows, known with the first of them; None where there are none.
    """

    source: Partition
    rows: int = 0
    missing: MissingTexts = field(default_factory=MissingTexts)
    staged: list[StagedRows] = field(default_factory=list)
    reused_texts: int = 0
    id_type: pa.DataType | None = None
    content_digest: str | None = None
    refused: bool = False
    previous: StoredObject | None = None
    previous_encoded_at: str = ""
    cosines: list[float] = field(default_factory=list)
    distrusted: bool = False
    kept: bool = False
    superbatch: int | None = None
    texts_per_second: float | None = None
    changes: RowChanges | None = None
    carried_columns: pa.Schema | None = None

    @property
    def key(self) -> str:
        return self.source.key

    @property
    def is_mixed(self) -> bool:
        """Whether vectors were kept before those of the old file turned out to be wrong."""
        return self.distrusted and self.kept

    @property
    def is_complete(self) -> bool:
        """Whether all rows of a split partition are staged."""
        return self.superbatch is not None and sum(rows.stop - rows.start for rows in self.staged) == self.rows


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one partition within one SuperBatch.

    Attributes:
        start, stop: the rows' places in the SuperBatch.
        first_row: the place of the first one in its partition.
        ids: the rows' ids, in order.
        last: whether the partition ends here; such a segment is empty where the partition's last rows were skipped.
        carried: the columns that travel with the rows, in the pieces of the ids; () without them.
    """

    partition: OpenPartition
    start: int
    stop: int
    first_row: int
    ids: tuple[pa.Array, ...]
    last: bool
    carried: tuple[pa.RecordBatch, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it holds all of its partition."""
        return self.first_row == 0 and self.last

    def vector_facts(self, slot: Slot, now: str) -> VectorFacts:
        """Where its vectors come from, once the slot was encoded; `now` is the time in the form of the facts."""
        rows, reused = self.stop - self.start, slot.reused(self.start, self.stop)
        truncated, lengths = slot.truncation(self.start, self.stop), slot.lengths(self.start, self.stop)
        count = int(np.count_nonzero(truncated))
        return VectorFacts(
            truncated=count,
            rows_reused=reused,
            rows_encoded=rows - reused,
            oldest_encoded_at=min(now, self.partition.previous_encoded_at) if reused else now,
            longest_whole_bytes=int(lengths.max(initial=0, where=~truncated)),
            shortest_truncated_bytes=int(lengths[truncated].min()) if count else 0,
        )


@dataclass(frozen=True, slots=True)
class SuperBatch:
    """The texts of one encode call, and how to slice the result back into partitions.

    Attributes:
        slot: holds the texts, and the embeddings once they are encoded.
        segments: cover the slot's rows without gap, in order.
        held_bytes: booked until it is released: ids, texts and overhead, and texts that moved on to the next slot but
            still lie in this one.
        vector_bytes: booked beside these: vectors that rows had from the start, then all that encoding and writing it
            take.
        read_seconds: see `SuperBatchReport`.
    """

    index: int
    slot: Slot
    segments: tuple[Segment, ...]
    held_bytes: int
    vector_bytes: int = 0
    read_seconds: float = 0.0

    @property
    def texts(self) -> int:
        return len(self.slot)


@dataclass(frozen=True, slots=True)
class EncodedSuperBatch:
    """A SuperBatch whose vectors lie in its slot, and what the encode call cost.

    Attributes:
        duty_cycle, pace_ratio, encode_span: see `SuperBatchReport`.
        deduplicated: texts that got the vector of an equal text of the same SuperBatch.
    """

    batch: SuperBatch
    metrics: EncodeMetrics
    duty_cycle: float = 1.0
    pace_ratio: float | None = None
    encode_span: Span | None = None
    deduplicated: int = 0

    @property
    def published_texts(self) -> int:
        """Texts of its segments: all of the slot, unless the run was stopped during the call."""
        return sum(segment.stop - segment.start for segment in self.batch.segments)

    @property
    def rows_reused(self) -> int:
        """Texts of its segments that kept their old vectors; known until the slot is released."""
        return sum(self.batch.slot.reused(segment.start, segment.stop) for segment in self.batch.segments)

    @property
    def texts_per_second(self) -> float | None:
        """Of the encode call: texts that have new vectors now, over its seconds; known until the slot is released."""
        seconds, slot = self.metrics.encode_seconds, self.batch.slot
        return (len(slot) - slot.reused(0, len(slot))) / seconds if seconds > 0 else None


@dataclass(slots=True)
class _Held:
    """Rows of one partition in the slot being filled."""

    partition: OpenPartition
    start: int
    first_row: int
    bytes: int = PARTITION_OVERHEAD_BYTES  # counted once per partition, with its first rows
    vector_bytes: int = 0  # of rows that have vectors already
    rows: int = 0
    new_rows: int = 0  # rows to encode
    ids: list[pa.Array] = field(default_factory=list)
    carried: list[pa.RecordBatch] = field(default_factory=list)
    last: bool = False

    @property
    def new_bytes(self) -> int:
        """What the thresholds count of rows to encode: their part of the bytes."""
        return self.bytes * self.new_rows // self.rows if self.rows else self.bytes

    def segment(self) -> Segment:
        ids, carried = tuple(self.ids), tuple(self.carried)
        return Segment(self.partition, self.start, self.start + self.rows, self.first_row, ids, self.last, carried)


class Aggregator:
    """Gathers a stream of partitions into SuperBatches.

    Args:
        bounds: the thresholds.
        acquire: gives an empty slot for B_max texts of B_max bytes; it may wait until one is free.
        reserve: books bytes before they are held; it may wait until there is room. The receiver of a SuperBatch
            releases its `held_bytes`, the caller of `discard` the bytes that it returns.

    Call `open`, then `add` (or `skip`) for each row batch, then `close` (or `discard` when the partition is refused),
    and `finish` after the last partition. `add`, `close` and `finish` are generators of the SuperBatches that became
    ready; each must be run to its end. A SuperBatch's slot belongs to its receiver.
    """

    def __init__(
        self, bounds: Bounds, acquire: Callable[[], Slot], reserve: Callable[[int], None] = lambda size: None
    ) -> None:
        self.bounds = bounds
        self._acquire = acquire
        self._reserve = reserve
        self._slot: Slot | None = None
        self._pending: list[_Held] = []
        self._pending_texts = 0
        self._pending_bytes = 0
        self._pending_new = (0, 0)  # rows to encode and their bytes
        self._current: _Held | None = None
        self._emitted = 0
        self._set_thresholds()

    @property
    def held_texts(self) -> int:
        """Texts in the slot being filled."""
        return self._pending_texts + (self._current.rows if self._current else 0)

    @property
    def held_bytes(self) -> int:
        """Bytes of ids, texts and overhead in the slot being filled."""
        return self._pending_bytes + (self._current.bytes if self._current else 0)

    @property
    def held_vector_bytes(self) -> int:
        """Bytes of the vectors that rows in the slot being filled have already."""
        held = [*self._pending, self._current] if self._current else self._pending
        return sum(one.vector_bytes for one in held)

    def open(self, partition: OpenPartition) -> None:
        """Begin a partition; the one before must be closed or discarded."""
        if self._current is not None:
            raise RuntimeError(f"partition {self._current.partition.key!r} is still open")
        self._reserve(PARTITION_OVERHEAD_BYTES)
        self._current = _Held(partition, start=self._pending_texts, first_row=0)

    def add(self, batch: RowBatch, known: KnownVectors | None = None) -> Iterator[SuperBatch]:
        """Take the next rows of the open partition.

        Args:
            known: vectors that some of them have already.

        Raises:
            DataError: a single row is larger than B_max in bytes; raised by the call, before any row was taken.
        """
        current = self._require_open()
        ids = batch.ids
        _know_columns(current.partition, batch)
        if not len(ids):
            return iter(())
        if batch.value_bytes + PARTITION_OVERHEAD_BYTES > self.bounds.b_max_bytes:
            costs = row_bytes(batch)
            largest = int(costs.max())
            if largest + PARTITION_OVERHEAD_BYTES > self.bounds.b_max_bytes:
                raise DataError(
                    current.partition.key,
                    f"the row has {largest:,} bytes and a SuperBatch holds at most {self.bounds.b_max_bytes:,}",
                    f"Shorten its values, or raise max_text_bytes to {largest:,}.",
                    current.partition.rows + int(costs.argmax()),
                )
        return self._take(current, batch, known)

    def _take(self, current: _Held, batch: RowBatch, known: KnownVectors | None) -> Iterator[SuperBatch]:
        size = batch.value_bytes
        held_bytes, held_texts = self._pending_bytes + current.bytes, self._pending_texts + current.rows
        if size <= self.bounds.b_max_bytes - held_bytes and len(batch.ids) <= self.bounds.b_max - held_texts:
            self._append(current, batch, known, size)
            return
        ends = np.cumsum(row_bytes(batch))
        done = 0
        while done < len(batch):
            current = self._require_open()
            before = int(ends[done - 1]) if done else 0
            room_bytes = self.bounds.b_max_bytes - self.held_bytes
            fitting = int(np.searchsorted(ends, before + room_bytes, side="right")) - done
            take = min(fitting, self.bounds.b_max - self.held_texts, len(batch) - done)
            if take > 0:
                rows = batch.rows(done, done + take)
                part = None if known is None else known.between(done, done + take)
                self._append(current, rows, part, int(ends[done + take - 1]) - before)
                done += take
            elif self._pending:
                yield self._flush_pending()
            else:
                yield self._emit_segment()

    def skip(self, batch: RowBatch) -> None:
        """Skip the next rows of the open partition: they need no encoding."""
        current = self._require_open()
        partition = current.partition
        _know_columns(partition, batch)
        partition.rows += len(batch)
        if current.rows:
            self._set_aside(current)
            self._current = _Held(partition, start=self._pending_texts, first_row=partition.rows, bytes=0)
        else:
            current.first_row = partition.rows

    def close(self) -> Iterator[SuperBatch]:
        """End the open partition: all its rows were added and none was refused."""
        current = self._require_open()
        if self._pending and self._pending_bytes + current.bytes > self.bounds.b_max_bytes:
            yield self._flush_pending()  # only an empty partition gets here: its overhead alone did not fit
        current.last = True
        self._set_aside(current)
        self._current = None
        rows, size = self._pending_new
        if rows >= self._b_min or size >= self.bounds.b_min_bytes or self._pending_texts >= self._b_max:
            yield self._flush_pending()

    def discard(self) -> tuple[int, int]:
        """Drop the rows of the open partition that were gathered last; its earlier segments are still emitted.

        Returns:
            Texts and bytes no longer held, those of vectors included.
        """
        current = self._require_open()
        self._current = None
        if self._slot is not None and current.rows:
            self._slot.truncate(current.start)
        return current.rows, current.bytes + current.vector_bytes

    def finish(self) -> Iterator[SuperBatch]:
        """Flush what is left after the last partition."""
        if self._current is not None:
            raise RuntimeError(f"partition {self._current.partition.key!r} is still open")
        if self._pending:
            yield self._flush_pending()

    def _require_open(self) -> _Held:
        if self._current is None:
            raise RuntimeError("no partition is open")
        return self._current

    def _set_aside(self, held: _Held) -> None:
        self._pending.append(held)
        self._pending_texts += held.rows
        self._pending_bytes += held.bytes
        rows, size = self._pending_new
        self._pending_new = rows + held.new_rows, size + held.new_bytes

    def _append(self, current: _Held, batch: RowBatch, known: KnownVectors | None, size: int) -> None:
        # Only what fits is booked: a reader that waited while it holds more than a SuperBatch could wait for itself.
        # Known vectors are a part of the SuperBatch's result, which is booked when it is flushed.
        vector_bytes = 0 if known is None else known.matrix.nbytes
        self._reserve(size + vector_bytes)
        if self._slot is None:
            self._slot = self._acquire()
        self._slot.append(batch.texts, (batch.text_offsets, batch.text_values), known)
        ids = batch.ids
        rows = len(ids)
        current.ids.append(ids)
        if batch.carried is not None:
            current.carried.append(batch.carried)
        current.rows += rows
        current.new_rows += rows if known is None else rows - int(np.count_nonzero(~known.sampled))
        current.bytes += size
        current.vector_bytes += vector_bytes
        current.partition.rows += rows

    def _flush_pending(self) -> SuperBatch:
        segments, size = tuple(held.segment() for held in self._pending), self._pending_bytes
        vector_bytes = sum(held.vector_bytes for held in self._pending)
        full = self._slot if self._slot is not None else self._acquire()
        self._pending, self._pending_texts, self._pending_bytes, self._pending_new = [], 0, 0, (0, 0)
        self._slot = None
        current = self._current
        if current is not None:
            if current.rows:
                self._reserve(current.bytes)  # the tail lies in both slots until the full one is released
                size += current.bytes
                self._slot = self._acquire()
                full.move_tail(current.start, self._slot)
            current.start = 0
        return self._emit(full, segments, size, vector_bytes)

    def _emit_segment(self) -> SuperBatch:
        current, full = self._require_open(), self._slot
        if full is None:
            raise RuntimeError("a segment without rows")
        self._slot = None
        self._current = _Held(current.partition, start=0, first_row=current.first_row + current.rows, bytes=0)
        return self._emit(full, (current.segment(),), current.bytes, current.vector_bytes)

    def _emit(self, slot: Slot, segments: tuple[Segment, ...], size: int, vector_bytes: int) -> SuperBatch:
        self._emitted += 1
        self._set_thresholds()
        return SuperBatch(self._emitted - 1, slot, segments, size, vector_bytes)

    def _set_thresholds(self) -> None:
        """B_min of the SuperBatch being gathered, and that part of B_max at which it is flushed."""
        self._b_min = self.bounds.b_min_of(self._emitted)
        self._b_max = max(1, self.bounds.b_max * self._b_min // self.bounds.b_min)


def row_bytes(batch: RowBatch) -> np.ndarray:
    """Bytes of each row, those of carried columns included, int64 [rows]: what the byte thresholds count."""
    texts = batch.text_offsets[1:] - batch.text_offsets[:-1]
    size = texts + (8 if batch.id_offsets is None else batch.id_offsets[1:] - batch.id_offsets[:-1])
    return size if batch.carried_sizes is None else size + batch.carried_sizes


def _know_columns(partition: OpenPartition, batch: RowBatch) -> None:
    partition.id_type = batch.ids.type
    if batch.carried is not None:
        partition.carried_columns = batch.carried.schema
