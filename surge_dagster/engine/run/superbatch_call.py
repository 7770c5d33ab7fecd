"""The encode call of one SuperBatch: only rows without a vector are encoded, and of equal texts
only the first.

A second call encodes rows that waited for an equal text of a partition that failed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.calls import EncodeCall, EncodeMetrics
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.quarantine import FailedRow
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.superbatch import Segment, SuperBatch
from surge_dagster.engine.support.ledger import Ledger

_ROWS_AT_A_TIME = 512
_NO_ROWS = np.empty(0, np.intp)


class SuperBatchCall:
    """Submits the rows of a SuperBatch that have no vector, and completes the others from them.

    Args:
        batch: its slot belongs to this until the call has ended.

    Attributes:
        deduplicated: rows that get the vector of an equal text.
    """

    def __init__(self, pool: EncoderPool, batch: SuperBatch, memory: RunMemory) -> None:
        self.batch = batch
        self._pool = pool
        self._slot = slot = batch.slot
        self._borders = np.array([segment.start for segment in batch.segments])
        known = slot.known(0, len(slot))
        self._has_vector = np.zeros(len(slot), np.bool_) if known is None else known.copy()
        rows = None if known is None else np.flatnonzero(~self._has_vector)
        self._rows, self._repeats, self._originals = _distinct(slot, rows, memory.ledger)
        self.deduplicated = len(self._repeats)
        self._metrics: EncodeMetrics | None = None
        self._call = self._submit(self._rows) if batch.texts else None

    def result(self, timeout_seconds: float | None = None) -> EncodeMetrics | None:
        """Wait until all rows have their vectors or have failed; return None after the timeout. Can
        be called again.

        Raises:
            EncoderError: the pool failed.
        """
        while self._call is not None:
            metrics = self._call.result(timeout_seconds)
            if metrics is None:
                return None
            rows = self._take_vectors(metrics)
            # its vectors must not be taken again if the pool refuses the next call
            self._call = None
            if len(rows):
                self._call = self._submit(rows)
        return self.metrics

    @property
    def finished_texts(self) -> int:
        """How many texts of the pool's present call have their vectors by now."""
        return 0 if self._call is None else self._call.finished_rows

    def end(self) -> None:
        """End the call without encoding further rows."""
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

    def _take_vectors(self, metrics: EncodeMetrics) -> np.ndarray:
        """Take the vectors of the call that ended, and return the rows that still have to be
        encoded: those of partitions without a failed row."""
        assert self._call is not None
        for first, stop in self._call.encoded:
            rows = slice(first, stop) if self._rows is None else self._rows[first:stop]
            self._has_vector[rows] = True
        failed = (*metrics.failed, *self._copy_vectors(metrics.failed))
        metrics = replace(metrics, failed=failed)
        self._metrics = metrics if self._metrics is None else self._metrics.plus(metrics)

        missing = ~self._has_vector
        failed_rows = [failed.row for failed in self._metrics.failed]
        for place in np.searchsorted(self._borders, failed_rows, side="right") - 1:
            segment = self.batch.segments[place]
            missing[segment.start : segment.stop] = False
        return np.flatnonzero(missing)

    def _copy_vectors(self, failed: tuple[FailedRow, ...]) -> list[FailedRow]:
        """Copy vectors to rows with equal texts; return those whose text cannot be encoded."""
        is_encoded = self._has_vector[self._originals]
        originals = self._originals[is_encoded]
        repeats = self._repeats[is_encoded]
        for start in range(0, len(repeats), _ROWS_AT_A_TIME):
            part = slice(start, start + _ROWS_AT_A_TIME)
            self._slot.copy_vectors(originals[part], repeats[part])
        self._has_vector[repeats] = True

        reasons = {each.row: each.reason for each in failed}
        originals = self._originals[~is_encoded].tolist()
        repeats = self._repeats[~is_encoded].tolist()
        self._originals = _NO_ROWS
        self._repeats = _NO_ROWS
        found: list[FailedRow] = []
        for original, repeat in zip(originals, repeats, strict=True):
            if original in reasons:
                found.append(FailedRow(repeat, reasons[original]))
        return found


def _distinct(
    slot: Slot, rows: np.ndarray | None, ledger: Ledger
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Return the rows that are encoded, the first of equal texts, or all if the comparison has no
    memory; then the rows with the text of an earlier one, and for each of these that earlier one.
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
        codes = encoded.indices.to_numpy()
        places = np.arange(count)
        first = np.empty(len(encoded.dictionary), np.intp)
        first[codes[::-1]] = places[::-1]
        originals = first[codes]
        is_repeat = originals != places
        all_rows = places if rows is None else rows
        return all_rows[~is_repeat], all_rows[is_repeat], all_rows[originals[is_repeat]]
    finally:
        ledger.release(size)
