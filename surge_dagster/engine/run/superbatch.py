"""SuperBatches: the texts of one encode call, in segments of partitions, what is known of these
on their way, and the space that their files go to."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.schedule import EncodeMetrics
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.files.facts import FileFacts, VectorFacts, desired_version
from surge_dagster.engine.files.formats import PublishedFile, file_name
from surge_dagster.engine.files.rows import in_words, schema, table_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.ended_workers import NONE_ENDED_WORKERS, EndedWorkers
from surge_dagster.engine.output.rejected import NONE_REJECTED, RejectedRows
from surge_dagster.engine.run.change_feed import RowChanges
from surge_dagster.engine.run.report import Action, Failure, failure_of
from surge_dagster.engine.sources.partition import Partition, PartitionRange, RowBatch
from surge_dagster.engine.store.store import Store, Upload
from surge_dagster.engine.support.timeline import Span


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Rows start..stop of one partition, with their vectors, in an object of their own.

    Attributes:
        digest: content digest over the (id, text) rows.
        vectors: where their vectors come from.
        old_rows_version: `rows_version` of the old file that the reused ones come from; "" for
            none.
    """

    start: int
    stop: int
    digest: str
    vectors: VectorFacts
    old_rows_version: str = ""

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class PartitionToRead:
    """A partition, or a range of it, that is read, and the file that it replaces. Two readings are
    two objects.

    Attributes:
        old_file: None if the space has no valid file of it.
        reuse: whether vectors of that file, and rows that an earlier run staged, may be used.
        range: rows that are read and only staged; None: all rows are read.
        must_be_staged: whether it is only read if all its rows are staged, because several runs
            stage ranges of it.
        ended_workers: rows that are left out.
    """

    source: Partition
    old_file: PublishedFile | None = None
    reuse: bool = True
    range: PartitionRange | None = None
    must_be_staged: bool = False
    ended_workers: EndedWorkers = NONE_ENDED_WORKERS

    @property
    def key(self) -> str:
        return self.source.key

    @property
    def first_row(self) -> int:
        return 0 if self.range is None else self.range.start

    @property
    def old_rows_version(self) -> str:
        """The `rows_version` of the file that it replaces; "" for none."""
        return "" if self.old_file is None else self.old_file.facts.rows_version

    def has_same_rows(self, content_digest: str, vectors: VectorFacts, columns: pa.Schema) -> bool:
        """Return whether its rows, vectors and columns are those of the file that it replaces."""
        if self.old_file is None or vectors.rows_encoded or not self.reuse:
            return False
        has_same_columns = self.old_file.columns == columns
        return has_same_columns and self.old_file.facts.content_digest == content_digest

    def failure(self, error: SurgeError | OSError) -> Failure:
        """Return the failure of the partition, with the place of the row among those it reads."""
        return failure_of(self.ended_workers.without(self.source), error)

    def action(self, facts: FileFacts) -> Action:
        """Return what was done to publish a file with these facts: if its rows are those of the
        old file, only the source version had moved."""
        return "republished" if self.old_rows_version == facts.rows_version else "encoded"


@dataclass(frozen=True, slots=True)
class ReadPartition:
    """What is known of a partition, or a range, once its last row was read and every check on its
    rows has passed.

    Attributes:
        rows: also those that need no encoding.
        source_rows, skipped_rows, blank_texts: see `FileFacts`.
        rejected: its rows that were set aside.
        staged: its rows that an earlier run had staged, ascending.
        changes: how its rows differ from those of the old file; None if that is unknown or not
            wanted.
    """

    rows: int
    content_digest: str
    id_type: pa.DataType
    source_rows: int = 0
    skipped_rows: int = 0
    blank_texts: int = 0
    rejected: RejectedRows = NONE_REJECTED
    staged: tuple[StagedRows, ...] = ()
    changes: RowChanges | None = None
    carried_columns: pa.Schema | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one partition within one SuperBatch.

    Attributes:
        start, stop: the rows' places in the SuperBatch.
        first_row: the place of the first one in its partition.
        ids: the rows' ids, in order.
        read: the partition as it was read, if it ends here; such a segment is empty if the
            partition's last rows were skipped.
        carried: the columns that travel with the rows, in the pieces of the ids.
    """

    partition: PartitionToRead
    start: int
    stop: int
    first_row: int
    ids: tuple[pa.Array, ...]
    read: ReadPartition | None
    carried: tuple[pa.RecordBatch, ...] = ()

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it holds all of its partition."""
        return self.first_row == 0 and self.read is not None and self.partition.range is None

    @property
    def id_type(self) -> pa.DataType:
        if self.ids:
            return self.ids[0].type
        return pa.string() if self.read is None else self.read.id_type

    @property
    def carried_columns(self) -> pa.Schema | None:
        """The columns that travel with its rows; None if there are none."""
        if self.carried:
            return self.carried[0].schema
        return None if self.read is None else self.read.carried_columns

    def rows_reused(self, slot: Slot) -> int:
        """Return how many of its rows have the vector of the old file."""
        return int(np.count_nonzero(slot.is_known(self.start, self.stop)))

    def vector_facts(self, slot: Slot, now: str) -> VectorFacts:
        """Return where its vectors come from, once the slot was encoded.

        Args:
            now: the time in the form of the facts.
        """
        reused = self.rows_reused(slot)
        oldest = now
        if reused and self.partition.old_file is not None:
            oldest = min(now, self.partition.old_file.facts.oldest_encoded_at)
        return VectorFacts(
            truncated=int(np.count_nonzero(slot.truncation(self.start, self.stop))),
            rows_reused=reused,
            rows_encoded=self.rows - reused,
            oldest_encoded_at=oldest,
        )


@dataclass(frozen=True, slots=True)
class SuperBatch:
    """The texts of one encode call, and how to slice the result back into partitions.

    Attributes:
        slot: holds the texts, and the embeddings once they are encoded.
        segments: cover the slot's rows without gap, in order.
        held_bytes: booked until it is released: ids, texts and overhead, and texts that moved on to
            the next slot but still lie in this one.
        vector_bytes: booked in addition: vectors that rows had from the start, then all that
            encoding and writing it take.
        read_seconds: see `Costs`.
        hashes: of its texts (`text_hashes`); None until its memory is booked.
    """

    index: int
    slot: Slot
    segments: tuple[Segment, ...]
    held_bytes: int
    vector_bytes: int = 0
    read_seconds: float = 0.0
    hashes: pa.FixedSizeBinaryArray | None = field(default=None, repr=False)

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
        return sum(segment.rows for segment in self.batch.segments)


def row_bytes(batch: RowBatch) -> np.ndarray:
    """Return the bytes of each row with its carried columns, int64 [rows]: what the byte thresholds
    count."""
    size = np.diff(batch.text_offsets)
    size = size + (8 if batch.id_offsets is None else np.diff(batch.id_offsets))
    return size if batch.carried_sizes is None else size + batch.carried_sizes


@dataclass(frozen=True, slots=True)
class SpaceTarget:
    """A space of an output, as one run writes it: with which precision, and whether files have a
    text column."""

    store: Store
    space: Space
    precision: str
    include_text: bool

    def create(self, key: str) -> Upload:
        return self.store.create(file_name(self.space.name, key))

    def sync(self) -> None:
        """Flush the space's folder: files published before are durable afterwards."""
        self.store.sync(self.space.name)

    def table(self, batch: SuperBatch, segment: Segment, matrix: np.ndarray) -> pa.Table:
        """Return a segment with its vectors [rows, dimension] as rows of a file."""
        assert batch.hashes is not None
        return table_of(
            self.columns(segment.id_type, segment.carried_columns),
            segment.ids,
            batch.slot.texts(segment.start, segment.stop),
            matrix,
            segment.carried,
            batch.slot.truncation(segment.start, segment.stop),
            batch.hashes[segment.start : segment.stop],
        )

    def columns(self, id_type: pa.DataType, carried: pa.Schema | None) -> pa.Schema:
        return schema(
            id_type,
            self.space.dimension,
            self.space.dtype,
            include_text=self.include_text,
            carried=carried,
        )

    def facts(
        self, partition: PartitionToRead, read: ReadPartition, vectors: VectorFacts
    ) -> FileFacts:
        rows_version = secrets.token_hex(16)
        columns = self.columns(read.id_type, read.carried_columns)
        if partition.has_same_rows(read.content_digest, vectors, columns):
            rows_version = partition.old_rows_version
        return FileFacts(
            partition_key=partition.key,
            space=self.space.name,
            model=self.space.requested.model,
            precision=self.precision,
            source_version=partition.source.source_version,
            content_digest=read.content_digest,
            desired_version=desired_version(read.content_digest, self.space.name),
            rows=read.rows,
            dimension=self.space.dimension,
            rows_version=rows_version,
            carried_columns=in_words(read.carried_columns),
            source_rows=read.source_rows,
            skipped_rows=read.skipped_rows,
            blank_texts=read.blank_texts,
            rejected_rows=read.rejected.rows,
            transient_rows=read.rejected.transient,
            truncated=vectors.truncated,
            rows_reused=vectors.rows_reused,
            rows_encoded=vectors.rows_encoded,
            oldest_encoded_at=vectors.oldest_encoded_at,
        )
