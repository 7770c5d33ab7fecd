"""The promise of a query lane: the seconds within which an accepted request is answered.

A request is expected to take the passes of the texts that wait, its own included, and the pass that
is under way:

    expected seconds = (⌈waiting tokens / tokens of a full pass⌉ + 1) · tokens of a full pass / tokens per second

It is accepted if one and a half times that is within the promise, and else refused with the time to
come back. The rate is that of the pool's `Speed`, and follows the passes of requests. The margin is for
passes that take longer than usual, and for reading requests and writing answers: it makes late
answers rare, and excludes none.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from surge_dagster.engine.encoder.devices import device_kind
from surge_dagster.engine.errors import ConfigError

MARGIN = 1.5
# The promise that is given if none was requested: of two full passes that wait, and for small
# models of requests that are read and answers that are written.
_DEFAULT_PASSES, _LEAST_DEFAULT_SECONDS = 2, 0.1
# Weights of the kernel's scheduler: each step of niceness divides the share by 1.25.
_NICE_STEP, _MOST_NICE = 1.25, 19
# Of workers for queries: the process that answers and refuses requests comes first.
QUERY_NICENESS = 4
LEAST_SHARE, MOST_SHARE = 0.035, 0.5


@dataclass(frozen=True, slots=True)
class Promise:
    """What a query lane promises, and what that rests on.

    Attributes:
        tokens_per_second: of full passes during bulk work, as measured at the start.
        pass_tokens: of a full pass.
        promised_seconds: from the acceptance of a request to its answer.
    """

    tokens_per_second: float
    pass_tokens: int
    promised_seconds: float

    def __str__(self) -> str:
        return f"the promised {1000 * self.promised_seconds:.0f} ms"

    @property
    def full_pass_seconds(self) -> float:
        return self.pass_tokens / self.tokens_per_second

    def expected_seconds(
        self,
        waiting_tokens: int,
        tokens_per_second: float | None = None,
        under_way_seconds: float = 0.0,
    ) -> float:
        """Return the seconds until all that waits is answered.

        Args:
            tokens_per_second: a newer rate.
            under_way_seconds: that the pass under way has taken; it counts as at least a full one.
        """
        pass_seconds = self.pass_tokens / (tokens_per_second or self.tokens_per_second)
        passes = math.ceil(waiting_tokens / self.pass_tokens)
        return max(pass_seconds, under_way_seconds) + passes * pass_seconds

    @property
    def smallest_seconds(self) -> float:
        """The smallest promise with which any request is accepted."""
        return MARGIN * self.expected_seconds(1)

    @property
    def largest_tokens(self) -> int:
        """Tokens of the largest request that is accepted if none waits."""
        passes = self.promised_seconds / (MARGIN * self.full_pass_seconds) + 1e-9
        return max(0, math.floor(passes) - 1) * self.pass_tokens

    def as_dict(self) -> dict[str, Any]:
        """Return all of it by name, with what a client can plan by."""
        limits = {"smallest_seconds": self.smallest_seconds, "largest_tokens": self.largest_tokens}
        return asdict(self) | limits

    def promising(self, promised_seconds: float | None) -> Promise:
        """Return the same with another promise; None: what two full passes that wait need.

        Raises:
            ConfigError: no request could be accepted; names the smallest promise that can be made.
        """
        if promised_seconds is None:
            of_passes = MARGIN * self.expected_seconds(_DEFAULT_PASSES * self.pass_tokens)
            promised_seconds = max(_LEAST_DEFAULT_SECONDS, of_passes)
        if not self.smallest_seconds <= promised_seconds < math.inf:
            raise ConfigError(
                f"a promise of {1000 * promised_seconds:g} ms cannot be kept here (--promise-ms): a full pass of "
                f"{self.pass_tokens:,} tokens takes {1000 * self.full_pass_seconds:.3g} ms during bulk work. The "
                f"smallest promise is {math.ceil(1000 * self.smallest_seconds)} ms; use that, a smaller model, or a "
                "faster device"
            )
        return replace(self, promised_seconds=promised_seconds)


def kept_share(devices: str, bulk_share: float) -> float:
    """φ: what niceness gives on a CPU; on a GPU all processes have equal slices of time, one of
    queries among them."""
    workers = Counter(devices.split(","))
    most = max(workers.values())  # that encode documents on one card
    if device_kind(next(iter(workers))) == "cuda":
        return most / (most + 1)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    documents, queries = (
        min(_MOST_NICE, own + more) for more in (bulk_niceness(bulk_share), QUERY_NICENESS)
    )
    return 1 / (1 + _NICE_STEP ** (documents - queries))


def bulk_niceness(bulk_share: float) -> int:
    """The highest niceness at which workers get at least this share of a core beside those for
    queries.

    Raises:
        ConfigError: the share is out of its range.
    """
    if not LEAST_SHARE <= bulk_share <= MOST_SHARE:
        raise ConfigError(
            f"bulk_share, the share of bulk work, is {LEAST_SHARE:g} (less, the scheduler does not give) to "
            f"{MOST_SHARE:g}, not {bulk_share:g}"
        )
    return QUERY_NICENESS + int(math.log((1 - bulk_share) / bulk_share, _NICE_STEP) + 1e-9)
