"""CostLimit: ends a run before its tokens cost more than they may.

The tokens of a text are known when it is answered. Before that it counts with a bound: a token for
each of its bytes and of those that are sent with it, and a few around them. That is several times
too much, so near the limit the texts of a SuperBatch are sent in parts: what the answer to a part
has left is for the next one. A server that puts a prompt of its own before each text may exceed the
bound until its first answer.
"""

from __future__ import annotations

import numpy as np

_TOKENS_AROUND_TEXT = 4  # special tokens; models have at most three


class CostLimit:
    """Counts the tokens of one run: `reserve` before texts are sent, `settle` after the answer.

    Args:
        max_cost: what all tokens of the run may cost, in the currency of the price.
        added_bytes: bytes that are sent with a text at most: its prompt and a probe.
    """

    def __init__(self, price_per_million_tokens: float, max_cost: float, added_bytes: int) -> None:
        self._price = price_per_million_tokens / 1e6
        self._max_cost = max_cost
        self._bytes_around_text = added_bytes + _TOKENS_AROUND_TEXT
        self._bound_per_byte = 1.0
        self._spent = 0
        self._bytes_under_way = 0
        self._sends_parts = False

    def fits(self, sizes: np.ndarray) -> bool:
        """Return whether texts of these bytes can be sent in one part next to those under way."""
        return not self._sends_parts and self._fitting(sizes) == len(sizes)

    def reserve(self, sizes: np.ndarray) -> int:
        """Return how many of the texts, from the first one on, may be sent now, and reserve what
        they may cost."""
        count = self._fitting(sizes)
        self._sends_parts = self._sends_parts or count < len(sizes)
        self._bytes_under_way += self._bytes(sizes[:count])
        return count

    def settle(self, sizes: np.ndarray, tokens: int) -> None:
        """Replace what these texts may cost by the tokens that the server counted: 0 if they were
        not sent."""
        size = self._bytes(sizes)
        self._bytes_under_way -= size
        self._spent += tokens
        expected = self._bound_per_byte * size
        if tokens > expected:
            self._bound_per_byte *= tokens / expected

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
        costs = self._price * (self._spent + self._bound_per_byte * sent)
        return int(np.searchsorted(costs, self._max_cost, side="right"))

    def _bytes(self, sizes: np.ndarray) -> int:
        return int((sizes + self._bytes_around_text).sum())
