"""One SuperBatch on its way out: what is known of it when it comes, what becomes of its pieces, and its report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from surge_dagster.engine.encoder.calls import EncodeMetrics
from surge_dagster.engine.encoder.quarantine import FailedRow
from surge_dagster.engine.report import Failure, Receipt, SuperBatchReport, overlap_ratio, worker_idle_ratio
from surge_dagster.engine.superbatch import StagedRows, SuperBatch
from surge_dagster.engine.support.timeline import Lane, Span


@dataclass(frozen=True, slots=True)
class PublishedSuperBatch:
    """What became of one SuperBatch."""

    report: SuperBatchReport
    receipts: tuple[Receipt, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class EncodedSuperBatch:
    """What is known of an encode call beside its vectors.

    Attributes:
        duty_cycle, pace_ratio, encode_span: see `SuperBatchReport`.
    """

    figures: EncodeMetrics
    duty_cycle: float = 1.0
    pace_ratio: float | None = None
    encode_span: Span | None = None

    def failed_row(self, start: int, stop: int) -> FailedRow | None:
        """The text among rows start..stop that could not be encoded, if there is one."""
        return next((failed for failed in self.figures.failed if start <= failed.row < stop), None)


@dataclass(frozen=True, slots=True)
class Spent:
    """What a piece took, by `time.perf_counter`: it was begun, it was serialized, it was out.

    Attributes:
        truncated: texts of it of which the model saw only the first tokens.
    """

    begun: float
    serialized: float
    ended: float
    truncated: int


@dataclass(slots=True)
class Publication:
    """One SuperBatch while its pieces are being written; whoever changes it holds the publisher's lock.

    Attributes:
        remaining: pieces that are not written yet.
        staged: by the segment's start.
        serialize, upload: what the publishing threads spent.
    """

    batch: SuperBatch
    encoded: EncodedSuperBatch
    remaining: int
    started: float = field(default_factory=time.perf_counter)
    receipts: list[Receipt] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    staged: dict[int, StagedRows] = field(default_factory=dict)
    serialize: Lane = field(default_factory=Lane)
    upload: Lane = field(default_factory=Lane)
    truncated: int = 0

    @property
    def texts_per_second(self) -> float | None:
        """Of the encode call."""
        seconds = self.encoded.figures.encode_seconds
        return len(self.batch.slot) / seconds if seconds > 0 else None

    def count(self, spent: Spent) -> None:
        """Add what a piece took."""
        self.truncated += spent.truncated
        self.serialize.add(spent.begun, spent.serialized)
        self.upload.add(spent.serialized, spent.ended)

    def published(self, *, b_min: int, begun: float, peak_resident_bytes: int) -> PublishedSuperBatch:
        """What became of it, once nothing remains; receipts are in the order of the segments.

        Args:
            b_min: for the fill ratio.
            begun: `time.perf_counter()` at the run's begin.
            peak_resident_bytes: see `SuperBatchReport`.
        """
        order = {segment.partition.key: place for place, segment in enumerate(self.batch.segments)}
        receipts = tuple(sorted(self.receipts, key=lambda receipt: order[receipt.key]))
        return PublishedSuperBatch(self._report(b_min, begun, peak_resident_bytes), receipts, tuple(self.failures))

    def _report(self, b_min: int, begun: float, peak_resident_bytes: int) -> SuperBatchReport:
        batch, encoded = self.batch, self.encoded
        figures = encoded.figures
        publish_seconds = time.perf_counter() - self.started
        texts = sum(segment.stop - segment.start for segment in batch.segments)  # all of it, unless the run was stopped
        return SuperBatchReport(
            index=batch.index,
            partitions=len(batch.segments),
            texts=texts,
            text_bytes=batch.slot.text_bytes,
            tokens=figures.tokens,
            padded_tokens=figures.padded_tokens,
            truncated=self.truncated,
            encode_seconds=figures.encode_seconds,
            tokenize_seconds=figures.tokenize_seconds,
            forward_seconds=figures.forward_seconds,
            serialize_seconds=self.serialize.seconds,
            upload_seconds=self.upload.seconds,
            publish_seconds=publish_seconds,
            fill_ratio=texts / b_min,
            overlap_ratio=overlap_ratio(publish_seconds, figures.encode_seconds),
            texts_per_second=texts / figures.encode_seconds if figures.encode_seconds > 0 else 0.0,
            copy_seconds=figures.copy_seconds,
            duty_cycle=encoded.duty_cycle,
            worker_idle_ratio=worker_idle_ratio(figures.forward_seconds, figures.workers, figures.encode_seconds),
            pace_ratio=encoded.pace_ratio,
            replays=figures.replays,
            gpu_utilisation=figures.gpu_utilisation,
            gpu_memory_bytes=figures.gpu_memory_bytes,
            peak_resident_bytes=peak_resident_bytes,
            encode_span=encoded.encode_span,
            serialize_span=self.serialize.span(begun),
            upload_span=self.upload.span(begun),
        )
