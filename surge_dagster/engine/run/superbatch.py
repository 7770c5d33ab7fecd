"""SuperBatches: the texts of one encode call, in segments of partitions, and what is known of these on their way."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.calls import EncodeMetrics
from surge_dagster.engine.files.facts import VectorFacts
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.sources.rows import is_blank
from surge_dagster.engine.store.store import StoredObject
from surge_dagster.engine.support.timeline import Span


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
        read_seconds: see `Costs`.
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
        seconds, slot = self.metrics.costs.encode_seconds, self.batch.slot
        return (len(slot) - slot.reused(0, len(slot))) / seconds if seconds > 0 else None


def row_bytes(batch: RowBatch) -> np.ndarray:
    """Bytes of each row, those of carried columns included, int64 [rows]: what the byte thresholds count."""
    texts = batch.text_offsets[1:] - batch.text_offsets[:-1]
    size = texts + (8 if batch.id_offsets is None else batch.id_offsets[1:] - batch.id_offsets[:-1])
    return size if batch.carried_sizes is None else size + batch.carried_sizes
