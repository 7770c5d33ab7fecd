"""CostLimit: ends a run before its tokens cost more than they may.

The tokens of a text are known when it is answered. Before that it counts with the most that it can
have: a token for each of its bytes and those of the prompt, and a few around them. That is several
times too much, so near the limit the texts of a SuperBatch are sent in parts: what the answer to a
part has left is for the next one.
"""

from __future__ import annotations

import numpy as np

_TOKENS_AROUND_TEXT = 4


class CostLimit:
    """Counts the tokens of one run.

    Args:
        max_cost: of all tokens, in the currency of the price.
        prompt_bytes: sent with each text.
    """

    def __init__(self, price_per_million_tokens: float, max_cost: float, prompt_bytes: int) -> None:
        self._price = price_per_million_tokens / 1e6
        self._max_cost = max_cost
        self._bytes_around_text = prompt_bytes + _TOKENS_AROUND_TEXT
        self._most_per_byte = 1.0
        self._spent = 0
        self._bytes_under_way = 0
        self._is_near = False

    def fits(self, sizes: np.ndarray) -> bool:
        """Whether texts of these bytes can be sent in one part while others are under way."""
        return not self._is_near and self._fitting(sizes) == len(sizes)

    def take(self, sizes: np.ndarray) -> int:
        """Return how many of the texts, from the first one on, may be sent now, and count them."""
        count = self._fitting(sizes)
        self._is_near = self._is_near or count < len(sizes)
        self._bytes_under_way += self._bytes(sizes[:count])
        return count

    def answered(self, sizes: np.ndarray, tokens: int) -> None:
        """Count texts that were taken with their own tokens, or none if they were not sent."""
        size = self._bytes(sizes)
        self._bytes_under_way -= size
        self._spent += tokens
        expected = self._most_per_byte * size
        if tokens > expected:  # of a server that puts a prompt of its own before each text
            self._most_per_byte *= tokens / expected

    def message(self, first_key: str) -> str:
        """Return why nothing else is sent.

        Args:
            first_key: the partition of the first text that is left.
        """
        return (
            f"max_cost is {self._max_cost:g}: {self._spent:,} tokens have cost "
            f"{self._price * self._spent:.6g}, and the next text may cost more than is left. What "
            f"is published stays; the partitions from {first_key!r} on are left. To encode them, "
            "run again: max_cost counts for each run."
        )

    def _fitting(self, sizes: np.ndarray) -> int:
        sent = self._bytes_under_way + np.cumsum(sizes + self._bytes_around_text)
        costs = self._price * (self._spent + self._most_per_byte * sent)
        return int(np.searchsorted(costs, self._max_cost, side="right"))

    def _bytes(self, sizes: np.ndarray) -> int:
        return int((sizes + self._bytes_around_text).sum())
