"""One SuperBatch on its way out: each segment becomes a file or a staged object; then what became
of all of them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.errors import DataError
from surge_dagster.engine.files.parquet import write_file
from surge_dagster.engine.files.rows import invalid_row
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
    ReadPartition,
    Segment,
    SpaceTarget,
    StagedRows,
)
from surge_dagster.engine.sources.rows import is_blank
from surge_dagster.engine.support.timeline import Lane


@dataclass(slots=True)
class Publication:
    """One SuperBatch while its segments are being written, by several threads. Only the publisher
    uses it.

    Attributes:
        staged: staged rows by the segment's start.
    """

    encoded: EncodedSuperBatch
    target: SpaceTarget
    staging: Staging
    started: float = field(default_factory=time.perf_counter)
    receipts: list[Receipt] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    staged: dict[int, StagedRows] = field(default_factory=dict)
    serialize: Lane = field(default_factory=Lane)
    upload: Lane = field(default_factory=Lane)
    truncated: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def publish(self, segment: Segment, read: ReadPartition) -> None:
        """Write the file of a partition that lies whole in this SuperBatch."""
        target = self.target
        batch = self.encoded.batch
        partition = segment.partition
        begun = time.perf_counter()
        matrix = self._valid_vectors(segment)
        table = target.table(batch, segment, matrix)
        facts = target.facts(partition, read, segment.vector_facts(batch.slot, _now()))
        with target.create(partition.key) as upload:
            write_file(upload.sink, table.schema, facts, [table])
            serialized = time.perf_counter()
            action = partition.action(facts)
            if read.changes is not None and action == "encoded":
                write_changes(target.store, facts, read.changes)
            stored = upload.publish(lambda: require_unchanged(partition.source))
        receipt = Receipt.of(
            facts,
            stored,
            target.store.location(stored.name),
            action=action,
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
        vectors = segment.vector_facts(batch.slot, _now())
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
        """Return a segment's vectors, [rows, dimension]; raises `DataError` if one of them is not a
        valid embedding."""
        for failed in self.encoded.metrics.failed:
            if segment.start <= failed.row < segment.stop:
                raise DataError(
                    segment.partition.key,
                    f"its text ends every worker that encodes it ({failed.reason})",
                    "Look at this text, shorten it or take it out, and run again.",
                    segment.first_row + failed.row - segment.start,
                )
        slot = self.encoded.batch.slot
        matrix = slot.matrix(segment.start, segment.stop)
        texts = slot.texts(segment.start, segment.stop)
        wrong = invalid_row(
            matrix,
            normalized=self.target.space.normalize,
            may_be_zero=lambda row: bool(is_blank(texts[row : row + 1])[0]),
        )
        if wrong is not None:
            raise DataError(
                segment.partition.key,
                f"{wrong[1]}: the encoder gave what cannot be published",
                "Look at the text of this row. If it is ordinary, the model or the device is at "
                "fault.",
                segment.first_row + wrong[0],
            )
        return matrix

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


def _now() -> str:
    """Return the time in the form of the facts."""
    return datetime.now(UTC).isoformat(timespec="seconds")
