"""The promise of a query lane: the seconds within which an accepted request is answered.

A request is expected to take the passes of the texts that wait, its own included, and the pass that
is under way:

    expected seconds = (⌈waiting tokens / tokens of a full pass⌉ + 1) · tokens of a full pass / tokens per second

It is accepted if one and a half times that is within the promise, and else refused with the time to
come back. The rate is measured at the start, and again by the passes of requests. The margin is for
passes that take longer than usual, and for reading requests and writing answers: it makes late
answers rare, and excludes none.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from surge_dagster.engine.encoder.devices import device_kind
from surge_dagster.engine.encoder.speed import speed_texts
from surge_dagster.engine.errors import ConfigError

MARGIN = 1.5
# The promise that is given if none was requested: of two full passes that wait, and for small
# models of requests that are read and answers that are written.
_DEFAULT_PASSES, _LEAST_DEFAULT_SECONDS = 2, 0.1
# of the tokens per second of the fastest size: larger passes have a longer promise
_FAST_ENOUGH = 0.8
_SIZES = (1 / 16, 1 / 4, 1)  # of the saturation point
_ROUNDS = 3
_MOST_SECONDS = 20.0
_WORDS = (6, 40)
_TEXTS = 64
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


def pass_sizes(saturation_tokens: int, longest_text: int) -> list[int]:
    """Return tokens of passes that are timed: up to the saturation point, and no fewer than a text
    has."""
    return sorted({max(round(share * saturation_tokens), longest_text) for share in _SIZES})


def measure_passes(
    encode: Callable[[list[str]], object],
    count: Callable[[list[str]], np.ndarray],
    sizes: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, float]:
    """Time passes of these sizes, and return the tokens of a full pass and its tokens per second.

    A full pass is of the smallest size that is nearly as fast as the fastest one. A first round
    warms up. A slow model is timed in fewer passes.

    Args:
        count: gives the tokens of each text.
    """
    batches = {size: _texts_of(size, count) for size in sizes}
    slowest_seconds = dict[int, float]()
    spent_seconds = 0.0
    for is_warm in (False, *[True] * _ROUNDS):
        for size, (texts, _) in batches.items():
            begun = clock()
            encode(texts)
            seconds = max(clock() - begun, 1e-9)
            spent_seconds += seconds
            if is_warm:
                slowest_seconds[size] = max(seconds, slowest_seconds.get(size, 0.0))
            elif spent_seconds > _MOST_SECONDS:
                slowest_seconds[size] = seconds
            if spent_seconds > _MOST_SECONDS:
                return _full_pass(batches, slowest_seconds)
    return _full_pass(batches, slowest_seconds)


def _full_pass(
    batches: dict[int, tuple[list[str], int]], slowest_seconds: dict[int, float]
) -> tuple[int, float]:
    rates = {size: batches[size][1] / seconds for size, seconds in slowest_seconds.items()}
    enough = _FAST_ENOUGH * max(rates.values())
    size = min(size for size, rate in rates.items() if rate >= enough)
    return size, rates[size]


def _texts_of(most_tokens: int, count: Callable[[list[str]], np.ndarray]) -> tuple[list[str], int]:
    """Return texts of at most so many tokens together, but at least one, and their tokens."""
    texts = speed_texts(_TEXTS, *_WORDS)
    tokens = np.maximum(count(texts), 1)
    times = 1 + most_tokens // int(tokens.sum())
    ends = np.cumsum(np.tile(tokens, times))
    rows = max(1, int(np.searchsorted(ends, most_tokens, side="right")))
    return (texts * times)[:rows], int(ends[rows - 1])


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
