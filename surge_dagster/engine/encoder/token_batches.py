"""Which texts share a forward pass: groups of exactly equal token length, cut at a token budget.

Texts of one length need no padding and no attention mask, and the budget (tokens, not texts) keeps each pass at the
size where the device is just full: with texts of very different lengths a fixed number of texts is either too many or
too few. The plan depends on nothing but the lengths, so the same texts always meet in the same batches. Largest passes
come first, so that the streams of a device end together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows that share a forward pass, and their common length in tokens."""

    rows: np.ndarray
    length: int

    @property
    def tokens(self) -> int:
        return len(self.rows) * self.length


def plan_batches(lengths: np.ndarray, token_budget: int) -> list[TokenBatch]:
    """Cuts rows of the given token lengths into batches.

    A text that is over the budget by itself gets a batch of its own.

    Args:
        lengths: tokens of each row, at least 1.
        token_budget: most tokens of one batch.
    """
    if len(lengths) == 0:
        return []
    # A stable sort keeps rows of one length in their own order: the plan is a function of the lengths alone.
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order]
    borders = np.flatnonzero(np.diff(ordered)) + 1
    batches = []
    for group in np.split(order, borders):
        length = int(lengths[group[0]])
        size = max(1, token_budget // length)
        batches.extend(TokenBatch(group[start : start + size], length) for start in range(0, len(group), size))
    batches.sort(key=lambda batch: (-batch.tokens, -batch.length))
    return batches
