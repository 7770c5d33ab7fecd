"""The encode call of one SuperBatch: only rows without a vector are encoded, and of equal texts
only the first.

A second call encodes rows whose equal text is in a partition that failed.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        metrics: the costs so far, and the texts that cannot be encoded.
    """

    def __init__(self, pool: EncoderPool, batch: SuperBatch, memory: RunMemory) -> None:
        self.batch = batch
        self.metrics = EncodeMetrics()
        self._pool = pool
        self._slot = batch.slot
        self._borders = np.array([segment.start for segment in batch.segments])
        self._has_vector = self._slot.is_known(0, len(self._slot)).copy()
        missing = np.flatnonzero(~self._has_vector)
        self._repeats, self._originals = _repeats(self._slot, missing, memory.ledger)
        self._call: EncodeCall | None = None
        self._submit(np.setdiff1d(missing, self._repeats, assume_unique=True))

    @property
    def deduplicated(self) -> int:
        """How many rows get the vector of an equal text."""
        return len(self._repeats)

    @property
    def finished_texts(self) -> int:
        """How many texts of the pool's call have their vectors by now."""
        return 0 if self._call is None else self._call.finished_rows

    def result(self, timeout_seconds: float | None = None) -> EncodeMetrics | None:
        """Wait until all rows have their vectors or have failed; return None after the timeout. Can
        be called again.

        Raises:
            EncoderError: the pool failed.
        """
        while self._call is not None:
            if self._call.result(timeout_seconds) is None:
                return None
            self._take_vectors(self._call)
            self._submit(self._waiting_rows())
        return self.metrics

    def abandon(self) -> None:
        """End the call without encoding further rows; those that are encoded keep their vectors."""
        if self._call is not None:
            self._call.abandon()
            self._take_vectors(self._call)
            self._call = None

    def is_encoded(self, segment: Segment) -> bool:
        """Whether all rows of a segment have their vectors; final once the call has ended."""
        return bool(self._has_vector[segment.start : segment.stop].all())

    def _submit(self, rows: np.ndarray) -> None:
        """Let the pool encode these rows of the slot, if there are any."""
        self._call = None
        self._call_rows = rows
        if len(rows):
            has_all = len(rows) == len(self._slot)
            self._call = self._pool.submit(self._slot, self._borders, None if has_all else rows)

    def _take_vectors(self, call: EncodeCall) -> None:
        """Count what a call has encoded, and give equal rows the same vectors."""
        for first, stop in call.encoded:
            self._has_vector[self._call_rows[first:stop]] = True
        self._copy_vectors()
        metrics = call.metrics
        failed = (*metrics.failed, *self._failed_repeats(metrics.failed))
        self.metrics = self.metrics.plus(replace(metrics, failed=failed))

    def _copy_vectors(self) -> None:
        """Copy vectors to rows without one that have an equal text."""
        can_copy = self._has_vector[self._originals] & ~self._has_vector[self._repeats]
        originals = self._originals[can_copy]
        repeats = self._repeats[can_copy]
        for start in range(0, len(repeats), _ROWS_AT_A_TIME):
            part = slice(start, start + _ROWS_AT_A_TIME)
            self._slot.copy_vectors(originals[part], repeats[part])
        self._has_vector[repeats] = True

    def _failed_repeats(self, failed: Iterable[FailedRow]) -> list[FailedRow]:
        """Return the rows whose text equals one that cannot be encoded."""
        found: list[FailedRow] = []
        for original in failed:
            for row in self._repeats[self._originals == original.row].tolist():
                found.append(FailedRow(row, original.reason))
        return found

    def _waiting_rows(self) -> np.ndarray:
        """Return rows without a vector of partitions without a failed row: their equal text is in a
        partition that failed."""
        is_waiting = ~self._has_vector
        failed = [each.row for each in self.metrics.failed]
        for place in np.searchsorted(self._borders, failed, side="right") - 1:
            segment = self.batch.segments[place]
            is_waiting[segment.start : segment.stop] = False
        return np.flatnonzero(is_waiting)


def _repeats(slot: Slot, rows: np.ndarray, ledger: Ledger) -> tuple[np.ndarray, np.ndarray]:
    """Return which of these rows have the text of an earlier one, and for each the first row with
    it; none if the comparison has no memory."""
    size = 4 * slot.text_bytes + 64 * len(rows)
    if len(rows) < 2 or not ledger.try_reserve(size):
        return _NO_ROWS, _NO_ROWS
    try:
        texts = slot.texts(0, len(slot)).take(pa.array(rows))
        codes = pc.dictionary_encode(texts).indices.to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
        first = np.unique(codes, return_index=True)[1]
        originals = rows[first[codes]]
        is_repeat = originals != rows
        return rows[is_repeat], originals[is_repeat]
    finally:
        ledger.release(size)
