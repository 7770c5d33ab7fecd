"""How many of a stream of texts are duplicates, in bounded memory.

Exact for as many distinct texts as are kept. Beyond that only those are kept whose hash ends in so many zero bits, a
half, a quarter and so on of all, and the others are concluded from them: with 262,144 kept the estimate is off by about
0.2 %. Texts count as equal when 64 bits of their hashes are.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

MOST_KEPT = 1 << 18
_MOST_BATCHES = 1024


class DistinctTexts:
    """Counts texts and distinct texts.

    Args:
        most_kept: distinct texts that are remembered, 8 bytes each; as many more wait to be sorted in.
    """

    def __init__(self, most_kept: int = MOST_KEPT) -> None:
        self._most_kept = most_kept
        self._kept = np.empty(0, np.uint64)
        self._new: list[np.ndarray] = []
        self._new_texts = 0
        self._zero_bits = 0
        self.texts = 0

    def add(self, texts: pa.LargeStringArray) -> None:
        """Count texts without nulls."""
        self.texts += len(texts)
        if len(texts):
            self._take(_hashes(texts))

    def join(self, other: DistinctTexts) -> None:
        """Count all that another one has counted."""
        other._settle()
        self.texts += other.texts
        self._zero_bits = max(self._zero_bits, other._zero_bits)
        self._take(other._kept)

    @property
    def distinct(self) -> int:
        """Different texts, exactly or by estimate, never more than all."""
        self._settle()
        return min(self.texts, len(self._kept) << self._zero_bits)

    @property
    def duplicate_share(self) -> float:
        """Share of the texts that repeat one that came before, 0 to 1."""
        return 1 - self.distinct / self.texts if self.texts else 0.0

    def _take(self, hashes: np.ndarray) -> None:
        hashes = self._thinned(hashes)
        self._new.append(hashes)
        self._new_texts += len(hashes)
        if self._new_texts > self._most_kept or len(self._new) > _MOST_BATCHES:
            self._settle()

    def _settle(self) -> None:
        """Sort what is new into what is kept: not for every batch, since that costs as much as there is kept."""
        self._kept = np.unique(np.concatenate([self._thinned(some) for some in (self._kept, *self._new)]))
        self._new, self._new_texts = [], 0
        while len(self._kept) > self._most_kept:
            self._zero_bits += 1
            self._kept = self._thinned(self._kept)

    def _thinned(self, hashes: np.ndarray) -> np.ndarray:
        return hashes[hashes & np.uint64((1 << self._zero_bits) - 1) == 0]


def _hashes(texts: pa.LargeStringArray) -> np.ndarray:
    # Runs that only write embeddings are spared polars.
    import polars as pl

    return pl.Series(values=texts).hash(seed=0).to_numpy()
