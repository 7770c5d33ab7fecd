"""The encode call of one SuperBatch: only rows without a vector are encoded, and of equal texts
only the first.

A second call encodes rows whose equal text is in a partition that failed.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        metrics: the costs so far, and the texts that cannot be encoded.
    """

    def __init__(self, pool: EncoderPool, batch: SuperBatch, memory: RunMemory) -> None:
        self.batch = batch
        self.metrics = EncodeMetrics()
        self._pool = pool
        self._slot = slot = batch.slot
        self._has_vector = np.zeros(len(slot), np.bool_)
        known = slot.known(0, len(slot))
        if known is not None:
            self._has_vector |= known
        rows = np.flatnonzero(~self._has_vector)
        self._borders = np.array([segment.start for segment in batch.segments])
        self._rows, self._repeats, self._originals = _distinct(slot, rows, memory.ledger)
        self.deduplicated = len(self._repeats)
        self._call: EncodeCall | None = None
        if len(self._rows) < len(slot):
            self._call = pool.submit(slot, self._borders, self._rows)
        elif batch.texts:
            self._call = pool.submit(slot, self._borders)

    def result(self, timeout_seconds: float | None = None) -> EncodeMetrics | None:
        """Wait until all rows have their vectors or have failed; return None after the timeout. Can
        be called again.

        Raises:
            EncoderError: the pool failed.
        """
        while self._call is not None:
            if self._call.result(timeout_seconds) is None:
                return None
            self.end()
            self._rows = self._waiting_rows()
            if len(self._rows):
                self._call = self._pool.submit(self._slot, self._borders, self._rows)
        return self.metrics

    @property
    def finished_texts(self) -> int:
        """How many texts of the pool's call have their vectors by now."""
        return 0 if self._call is None else self._call.finished_rows

    def end(self) -> None:
        """End the call without encoding further rows."""
        if self._call is None:
            return
        self._call.abandon()
        for first, stop in self._call.encoded:
            self._has_vector[self._rows[first:stop]] = True
        metrics = self._call.metrics
        failed = self._copy_vectors({each.row: each.reason for each in metrics.failed})
        self.metrics = self.metrics.plus(replace(metrics, failed=(*metrics.failed, *failed)))
        self._call = None

    def _waiting_rows(self) -> np.ndarray:
        """Return rows without a vector of partitions without a failed row: their equal text is in a
        partition that failed."""
        is_waiting = ~self._has_vector
        failed = [each.row for each in self.metrics.failed]
        for place in np.searchsorted(self._borders, failed, side="right") - 1:
            segment = self.batch.segments[place]
            is_waiting[segment.start : segment.stop] = False
        return np.flatnonzero(is_waiting)

    def is_encoded(self, segment: Segment) -> bool:
        """Whether all rows of a segment have their vectors; final once the call has ended."""
        return bool(self._has_vector[segment.start : segment.stop].all())

    def _copy_vectors(self, reasons: Mapping[int, str]) -> list[FailedRow]:
        """Copy vectors to rows with equal texts; return those whose text cannot be encoded.

        Args:
            reasons: why texts cannot be encoded, by row.
        """
        is_encoded = self._has_vector[self._originals]
        originals = self._originals[is_encoded]
        repeats = self._repeats[is_encoded]
        for start in range(0, len(repeats), _ROWS_AT_A_TIME):
            part = slice(start, start + _ROWS_AT_A_TIME)
            self._slot.copy_vectors(originals[part], repeats[part])
        self._has_vector[repeats] = True

        pairs = zip(self._repeats.tolist(), self._originals.tolist(), strict=True)
        failed = [FailedRow(row, reasons[equal]) for row, equal in pairs if equal in reasons]
        self._originals = _NO_ROWS
        self._repeats = _NO_ROWS
        return failed


def _distinct(
    slot: Slot, rows: np.ndarray, ledger: Ledger
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which of these rows are encoded, the first of equal texts, or all if the comparison
    has no memory; then the rows with the text of an earlier one, and for each of these that earlier
    one."""
    size = 4 * slot.text_bytes + 64 * len(rows)
    if len(rows) < 2 or not ledger.try_reserve(size):
        return rows, _NO_ROWS, _NO_ROWS
    try:
        texts = slot.texts(0, len(slot)).take(pa.array(rows))
        codes = pc.dictionary_encode(texts).indices.to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
        first = np.unique(codes, return_index=True)[1]
        originals = rows[first[codes]]
        is_repeat = originals != rows
        return rows[~is_repeat], rows[is_repeat], originals[is_repeat]
    finally:
        ledger.release(size)
