"""Runs the forward passes of a chunk, and lives with a device whose memory is smaller than a pass.

What a pass needs is not known beforehand: it depends on the model, the kernels and whoever else uses the device. So the
loop tries, and learns: a pass that runs out of memory halves the token budget for the rest of the worker's life and is
done again in halves, down to a single text. A single text that does not fit is tried once more when no other pass is
under way; if it still does not fit, nothing smaller is left to try, and the error says so.

With several streams, as many threads take passes from one list, largest first, so that they end together.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from surge_dagster.engine.encoder.worker.backends.base import Progress
from surge_dagster.engine.encoder.worker.token_batches import TokenBatch, plan_batches
from surge_dagster.engine.errors import EncoderError

log = logging.getLogger(__name__)

# What libraries say whose error type does not: torch on the CPU and on CUDA, cuBLAS, OpenVINO, and C++ itself.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cublas_status_alloc_failed",
    "failed to allocate",
    "bad_alloc",
)

# Computes the vectors of a batch and puts them where they belong; returns the seconds that copying took.
RunPass = Callable[[TokenBatch], float]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, as far as a library lets one tell."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class PassMetrics:
    """What the passes of a chunk cost: tokens computed with padding, and the share of the wall time that copied."""

    padded_tokens: int
    copy_seconds: float


@dataclass(slots=True)
class _Work:
    """A chunk's passes while they are under way; changed under the loop's lock only."""

    waiting: deque[TokenBatch]
    alone: list[TokenBatch] = field(default_factory=list)
    padded_tokens: int = 0
    copy_seconds: float = 0.0
    error: BaseException | None = None


class PassLoop:
    """Plans and runs passes within a token budget that shrinks when memory runs out.

    Args:
        token_budget: most tokens of one pass, padding included; a single longer text has a pass of its own.
        pass_tokens: what a pass costs by itself, in tokens.
        streams: passes that run at once, each in a thread of its own.
        free_memory: called after memory ran out, before the pass is done again.
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
        """Runs passes until every row of the given token lengths was in one; calls `progress` after each.

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
        """Runs passes until none is left, or one fails for another reason than memory."""
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
            # Outside of the handler: an exception holds on to the arrays that are in the way.
            self._shrink(work, batch)

    def _shrink(self, work: _Work, batch: TokenBatch) -> None:
        """After a pass that did not fit: a smaller budget, and its rows once more."""
        if self._free_memory is not None:
            self._free_memory()
        with self._lock:
            if len(batch.rows) > 1:
                work.waiting.extendleft(batch.halves()[::-1])
                budget = batch.tokens // 2
            else:
                work.alone.append(batch)
                budget = batch.tokens
            # Passes that ran side by side report the same shortage: it counts once.
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
