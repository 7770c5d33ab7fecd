"""Which texts share a forward pass: groups of equal token length, cut at a token budget.

Texts of one length need no padding, and the budget (tokens, not texts) keeps each pass at the size where the device is
just full: with texts of very different lengths a fixed number of texts is either too many or too few. What is left of
a group is filled up with slightly shorter texts as long as their padding costs less than another pass would: a pass
has a price of its own, and on some backends every new shape has one too.

The plan depends on nothing but the lengths, so the same texts always meet in the same batches. Largest passes come
first, so that the streams of a device end together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows that share a forward pass, and the length in tokens that they are padded to.

    `exact` says that every row has this length by itself; `first` is where the rows begin in `longest_first`.
    """

    rows: np.ndarray
    length: int
    exact: bool
    first: int

    @property
    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return len(self.rows) * self.length

    def halves(self) -> list[TokenBatch]:
        """The same rows as two batches of the same length; there are at least two."""
        half = len(self.rows) // 2
        return [replace(self, rows=self.rows[:half]), replace(self, rows=self.rows[half:], first=self.first + half)]


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Row numbers by descending length: every batch is a run of them."""
    # A stable sort keeps rows of one length in their own order: the plan is a function of the lengths alone.
    return np.argsort(-lengths, kind="stable")


def plan_batches(lengths: np.ndarray, token_budget: int, pass_tokens: int = 0) -> list[TokenBatch]:
    """Cuts rows of the given token lengths into batches.

    A text that is over the budget by itself gets a batch of its own.

    Args:
        lengths: tokens of each row.
        token_budget: most tokens of one batch, padding included.
        pass_tokens: what a pass costs by itself, in tokens; 0 allows no padding.
    """
    if len(lengths) == 0:
        return []
    order = longest_first(lengths)
    # Tokenizers without special tokens make nothing of an empty text: such a row is computed as one token of padding.
    ordered = np.maximum(lengths[order], 1)
    borders = [*(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(order)]
    batches: list[TokenBatch] = []
    start = group = 0
    while start < len(order):
        length = int(ordered[start])
        end = min(len(order), start + max(1, token_budget // length))
        stop, padding = start, 0
        while stop < end:
            take = min(borders[group], end) - stop
            padding += take * (length - int(ordered[stop]))
            # Rows of another length come in only while their padding is cheaper than the pass that it saves.
            if padding > pass_tokens:
                break
            stop += take
            group += stop == borders[group]
        exact = int(lengths[order[stop - 1]]) == length
        batches.append(TokenBatch(order[start:stop], length, exact, first=start))
        start = stop
    batches.sort(key=lambda batch: (-batch.tokens, -batch.length))
    return batches
