"""The forward passes of a chunk: which texts share a pass.

Texts of equal token length share a pass, cut at a token budget: no padding, and each pass has the
size where the device is just full. The rest of a length group is filled with slightly shorter texts
as long as their padding costs less than another pass. Equal chunks get equal batches. Largest
passes come first, so that streams end together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows that share a forward pass.

    Attributes:
        length: tokens that each row is padded to.
        exact: whether every row has this length without padding.
        first: position of the first row in `longest_first`.
    """

    rows: np.ndarray
    length: int
    exact: bool
    first: int

    @property
    def tokens(self) -> int:
        return len(self.rows) * self.length

    @property
    def padded_tokens(self) -> int:
        return self.tokens

    def halves(self) -> list[TokenBatch]:
        half = len(self.rows) // 2
        return [
            replace(self, rows=self.rows[:half]),
            replace(self, rows=self.rows[half:], first=self.first + half),
        ]


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Row numbers by descending length: every batch is a run of them."""
    # A stable sort keeps rows of equal length in order, so the plan depends only on the lengths.
    return np.argsort(-lengths, kind="stable")


def plan_batches(lengths: np.ndarray, token_budget: int, pass_tokens: int = 0) -> list[TokenBatch]:
    """Cut rows of these token lengths into batches; a text over the budget has its own.

    `pass_tokens` is the fixed cost of a pass, in tokens; 0 allows no padding.
    """
    if len(lengths) == 0:
        return []
    order = longest_first(lengths)
    # An empty text has no tokens with some tokenizers: such a row is computed as one token of
    # padding.
    ordered = np.maximum(lengths[order], 1)
    borders = [*(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(order)]
    batches: list[TokenBatch] = []
    start = group = 0
    while start < len(order):
        length = int(ordered[start])
        end = min(len(order), start + max(1, token_budget // length))
        stop = start
        padding = 0
        while stop < end:
            take = min(borders[group], end) - stop
            padding += take * (length - int(ordered[stop]))
            # Shorter rows are added only while their padding is cheaper than the pass that they
            # save.
            if padding > pass_tokens:
                break
            stop += take
            if stop == borders[group]:
                group += 1
        exact = int(lengths[order[stop - 1]]) == length
        batches.append(TokenBatch(order[start:stop], length, exact, first=start))
        start = stop
    batches.sort(key=lambda batch: (-batch.tokens, -batch.length))
    return batches
