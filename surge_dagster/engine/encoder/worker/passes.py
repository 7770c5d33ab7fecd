"""Forward passes of a chunk: which texts share a pass (plan_batches), and running them in limited memory (PassLoop).

Texts of equal token length share a pass, cut at a token budget. Equal lengths need no padding, and a budget in tokens
keeps each pass at the size where the device is just full. The rest of a length group is filled with slightly shorter
texts as long as their padding costs less than another pass: a pass has a fixed cost, and on some backends every new
shape has one too. The plan depends only on the lengths, so equal chunks get equal batches. Largest passes come first,
so that the streams of a device end together.

The memory of a pass is not known beforehand: it depends on the model, the kernels and other users of the device. A pass
that runs out of memory halves the token budget for the rest of the worker's life and is run again in halves, down to a
single text. A single text that does not fit is tried once more when no other pass is under way; if it still does not
fit, the error says so.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from surge_dagster.engine.encoder.worker.backends.base import Progress
from surge_dagster.engine.errors import EncoderError

log = logging.getLogger(__name__)

# Messages of libraries without an error type for it: torch on the CPU and on CUDA, cuBLAS, OpenVINO, C++.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cublas_status_alloc_failed",
    "failed to allocate",
    "bad_alloc",
)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows that share a forward pass.

    Attributes:
        rows: row numbers.
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
        """Computed tokens, padding included."""
        return len(self.rows) * self.length

    def halves(self) -> list[TokenBatch]:
        """The same rows as two batches of the same length; there are at least two."""
        half = len(self.rows) // 2
        return [replace(self, rows=self.rows[:half]), replace(self, rows=self.rows[half:], first=self.first + half)]


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Row numbers by descending length: every batch is a run of them."""
    # A stable sort keeps rows of equal length in order, so the plan depends only on the lengths.
    return np.argsort(-lengths, kind="stable")


def plan_batches(lengths: np.ndarray, token_budget: int, pass_tokens: int = 0) -> list[TokenBatch]:
    """Cuts rows of the given token lengths into batches.

    A single text over the budget gets a batch of its own.

    Args:
        lengths: tokens of each row.
        token_budget: maximum tokens of one batch, padding included.
        pass_tokens: fixed cost of a pass, in tokens; 0 allows no padding.
    """
    if len(lengths) == 0:
        return []
    order = longest_first(lengths)
    # An empty text has no tokens with some tokenizers: such a row is computed as one token of padding.
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
            # Shorter rows are added only while their padding is cheaper than the pass that they save.
            if padding > pass_tokens:
                break
            stop += take
            group += stop == borders[group]
        exact = int(lengths[order[stop - 1]]) == length
        batches.append(TokenBatch(order[start:stop], length, exact, first=start))
        start = stop
    batches.sort(key=lambda batch: (-batch.tokens, -batch.length))
    return batches


# Computes the vectors of a batch and puts them where they belong; returns the seconds that copying took.
RunPass = Callable[[TokenBatch], float]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class PassMetrics:
    """Costs of the passes of a chunk: computed tokens with padding, and seconds of wall time spent on copies."""

    padded_tokens: int
    copy_seconds: float


@dataclass(slots=True)
class _Work:
    """The passes of a chunk under way; changed only under the loop's lock."""

    waiting: deque[TokenBatch]
    alone: list[TokenBatch] = field(default_factory=list)
    padded_tokens: int = 0
    copy_seconds: float = 0.0
    error: BaseException | None = None


class PassLoop:
    """Plans and runs passes within a token budget that shrinks when memory runs out.

    Args:
        token_budget: maximum tokens of one pass, padding included; a single longer text has a pass of its own.
        pass_tokens: fixed cost of a pass, in tokens.
        streams: concurrent passes, each in a thread of its own.
        free_memory: called after memory ran out, before the pass is run again.
    """

    def __init__(
        self, *, token_budget: int, pass_tokens: int, streams: int = 1, free_memory: Callable[[], None] | None = None
    ) -> None:
        self.token_budget = token_budget
        self.streams = streams
        self._pass_tokens = pass_tokens
        self._free_memory = free_memory
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(streams - 1, "surge-passes") if streams > 1 else None

    def run(self, lengths: np.ndarray, run_pass: RunPass, progress: Progress) -> PassMetrics:
        """Runs passes for rows of the given token lengths; calls `progress` after each.

        Raises:
            EncoderError: a single text does not fit into memory.
        """
        work = _Work(deque(plan_batches(lengths, self.token_budget, self._pass_tokens)))
        streams = max(1, min(self.streams, len(work.waiting)))
        others = []
        if self._threads is not None:
            others = [self._threads.submit(self._drain, work, run_pass, progress) for _ in range(streams - 1)]
        self._drain(work, run_pass, progress)
        for other in others:
            other.result()
        if work.error is not None:
            raise work.error
        for batch in work.alone:
            self._run_alone(work, batch, run_pass)
            progress()
        return PassMetrics(work.padded_tokens, work.copy_seconds / streams)

    def _drain(self, work: _Work, run_pass: RunPass, progress: Progress) -> None:
        """Runs passes until none is left, or until one fails for a reason other than memory."""
        while True:
            with self._lock:
                if work.error is not None or not work.waiting:
                    return
                batch = work.waiting.popleft()
                if batch.tokens > self.token_budget and len(batch.rows) > 1:
                    work.waiting.extendleft(batch.halves()[::-1])
                    continue
            try:
                copy_seconds = run_pass(batch)
            except BaseException as error:
                if not is_out_of_memory(error):
                    with self._lock:
                        work.error = work.error or error
                    return
            else:
                with self._lock:
                    work.padded_tokens += batch.tokens
                    work.copy_seconds += copy_seconds
                progress()
                continue
            # Outside of the handler: the exception references the arrays of the failed pass.
            self._shrink(work, batch)

    def _shrink(self, work: _Work, batch: TokenBatch) -> None:
        """Lowers the budget after a pass that did not fit, and queues its rows again."""
        if self._free_memory is not None:
            self._free_memory()
        with self._lock:
            if len(batch.rows) > 1:
                work.waiting.extendleft(batch.halves()[::-1])
                budget = batch.tokens // 2
            else:
                work.alone.append(batch)
                budget = batch.tokens
            # Concurrent passes report the same shortage; it counts once.
            if budget < self.token_budget:
                log.warning("out of memory: the token budget is %d from now on, it was %d", budget, self.token_budget)
                self.token_budget = budget

    def _run_alone(self, work: _Work, batch: TokenBatch, run_pass: RunPass) -> None:
        try:
            work.copy_seconds += run_pass(batch)
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            raise EncoderError(
                f"a text of {batch.tokens} tokens does not fit into the device's memory, although its pass had 1 row "
                f"and ran alone ({error}); use a smaller max_length, a smaller model, or a device with more memory"
            ) from error
        work.padded_tokens += batch.tokens
