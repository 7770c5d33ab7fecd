"""Quarantine: finds the text that ends workers, so that it costs its partition and nothing else.

A lost worker may have been killed from outside, or one of its texts may end every worker that
encodes it. So its rows go into quarantine, where each portion is encoded alone: when a worker is
lost again, that portion is the cause. It is cut into sixteen pieces until a single text is left; a
text that has ended two workers by itself has failed. Sixteen, because a harmless piece costs little
and a lost worker costs a model load.

Such a worker has just loaded its model and encoded a text of its own, so these losses count against
the text and not against its seat. Rows that share a group (the caller's partitions) with a failed
text are skipped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

PIECES = 16
# Six or seven losses identify one text; a SuperBatch in which nine partitions end workers has
# another problem.
MAX_LOSSES = 64
_LOSSES_PER_TEXT = 2


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A text that cannot be encoded.

    Attributes:
        reason: how the workers that tried it ended.
        was_killed: whether the machine killed the last one; it might encode the text another time.
        is_refused: no worker ended: the encoder behind it gave no vector for the text, and `reason`
            says why.
    """

    row: int
    reason: str
    was_killed: bool = False
    is_refused: bool = False

    @property
    def finding(self) -> str:
        if self.is_refused:
            return f"the encoder gave no vector for its text ({self.reason})"
        return f"its text ends every worker that encodes it ({self.reason})"


@dataclass(slots=True)
class QuarantinedRows:
    """`losses` counts the workers that were lost while encoding these rows alone."""

    start: int
    stop: int
    losses: int = 0


class Quarantine:
    """The quarantined rows of one SuperBatch.

    Attributes:
        failed: one text of each failed group, and each text that was refused.
        losses: workers lost to quarantined rows so far.
    """

    def __init__(self, borders: np.ndarray | None, rows: int) -> None:
        self._borders = borders
        self._rows = rows
        self._waiting: deque[QuarantinedRows] = deque()
        self._failed_groups: list[tuple[int, int]] = []
        self.failed: list[FailedRow] = []
        self.losses = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, start: int, stop: int) -> None:
        self._waiting.append(QuarantinedRows(start, stop))

    def narrow(self, rows: QuarantinedRows, reason: str, *, was_killed: bool = False) -> int:
        """Narrow down rows that were encoded alone when their worker was lost.

        Args:
            was_killed: see `FailedRow`.

        Returns how many rows failed: 0 or 1.
        """
        self.losses += 1
        rows.losses += 1
        count = rows.stop - rows.start
        if count > 1:
            size = -(-count // PIECES)
            starts = range(rows.start, rows.stop, size)
            pieces = [QuarantinedRows(start, min(start + size, rows.stop)) for start in starts]
            self._waiting.extendleft(reversed(pieces))
            return 0
        if rows.losses < _LOSSES_PER_TEXT:
            self._waiting.appendleft(rows)
            return 0
        group = self._group(rows.start)
        # Another worker may have been encoding rows of the same group when it failed.
        if group not in self._failed_groups:
            self._failed_groups.append(group)
            self.failed.append(FailedRow(rows.start, reason, was_killed))
        return 1

    def refuse(self, row: int, reason: str) -> None:
        """Let a row fail for which the encoder gave no vector, without a try in quarantine."""
        self.failed.append(FailedRow(row, reason, is_refused=True))
        group = self._group(row)
        if group not in self._failed_groups:
            self._failed_groups.append(group)

    def next(self) -> tuple[QuarantinedRows | None, int]:
        """Return the next rows to encode alone, or None, and how many rows were skipped.

        Skipped rows belong to failed groups.
        """
        skipped = 0
        while self._waiting:
            rows = self._waiting.popleft()
            failed = [
                one for one in self._failed_groups if one[0] < rows.stop and rows.start < one[1]
            ]
            if not failed:
                return rows, skipped
            first, end = failed[0]
            skipped += min(end, rows.stop) - max(first, rows.start)
            for start, stop in ((end, rows.stop), (rows.start, first)):
                if start < stop:
                    self._waiting.appendleft(QuarantinedRows(start, stop))
        return None, skipped

    def clear(self) -> None:
        self._waiting.clear()

    def _group(self, row: int) -> tuple[int, int]:
        if self._borders is None:
            return row, row + 1
        place = int(np.searchsorted(self._borders, row, side="right"))
        end = int(self._borders[place]) if place < len(self._borders) else self._rows
        return int(self._borders[place - 1]), end
