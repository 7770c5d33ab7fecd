"""What is published: of one SuperBatch, whose segments become files or staged objects, and files
that are assembled from staged segments.

Rows of an assembled file pass through in small batches. At most one row group of it is resident, so
a partition of any size passes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial, reduce

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.errors import DataError, SurgeError, TransientError
from surge_dagster.engine.files.facts import FileFacts, InvalidFile, VectorFacts
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.files.parquet import STRING_COPIES, levels_bytes, write_file
from surge_dagster.engine.files.rows import group_rows, has_valid_length, invalid_row, vector_bytes
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.rejected import RejectedLists
from surge_dagster.engine.run.change_feed import write_changes
from surge_dagster.engine.run.report import (
    Event,
    Failure,
    Receipt,
    SuperBatchReport,
    require_unchanged,
)
from surge_dagster.engine.run.staging import Staging
from surge_dagster.engine.run.superbatch import (
    EncodedSuperBatch,
    PartitionToRead,
    ReadPartition,
    Segment,
    SpaceTarget,
    StagedRows,
)
from surge_dagster.engine.sources.bad_rows import id_text
from surge_dagster.engine.sources.casting import is_blank
from surge_dagster.engine.sources.partition import RejectedRow, row_in_words
from surge_dagster.engine.store.store import StoredObject, Upload
from surge_dagster.engine.support.timeline import Lane

# Memory of a row group while it is held and written; together with what reading takes, less than
# the reader's share.
_GROUP_BYTES = 24 * 1024 * 1024


class TextsEndWorkers(DataError):
    """Texts of a partition end every worker that encodes them.

    Args:
        rows: of these texts, by their places among the rows that were read.
    """

    def __init__(self, key: str, rows: Sequence[RejectedRow]) -> None:
        self.rows = rows
        remedy = "Look at this text, shorten it or take it out, and run again."
        super().__init__(key, rows[0].reason, remedy, rows[0].row)


@dataclass(slots=True)
class Publication:
    """One SuperBatch while its segments are being written, by several threads. Only the publisher
    uses it.

    Attributes:
        encoded_at: the time, in the form of the facts.
        staged: staged rows by the segment's start.
        has_valid_length: of the vectors of the whole SuperBatch, bool [rows].
    """

    encoded: EncodedSuperBatch
    target: SpaceTarget
    staging: Staging
    lists: RejectedLists
    started: float = field(default_factory=time.perf_counter)
    receipts: list[Receipt] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    staged: dict[int, StagedRows] = field(default_factory=dict)
    serialize: Lane = field(default_factory=Lane)
    upload: Lane = field(default_factory=Lane)
    truncated: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    encoded_at: str = field(init=False)
    has_valid_length: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.encoded_at = datetime.now(UTC).isoformat(timespec="seconds")
        slot = self.encoded.batch.slot
        self.has_valid_length = has_valid_length(
            slot.matrix(0, len(slot)), normalized=self.target.space.normalize
        )

    def publish(self, segment: Segment, read: ReadPartition) -> None:
        """Write the file of a partition that lies whole in this SuperBatch."""
        target = self.target
        batch = self.encoded.batch
        partition = segment.partition
        begun = time.perf_counter()
        matrix = self._valid_vectors(segment)
        table = target.table(batch, segment, matrix)
        facts = target.facts(partition, read, segment.vector_facts(batch.slot, self.encoded_at))
        with target.create(partition.key) as upload:
            write_file(upload.sink, table.schema, facts, [table])
            serialized = time.perf_counter()
            stored = _publish(upload, target, self.lists, partition, read, facts)
        self.staging.remove(partition.key)  # of an earlier version
        receipt = Receipt.of(
            facts,
            stored,
            target.store.location(stored.name),
            action=partition.action(facts),
            superbatch=batch.index,
        )
        with self.lock:
            self.receipts.append(receipt)
            self._count(begun, serialized, facts.truncated)

    def stage(self, segment: Segment) -> None:
        """Stage rows of a split partition as an object of its own."""
        batch = self.encoded.batch
        begun = time.perf_counter()
        matrix = self._valid_vectors(segment)
        vectors = segment.vector_facts(batch.slot, self.encoded_at)
        checked = time.perf_counter()
        staged = self.staging.write(batch, segment, matrix, vectors)
        with self.lock:
            self.staged[segment.start] = staged
            self._count(begun, checked, vectors.truncated)

    def fail(self, failure: Failure) -> None:
        """Add the failure of one partition."""
        with self.lock:
            self.failures.append(failure)

    def events(self, b_min: int, begun: float, peak_bytes: int) -> tuple[Event, ...]:
        """Return what became of the SuperBatch once all is written."""
        return self._report(b_min, begun, peak_bytes), *self.receipts, *self.failures

    def _count(self, begun: float, serialized: float, truncated: int) -> None:
        self.truncated += truncated
        self.serialize.add(begun, serialized)
        self.upload.add(serialized, time.perf_counter())

    def _valid_vectors(self, segment: Segment) -> np.ndarray:
        """Return a segment's vectors, [rows, dimension].

        Raises:
            TextsEndWorkers: rows of it have none.
            DataError, TransientError: one of them is not a valid embedding.
        """
        failed = self.rows_without_vector(segment)
        if failed:
            raise TextsEndWorkers(segment.partition.key, failed)
        slot = self.encoded.batch.slot
        matrix = slot.matrix(segment.start, segment.stop)
        if self.has_valid_length[segment.start : segment.stop].all():
            return matrix
        texts = slot.texts(segment.start, segment.stop)
        wrong = invalid_row(
            matrix,
            normalized=self.target.space.normalize,
            may_be_zero=lambda row: bool(is_blank(texts[row : row + 1])[0]),
        )
        if wrong is not None:
            row, reason = wrong
            raise self._invalid_vector(segment.partition.key, segment.first_row + row, reason)
        return matrix

    def _invalid_vector(self, key: str, row: int, reason: str) -> SurgeError:
        """Return the error of a row; transient if its vector comes from a server."""
        endpoint = self.target.space.requested.endpoint
        if endpoint is not None:
            return TransientError(
                f"partition {key!r}, {row_in_words(row)}: {reason}: the encoder at {endpoint.url} "
                "gave what cannot be published. Run again; if it comes again, look at the server.",
                key,
            )
        return DataError(
            key,
            f"{reason}: the encoder gave what cannot be published",
            "Look at the text of this row. If it is ordinary, the model or the device is at fault.",
            row,
        )

    def rows_without_vector(self, segment: Segment) -> list[RejectedRow]:
        """Return the rows of a segment whose texts ended workers, or got no vector."""
        within = range(segment.start, segment.stop)
        failed = [each for each in self.encoded.metrics.failed if each.row in within]
        if not failed:
            return []
        ids = pa.chunked_array(segment.ids)
        rows: list[RejectedRow] = []
        for each in failed:
            place = each.row - segment.start
            row = segment.first_row + place
            kind = "transient" if each.was_killed else "invalid"
            rejected_id = id_text(ids[place].as_py())
            rows.append(
                RejectedRow(
                    row,
                    row_in_words(row),
                    rejected_id,
                    each.finding,
                    kind,
                    ended_worker=True,
                )
            )
        return rows

    def _report(self, b_min: int, begun: float, peak_bytes: int) -> SuperBatchReport:
        encoded = self.encoded
        batch = encoded.batch
        metrics = encoded.metrics
        rows_reused = sum(segment.rows_reused(batch.slot) for segment in batch.segments)
        texts = encoded.published_texts
        texts_encoded = texts - rows_reused
        of_publishing = Costs(
            texts_encoded=texts_encoded,
            texts_deduplicated=encoded.deduplicated,
            rows_reused=rows_reused,
            read_seconds=batch.read_seconds,
            serialize_seconds=self.serialize.seconds,
            upload_seconds=self.upload.seconds,
            publish_seconds=time.perf_counter() - self.started,
        )
        return SuperBatchReport(
            index=batch.index,
            partitions=len(batch.segments),
            texts=texts,
            text_bytes=batch.slot.text_bytes * texts // max(1, batch.texts),
            costs=metrics.costs.plus(of_publishing),
            truncated=self.truncated,
            fill_ratio=texts_encoded / b_min,
            duty_cycle=encoded.duty_cycle,
            worker_idle_ratio=metrics.costs.worker_idle_ratio(
                metrics.workers, metrics.costs.encode_seconds
            ),
            pace_ratio=encoded.pace_ratio,
            peak_resident_bytes=peak_bytes,
            encode_span=encoded.encode_span,
            serialize_span=self.serialize.span(begun),
        )


def assemble(
    target: SpaceTarget,
    staging: Staging,
    lists: RejectedLists,
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
    require_unchanged(partition.source)  # checked again at the publication; this saves the work
    vectors = reduce(VectorFacts.plus, (segment.vectors for segment in staged), VectorFacts())
    facts = target.facts(partition, read, vectors)
    columns = target.columns(read.id_type, read.carried_columns)
    rows = _rows(staging, partition, staged, require_not_over)

    with target.create(partition.key) as upload:
        write_rows(target.space, upload, columns, facts, rows)
        stored = _publish(upload, target, lists, partition, read, facts)
    return PublishedFile(stored, facts, columns)


def _publish(
    upload: Upload,
    target: SpaceTarget,
    lists: RejectedLists,
    partition: PartitionToRead,
    read: ReadPartition,
    facts: FileFacts,
) -> StoredObject:
    """Publish a file that is written, after its row changes and its list of rejected rows."""
    if read.changes is not None and partition.action(facts) == "encoded":
        write_changes(target.store, facts, read.changes)
    still_wanted = partial(require_unchanged, partition.source)
    lists.write(facts, read.rejected, still_wanted)
    stored = upload.publish(still_wanted)
    lists.remove_old(facts)
    return stored


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
