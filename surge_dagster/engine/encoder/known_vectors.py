"""Vectors that some rows have already when they are put into a slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class KnownVectors:
    """The vectors of some of the rows that are appended together.

    Attributes:
        rows: their places among the appended ones, int64 [n], ascending.
        matrix: [n, dimension], of the slot's type.
        truncated: of their texts, bool [n].
    """

    rows: np.ndarray
    matrix: np.ndarray
    truncated: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def between(self, start: int, stop: int) -> KnownVectors | None:
        """Return those of rows start..stop, which count from 0 then; None if there are none."""
        first, end = np.searchsorted(self.rows, (start, stop)).tolist()
        if first == end:
            return None
        part = slice(first, end)
        return KnownVectors(self.rows[part] - start, self.matrix[part], self.truncated[part])
