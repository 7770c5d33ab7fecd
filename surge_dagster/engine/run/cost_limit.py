"""CostLimit: ends a run before its tokens cost more than they may.

The tokens of a SuperBatch are known when it is answered, so before that they are estimated with a
margin: as many per byte as in the answers so far, and a quarter more. SuperBatches that are
answered count with their own tokens. Equal texts count as if each was sent.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.errors import MaxCostReached

_MARGIN = 1.25
_FIRST_MARGIN = 2.0  # of the tokens per byte of earlier runs
_TOKENS_AROUND_TEXT = 4


class CostLimit:
    """Counts the tokens of one run.

    Args:
        max_cost: of all tokens, in the currency of the price.
        tokens_per_byte: of earlier runs, or of the start.
    """

    def __init__(
        self, price_per_million_tokens: float, max_cost: float, tokens_per_byte: float
    ) -> None:
        self._price = price_per_million_tokens / 1e6
        self._max_cost = max_cost
        self._first_per_byte = _FIRST_MARGIN * tokens_per_byte
        self._answered_per_byte = 0.0
        self._spent = 0
        self._expected = deque[tuple[int, int]]()  # bytes and tokens of SuperBatches under way

    def take(self, slot: Slot, first_key: str) -> None:
        """Count a SuperBatch that is about to be sent.

        Args:
            first_key: its first partition.

        Raises:
            MaxCostReached: its tokens may cost more than is left.
        """
        size, texts = _to_send(slot)
        per_byte = _MARGIN * self._answered_per_byte or self._first_per_byte
        tokens = round(per_byte * size) + _TOKENS_AROUND_TEXT * texts
        under_way = sum(expected for _, expected in self._expected)
        cost = self._price * (self._spent + under_way + tokens)
        if cost > self._max_cost:
            raise MaxCostReached(
                f"max_cost is {self._max_cost:g}: {self._spent:,} tokens have cost "
                f"{self._price * self._spent:.6g}, and with the next {texts:,} texts the cost may "
                f"be {cost:.6g}. What is published stays; the partitions from {first_key!r} on are "
                "left. To encode them, run again: max_cost counts for each run."
            )
        self._expected.append((size, tokens))

    def answered(self, costs: Costs) -> None:
        """Count the oldest SuperBatch under way with its own tokens."""
        size, _ = self._expected.popleft()
        self._spent += costs.tokens
        if size:
            self._answered_per_byte = max(self._answered_per_byte, costs.tokens / size)


def _to_send(slot: Slot) -> tuple[int, int]:
    """Return the bytes and the number of the texts without a vector."""
    count = len(slot)
    is_missing = ~slot.is_known(0, count)
    sizes = np.diff(slot.offsets[: count + 1])
    return int(sizes[is_missing].sum()), int(np.count_nonzero(is_missing))
