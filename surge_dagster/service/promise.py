"""The promise of a query lane: the seconds within which an accepted request is answered.

A request is expected to take

    expected seconds = tokens of unanswered texts, its own included / tokens per second

It is accepted if one and a half times that is within the promise, and else refused with the time to
come back. The rate follows from the pool's `Speed`, and passes that are slower lower it. The margin
is for passes that take longer than usual, and for reading requests and writing answers. Late
answers are rare, but possible: the promise is measured, and not proved.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

MARGIN = 1.5
# A request may come when a full pass has just begun: it waits for that one and for its own.
_LEAST_PASSES = 2
_DEFAULT_PASSES = 3
_LEAST_DEFAULT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Promise:
    """What a query lane promises.

    Attributes:
        tokens_per_second: of full passes during bulk work, as expected at the start.
        pass_tokens: of a full pass.
        wanted_seconds: None: what three full passes need, and at least 100 ms.
    """

    tokens_per_second: float
    pass_tokens: int
    wanted_seconds: float | None = None

    @property
    def smallest_seconds(self) -> float:
        """The smallest promise that can be kept."""
        return MARGIN * _LEAST_PASSES * self.pass_tokens / self.tokens_per_second

    @property
    def promised_seconds(self) -> float:
        """From the acceptance of a request to its answer."""
        wanted = self.wanted_seconds
        if wanted is None:
            wanted = max(
                _LEAST_DEFAULT_SECONDS, self.smallest_seconds * _DEFAULT_PASSES / _LEAST_PASSES
            )
        return max(wanted, self.smallest_seconds)

    @property
    def largest_tokens(self) -> int:
        """Tokens of the largest request that is accepted."""
        return math.floor(self.promised_seconds / MARGIN * self.tokens_per_second + 1e-6)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it by name, for clients."""
        return asdict(self) | {
            "promised_seconds": self.promised_seconds,
            "smallest_seconds": self.smallest_seconds,
            "largest_tokens": self.largest_tokens,
        }
