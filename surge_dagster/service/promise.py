"""The promise of a query lane: how long an accepted request takes at most, and which requests are accepted.

S(T), the seconds of a pass of T tokens, is a line that no pass timed at the start lies above. With B tokens waiting,
those of the request included, it is answered within

    D(B) = P + (⌈B/K⌉ + 1)·S(K)/(1 - φ) + P·[φ > 0] + h

K are the tokens of a full pass, from which larger ones are little faster; one may be under way when the request comes.
φ is the share of the device that bulk work keeps, P the longest wait for the device, h the handling outside of passes.
A request is accepted only if D(B) is within the promise: those that are accepted keep it, and the others are refused
early, with a time to come back.

Passes are timed beside a busy thread, as under overload: answering and refusing requests takes cores from the workers.

Other programs may take a device from its workers later. So a lane adds to D(B) by how much the pass under way is late,
and for each pass what the last ones took beyond S(T).
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from surge_dagster.engine.encoder.costs import speed_texts
from surge_dagster.engine.encoder.devices import device_kind
from surge_dagster.engine.errors import ConfigError

HANDLING_SECONDS = 0.002
# Of each request that waits: the answers of a pass, which may be hundreds, are written one after the other, beside the
# refusals of what comes meanwhile; at four times the capacity on two cores (docs/benchmarks.md).
ANSWER_SECONDS = 0.005
# The workers of a CPU are processes that the kernel schedules. A worker that wakes up takes a core from one of a higher
# niceness at once, or at the next tick: 4 ms in kernels with 250 of them per second, as distributions build them. On a
# GPU a query of one text took at most 2 ms longer beside bulk work (docs/benchmarks.md).
DEVICE_WAIT_SECONDS = 0.004
_DEFAULT_PASSES = 2  # full passes that wait, in the promise that is given where none was requested
# Weights of the kernel's scheduler: each step of niceness divides the share by 1.25.
_NICE_STEP, _MOST_NICE = 1.25, 19
# Of workers for queries: who answers and refuses requests comes first, else requests wait unread where cores are short.
QUERY_NICENESS = 4
LEAST_SHARE, MOST_SHARE = 0.035, 0.5
_FAST_ENOUGH = 0.8  # of the tokens per second of the largest pass: a larger K has a longer promise
_ROUNDS, _ENOUGH_SECONDS, _MOST_SECONDS = 3, 5.0, 20.0
_WORDS = ((6, 10), (60, 100), (6, 40))  # of titles, of paragraphs, and of texts of many lengths
_TEXTS = 64


@dataclass(frozen=True, slots=True)
class Promise:
    """What a query lane promises, and what that rests on.

    Attributes:
        pass_seconds, token_seconds: S(T) = pass_seconds + token_seconds·T.
        saturation_tokens: K.
        device_wait_seconds: P.
        bulk_share: φ.
        promised_seconds: from the acceptance of a request to its answer.
    """

    pass_seconds: float
    token_seconds: float
    saturation_tokens: int
    device_wait_seconds: float
    bulk_share: float
    promised_seconds: float

    def __str__(self) -> str:
        return f"the promised {1000 * self.promised_seconds:.0f} ms"

    def seconds(self, tokens: int) -> float:
        """S(T)/(1 - φ): of a pass beside bulk work."""
        return (self.pass_seconds + self.token_seconds * tokens) / (1 - self.bulk_share)

    @property
    def full_pass_seconds(self) -> float:
        return self.seconds(self.saturation_tokens)

    def passes(self, waiting_tokens: int) -> int:
        """⌈B/K⌉ + 1."""
        return -(-waiting_tokens // self.saturation_tokens) + 1

    def bound(self, waiting_tokens: int) -> float:
        """D(B) in seconds."""
        waits = self.device_wait_seconds * (1 + (self.bulk_share > 0))
        return waits + self.passes(waiting_tokens) * self.full_pass_seconds + HANDLING_SECONDS

    def retry_after(self, waiting_tokens: int, late_seconds: float = 0.0) -> float | None:
        """None: a request may be accepted with so many tokens waiting, its own included; else D(B) - the promise.

        Args:
            late_seconds: by which passes take longer than they should.
        """
        over = self.bound(waiting_tokens) + late_seconds - self.promised_seconds
        return over if over > 0 else None

    @property
    def smallest_seconds(self) -> float:
        """The smallest promise with which any request is accepted: it has at least one token itself."""
        return self.bound(1)

    @property
    def largest_tokens(self) -> int:
        """Tokens of the largest request that is accepted when none waits."""
        passes = max(0, math.ceil((self.promised_seconds - self.bound(0)) / self.full_pass_seconds) + 1)
        while passes and self.retry_after(passes * self.saturation_tokens) is not None:
            passes -= 1
        return passes * self.saturation_tokens

    def as_dict(self) -> dict[str, Any]:
        """All of it by name, with what a client can plan by."""
        return asdict(self) | {
            "handling_seconds": HANDLING_SECONDS,
            "answer_seconds": ANSWER_SECONDS,
            "smallest_seconds": self.smallest_seconds,
            "largest_tokens": self.largest_tokens,
        }

    def promising(self, promised_seconds: float | None) -> Promise:
        """The same with another promise; None: what two full passes that wait need.

        Raises:
            ConfigError: no request could be accepted; names the smallest promise that holds.
        """
        if promised_seconds is None:
            promised_seconds = self.bound(_DEFAULT_PASSES * self.saturation_tokens)
        if not self.smallest_seconds <= promised_seconds < math.inf:
            raise ConfigError(
                f"a promise of {1000 * promised_seconds:g} ms cannot be kept here (--promise-ms): a full pass of "
                f"{self.saturation_tokens:,} tokens takes up to {1000 * self.full_pass_seconds:.3g} ms beside bulk "
                f"work. The smallest promise that holds is {math.ceil(1000 * self.smallest_seconds)} ms; use that, a "
                "smaller model, or a faster device"
            )
        return replace(self, promised_seconds=promised_seconds)


def upper_envelope(passes: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The line over tokens and seconds of passes that none of them lies above, and that is nearest to them on average.

    Returns:
        Seconds at no token, and seconds per token; both at least 0.
    """
    tokens, seconds = np.array(passes, float).T
    slopes = [0.0, float((seconds / tokens).max())]
    for one, other in itertools.combinations(range(len(tokens)), 2):
        if tokens[one] != tokens[other]:
            slopes.append(float((seconds[one] - seconds[other]) / (tokens[one] - tokens[other])))
    lines = [(max(0.0, float((seconds - slope * tokens).max())), slope) for slope in slopes if slope >= 0]
    return min(lines, key=lambda line: line[0] + line[1] * tokens.mean())


def pass_sizes(saturation_tokens: int, longest_text: int) -> list[int]:
    """Tokens of passes that are timed: up to the saturation point of bulk work, and no fewer than a text has."""
    return sorted({max(round(share * saturation_tokens), longest_text) for share in (1 / 16, 1 / 4, 1)})


def full_pass(passes: Sequence[tuple[int, float]], least: int) -> int:
    """K: tokens of the smallest pass, of at least so many, that encodes nearly as many per second as the largest one.

    It follows from a line through the fastest passes of each size: one that was late by chance would make it larger.
    """
    fastest = dict[int, float]()
    for tokens, seconds in passes:
        fastest[tokens] = min(max(seconds, 1e-9), fastest.get(tokens, math.inf))
    tokens, seconds = np.array([*fastest.items()], float).T
    if len(fastest) == 1:
        return least
    token_seconds, pass_seconds = np.polyfit(tokens, seconds, 1, w=1 / seconds)
    most = tokens.max()
    wanted = _FAST_ENOUGH * most / max(1e-9, pass_seconds + token_seconds * most)  # tokens per second
    full = wanted * pass_seconds / max(1e-9, 1 - wanted * token_seconds)
    return math.ceil(np.clip(full, least, max(least, most)))


def time_passes(
    encode: Callable[[list[str]], object],
    count: Callable[[list[str]], np.ndarray],
    sizes: Sequence[int],
    longest_text: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[int, float]]:
    """Tokens and seconds of passes of these sizes, each of texts from short to the longest.

    A first round warms up, since libraries prepare themselves for each new shape of a pass. A model that is so slow
    that this takes long is timed in fewer passes: the smaller ones, and the first round where there is no other.

    Args:
        count: tokens of each text.
        longest_text: in tokens: attention makes tokens of long texts dearer.
    """
    kinds = (*_WORDS, (longest_text, longest_text))
    batches = [_texts_of(size, words, count) for size in sizes for words in kinds]
    passes, spent = list[tuple[int, float]](), 0.0
    for is_warm in (False, *[True] * _ROUNDS):
        timed = list[tuple[int, float]]()
        for texts, tokens in batches:
            begun = clock()
            encode(texts)
            timed.append((tokens, clock() - begun))
            spent += timed[-1][1]
            if spent > _MOST_SECONDS:
                return passes + timed
        if is_warm:
            passes += timed
            if spent > _ENOUGH_SECONDS:
                break
    return passes


@contextmanager
def busy_thread() -> Iterator[None]:
    """Keeps this process as busy as one thread can."""
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            pass

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _texts_of(
    most_tokens: int, words: tuple[int, int], count: Callable[[list[str]], np.ndarray]
) -> tuple[list[str], int]:
    """Texts of at most so many tokens together, but at least one, and their tokens."""
    texts = speed_texts(_TEXTS if words in _WORDS else 1, *words)
    tokens = np.maximum(count(texts), 1)
    times = 1 + most_tokens // int(tokens.sum())
    ends = np.cumsum(np.tile(tokens, times))
    rows = max(1, int(np.searchsorted(ends, most_tokens, side="right")))
    return (texts * times)[:rows], int(ends[rows - 1])


def kept_share(devices: str, bulk_share: float) -> float:
    """φ: what niceness gives on a CPU; on a GPU all processes have equal slices of time, one of queries among them."""
    workers = Counter(devices.split(","))
    most = max(workers.values())  # that encode documents on one card
    if device_kind(next(iter(workers))) == "cuda":
        return most / (most + 1)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    documents, queries = (min(_MOST_NICE, own + more) for more in (bulk_niceness(bulk_share), QUERY_NICENESS))
    return 1 / (1 + _NICE_STEP ** (documents - queries))


def bulk_niceness(bulk_share: float) -> int:
    """The highest niceness at which workers get at least this share of a core beside those for queries.

    Raises:
        ConfigError: the share is out of its range.
    """
    if not LEAST_SHARE <= bulk_share <= MOST_SHARE:
        raise ConfigError(
            f"bulk_share, the share of bulk work, is {LEAST_SHARE:g} (less, the scheduler does not give) to "
            f"{MOST_SHARE:g}, not {bulk_share:g}"
        )
    return QUERY_NICENESS + int(math.log((1 - bulk_share) / bulk_share, _NICE_STEP) + 1e-9)
