"""The encode call of one SuperBatch: only rows without a vector are encoded, and of equal texts only the first.

Rows with a vector from the partition's old file are trusted after a look at a sample of them, which is encoded in the
same call. Where a new vector differs from the old one by more than the precision promises, the model or a device gives
other vectors than it gave then: the partition is dropped, and the reader reads it again and has all of it encoded.

A second call encodes rows that waited for an equal text of a partition that failed.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.calls import EncodeCall, EncodeMetrics
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.quarantine import FailedRow
from surge_dagster.engine.run.failures import DroppedPartitions
from surge_dagster.engine.run.memory import ResultMemory
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.superbatch import Segment, SuperBatch
from surge_dagster.engine.support.cosines import LOWEST_COSINE, cosines
from surge_dagster.engine.support.ledger import Ledger

log = logging.getLogger(__name__)

_ROWS_AT_A_TIME = 512
_NO_ROWS = np.empty(0, np.intp)


class SuperBatchCall:
    """Submits the rows of a SuperBatch that have no vector, and completes the others from them.

    Args:
        batch: its slot belongs to this until the call has ended.
        dropped: takes partitions whose old vectors are not to be trusted.

    Attributes:
        deduplicated: rows that get the vector of an equal text.
        cosines: of new vectors to those of the old file, by the segment's start and stop.
    """

    def __init__(self, pool: EncoderPool, batch: SuperBatch, memory: RunMemory, dropped: DroppedPartitions) -> None:
        self.batch = batch
        self.cosines: dict[tuple[int, int], tuple[float, ...]] = {}
        self._pool = pool
        self._slot = slot = batch.slot
        self._dropped = dropped
        self._lowest_cosine = LOWEST_COSINE[pool.precision]
        self._borders = np.array([segment.start for segment in batch.segments])
        self._sampled, self._old_vectors = self._take_sample(memory.plan.result)
        known = slot.known(0, len(slot))
        self._has_vector = np.zeros(len(slot), np.bool_) if known is None else known.copy()
        self._has_vector[self._sampled] = False
        rows = None if known is None else np.flatnonzero(~self._has_vector)
        self._rows, self._repeats, self._originals = _distinct(slot, rows, memory.ledger)
        self.deduplicated = len(self._repeats)
        self._metrics: EncodeMetrics | None = None
        self._call = self._submit(self._rows) if batch.texts else None

    def result(self, timeout_seconds: float | None = None) -> EncodeMetrics | None:
        """Waits until all rows have their vectors or have failed; None after the timeout. Can be called again.

        Raises:
            EncoderError: the pool failed.
        """
        while self._call is not None:
            metrics = self._call.result(timeout_seconds)
            if metrics is None:
                return None
            rows = self._take_vectors(metrics)
            self._call = None  # its vectors must not be taken again where the pool refuses the next call
            if len(rows):
                self._call = self._submit(rows)
        return self.metrics

    @property
    def finished_texts(self) -> int:
        """How many texts of the pool's present call have their vectors by now."""
        return 0 if self._call is None else self._call.finished_rows

    def end(self) -> None:
        """Ends the call without encoding further rows."""
        if self._call is not None:
            self._call.abandon()
            self._take_vectors(self._call.metrics)
            self._call = None

    def is_encoded(self, segment: Segment) -> bool:
        """Whether all rows of a segment have their vectors; final once the call has ended."""
        return bool(self._has_vector[segment.start : segment.stop].all())

    @property
    def metrics(self) -> EncodeMetrics:
        """The costs so far."""
        return self._metrics or EncodeMetrics()

    def _submit(self, rows: np.ndarray | None) -> EncodeCall:
        self._rows = rows
        return self._pool.submit(self._slot, self._borders, rows)

    def _take_sample(self, result: ResultMemory) -> tuple[np.ndarray, np.ndarray]:
        """The sampled rows and a copy of their old vectors; drops partitions of whose sample no row fits the memory."""
        slot = self._slot
        sampled = slot.sampled()
        # They take memory that is booked for writing the SuperBatch, which begins when they are no longer needed.
        matrix = slot.matrix(0, len(slot))
        beside = result.of_rows(len(slot), 0) - matrix.nbytes
        most = max(0, beside // matrix[:1].nbytes) if len(slot) else 0
        taken, left_out = sampled[:most], sampled[most:]
        for place in np.setdiff1d(self._places_of(left_out), self._places_of(taken)).tolist():
            self._dropped.read_again(self.batch.segments[place].partition)
        return taken, matrix[taken]

    def _take_vectors(self, metrics: EncodeMetrics) -> np.ndarray:
        """Takes the vectors of the call that ended, and returns the rows that still have to be encoded."""
        assert self._call is not None
        for first, stop in self._call.encoded:
            self._has_vector[slice(first, stop) if self._rows is None else self._rows[first:stop]] = True
        metrics = replace(metrics, failed=(*metrics.failed, *self._copy_vectors(metrics.failed)))
        self._metrics = metrics if self._metrics is None else self._metrics.plus(metrics)
        self._compare_sample()
        missing = ~self._has_vector
        for segment in self._segments_of(np.array([failed.row for failed in self._metrics.failed], np.intp)):
            missing[segment.start : segment.stop] = False
        return np.flatnonzero(missing)

    def _copy_vectors(self, failed: tuple[FailedRow, ...]) -> list[FailedRow]:
        """Copies vectors to rows with equal texts; returns those whose text cannot be encoded."""
        is_encoded = self._has_vector[self._originals]
        originals, repeats = self._originals[is_encoded], self._repeats[is_encoded]
        for start in range(0, len(repeats), _ROWS_AT_A_TIME):
            part = slice(start, start + _ROWS_AT_A_TIME)
            self._slot.copy_vectors(originals[part], repeats[part])
        self._has_vector[repeats] = True
        reasons = {one.row: one.reason for one in failed}
        waiting = zip(self._originals[~is_encoded].tolist(), self._repeats[~is_encoded].tolist(), strict=True)
        self._originals = self._repeats = _NO_ROWS
        return [FailedRow(repeat, reasons[original]) for original, repeat in waiting if original in reasons]

    def _compare_sample(self) -> None:
        """Compares new vectors with old ones and puts these back; drops partitions that are not to be trusted."""
        is_encoded = self._has_vector[self._sampled]
        sampled, old_vectors = self._sampled[is_encoded], self._old_vectors[is_encoded]
        self._sampled, self._old_vectors = self._sampled[~is_encoded], self._old_vectors[~is_encoded]
        matrix = self._slot.matrix(0, len(self._slot))
        wrong: dict[tuple[int, int], Segment] = {}
        for start in range(0, len(sampled), _ROWS_AT_A_TIME):
            rows, old = sampled[start : start + _ROWS_AT_A_TIME], old_vectors[start : start + _ROWS_AT_A_TIME]
            for row, cosine in zip(rows.tolist(), cosines(matrix[rows], old).tolist(), strict=True):
                [segment] = self._segments_of(np.array([row]))
                place = segment.start, segment.stop  # an empty one before it has the same start
                self.cosines[place] = (*self.cosines.get(place, ()), cosine)
                if cosine < self._lowest_cosine and place not in wrong:
                    wrong[place] = segment
                    log.warning(
                        "partition %r: row %d has a cosine of %.6f to its vector in the old file, and %g is promised: "
                        "the model or a device gives other vectors than before, so the whole partition is encoded",
                        *(segment.partition.key, segment.first_row + row - segment.start, cosine, self._lowest_cosine),
                    )
            matrix[rows] = old
        for place, segment in wrong.items():
            self._dropped.read_again(segment.partition, self.cosines[place])

    def _segments_of(self, rows: np.ndarray) -> list[Segment]:
        return [self.batch.segments[place] for place in self._places_of(rows).tolist()]

    def _places_of(self, rows: np.ndarray) -> np.ndarray:
        """Places of the segments that have these rows, ascending."""
        return np.unique(np.searchsorted(self._borders, rows, side="right") - 1)


def _distinct(slot: Slot, rows: np.ndarray | None, ledger: Ledger) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Which of the rows are encoded: the first of equal texts; all, where the comparison has no memory.

    Returns:
        The rows that remain, rows with the text of an earlier one, and for each of these that earlier one.
    """
    count = len(slot) if rows is None else len(rows)
    size = 4 * slot.text_bytes + 64 * count
    if count < 2 or not ledger.try_reserve(size):
        return rows, _NO_ROWS, _NO_ROWS
    try:
        texts = slot.texts(0, len(slot))
        encoded = pc.dictionary_encode(texts if rows is None else texts.take(pa.array(rows)))  # pyright: ignore[reportAttributeAccessIssue]
        if len(encoded.dictionary) == count:
            return rows, _NO_ROWS, _NO_ROWS
        codes, places = encoded.indices.to_numpy(), np.arange(count)
        first = np.empty(len(encoded.dictionary), np.intp)
        first[codes[::-1]] = places[::-1]
        originals = first[codes]
        is_repeat = originals != places
        all_rows = places if rows is None else rows
        return all_rows[~is_repeat], all_rows[is_repeat], all_rows[originals[is_repeat]]
    finally:
        ledger.release(size)
