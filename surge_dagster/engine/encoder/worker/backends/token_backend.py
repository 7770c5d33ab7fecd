"""TokenBackend, the base of backends that tokenize texts and run forward passes.

A subclass sets up a chunk and computes one pass (`_chunk`); batches, the token budget, handling of little memory and
metrics are shared.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from surge_dagster.engine.encoder.worker.backends.base import ChunkMetrics, Progress
from surge_dagster.engine.encoder.worker.passes import PassLoop, RunPass
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer, Tokens


@dataclass(frozen=True, slots=True)
class PreparedTokens:
    """A tokenized chunk, and the seconds that this took."""

    tokens: Tokens
    seconds: float


@dataclass(slots=True)
class ChunkPasses:
    """How the passes of one chunk are computed, and the seconds of copies outside of the passes."""

    run_pass: RunPass
    copy_seconds: float = 0.0


class TokenBackend(ABC):
    """A `Backend` that tokenizes texts and computes them in passes of a bounded number of tokens.

    Attributes:
        budget_candidates: token budgets to measure at a first start, ascending.
        machine: the kind of device, on which the best budget depends.
    """

    name: str
    detail: str
    machine: str
    budget_candidates: tuple[int, ...]

    def __init__(self, tokenizer: TextTokenizer, loop: PassLoop) -> None:
        self._tokenizer = tokenizer
        self._loop = loop

    @property
    def token_budget(self) -> int:
        """Maximum tokens of one pass; running out of memory lowers it."""
        return self._loop.token_budget

    @token_budget.setter
    def token_budget(self, tokens: int) -> None:
        self._loop.token_budget = tokens

    @property
    def streams(self) -> int:
        """Number of concurrent passes."""
        return self._loop.streams

    def prepare(self, texts: list[str], progress: Progress) -> PreparedTokens:
        started = time.perf_counter()
        tokens = self._tokenizer.encode(texts)
        progress()
        return PreparedTokens(tokens, time.perf_counter() - started)

    def forward(
        self, prepared: PreparedTokens, matrix: np.ndarray, truncated: np.ndarray, progress: Progress
    ) -> ChunkMetrics:
        started = time.perf_counter()
        tokens = prepared.tokens
        truncated[:] = tokens.truncated
        with self._chunk(tokens, matrix) as passes:
            metrics = self._loop.run(tokens.lengths, passes.run_pass, progress)
        return ChunkMetrics(
            tokens=len(tokens.ids),
            padded_tokens=metrics.padded_tokens,
            truncated=int(np.count_nonzero(tokens.truncated)),
            tokenize_seconds=prepared.seconds,
            forward_seconds=time.perf_counter() - started,
            copy_seconds=passes.copy_seconds + metrics.copy_seconds,
            token_budget=self._loop.token_budget,
        )

    @abstractmethod
    def _chunk(self, tokens: Tokens, matrix: np.ndarray) -> AbstractContextManager[ChunkPasses]:
        """Sets up the passes of a chunk; at its end every row of `matrix` has its vector."""
