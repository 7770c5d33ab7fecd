"""Finding the text that ends workers, so that it costs its partition and nothing else.

A worker that is lost says nothing about why: it may have been killed from outside, or one of its texts may do this to
every worker it meets. So its chunks become suspects, which are encoded alone: when a worker is lost again there is no
doubt about the chunk. It is cut into sixteen pieces, each again a suspect, until a single text is left, and a text that
has ended two workers all by itself has failed. Sixteen, because a piece that does no harm costs little and a lost
worker costs a model's load: a text among 8,192 is found after six losses, where halving would take sixteen.

A worker that takes a suspect has just loaded its model and encoded a text of its own to show that it can, so these
losses are held against the text and not against the worker's seat. Rows that share a group with a failed text (the
caller's partitions) are not needed any more and are skipped: a partition full of such texts costs no more than one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

PIECES = 16
# Six or seven make one text known; a SuperBatch in which nine partitions end workers has another problem.
MOST_LOSSES = 64
_LOSSES_OF_A_TEXT = 2


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A text that could not be encoded: its row in the SuperBatch, and what happened to the workers that tried."""

    row: int
    reason: str


@dataclass(slots=True)
class Suspect:
    """Rows that a worker was lost with; `losses` counts those it caused when it was encoded alone."""

    start: int
    stop: int
    losses: int = 0


class Isolation:
    """The suspects of one SuperBatch.

    Args:
        borders: first rows of the groups that fail as a whole, ascending, beginning with 0; None: each row by itself.
        rows: rows of the SuperBatch.

    Attributes:
        failed: one text of each group that failed, the first that was found.
    """

    def __init__(self, borders: np.ndarray | None, rows: int) -> None:
        self._borders = borders
        self._rows = rows
        self._waiting: deque[Suspect] = deque()
        self._failed_groups: list[tuple[int, int]] = []
        self.failed: list[FailedRow] = []
        self.losses = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def accuse(self, start: int, stop: int) -> None:
        """A worker was lost with these rows and perhaps others: they have to be encoded alone."""
        self._waiting.append(Suspect(start, stop))

    def convict(self, suspect: Suspect, reason: str) -> int:
        """A worker was lost with this suspect alone; gives the number of rows (0 or 1) that are settled by it."""
        self.losses += 1
        suspect.losses += 1
        count = suspect.stop - suspect.start
        if count > 1:
            size = -(-count // PIECES)
            pieces = [
                Suspect(first, min(first + size, suspect.stop)) for first in range(suspect.start, suspect.stop, size)
            ]
            self._waiting.extendleft(reversed(pieces))
        elif suspect.losses < _LOSSES_OF_A_TEXT:
            self._waiting.appendleft(suspect)
        else:
            group = self._group(suspect.start)
            # Another worker may have been at work on the same group when it failed.
            if group not in self._failed_groups:
                self._failed_groups.append(group)
                self.failed.append(FailedRow(suspect.start, reason))
            return 1
        return 0

    def next(self) -> tuple[Suspect | None, int]:
        """The next suspect to encode alone, and how many rows were found to be no longer needed on the way to it."""
        skipped = 0
        while self._waiting:
            suspect = self._waiting.popleft()
            kept = self._needed(suspect)
            skipped += suspect.stop - suspect.start - sum(part.stop - part.start for part in kept)
            if kept:
                self._waiting.extendleft(reversed(kept[1:]))
                return kept[0], skipped
        return None, skipped

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def _needed(self, suspect: Suspect) -> list[Suspect]:
        """What is left of a suspect without the rows of failed groups."""
        parts = [suspect]
        for first, end in self._failed_groups:
            left = []
            for part in parts:
                if end <= part.start or part.stop <= first:
                    left.append(part)
                    continue
                if part.start < first:
                    left.append(Suspect(part.start, first))
                if end < part.stop:
                    left.append(Suspect(end, part.stop))
            parts = left
        return parts

    def _group(self, row: int) -> tuple[int, int]:
        if self._borders is None:
            return row, row + 1
        place = int(np.searchsorted(self._borders, row, side="right"))
        end = int(self._borders[place]) if place < len(self._borders) else self._rows
        return int(self._borders[place - 1]), end
