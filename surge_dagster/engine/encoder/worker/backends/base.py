"""Backend, the interface between a worker and the library that computes its vectors.

Work has two steps that overlap: while `forward` computes chunk i on the device, another thread runs
`prepare` (tokenization) for chunk i + 1. Vectors are written straight to their rows, which are in
shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from surge_dagster.engine.encoder.metrics import Costs

Progress = Callable[[], None]


# Messages of libraries without an error type for it: torch on the CPU and on CUDA, cuBLAS,
# OpenVINO, C++.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cublas_status_alloc_failed",
    "failed to allocate",
    "bad_alloc",
)


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """The settings of a worker.

    Attributes:
        device: "cpu", or "cuda:N" as this process numbers them.
        token_budget: tokens of one forward pass, None for the backend's own choice.
    """

    device: str
    precision: str
    threads: int
    token_budget: int | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that the results of a chunk's texts go to; rows between them belong to others.

    Attributes:
        matrix: vectors of many rows, [rows, dimension].
        truncated: uint8 [rows], whether a text was longer than the model reads.
        places: the row of each text, int64 [texts].
    """

    matrix: np.ndarray
    truncated: np.ndarray
    places: np.ndarray

    @classmethod
    def of_all(cls, matrix: np.ndarray, truncated: np.ndarray) -> Rows:
        return cls(matrix, truncated, np.arange(len(matrix)))


class Backend(Protocol):
    """Computes vectors; `name` and `detail` go into reports and cache keys."""

    name: str
    detail: str

    def prepare(self, texts: list[str]) -> Any:
        """Runs concurrently with a `forward`."""

    def forward(self, prepared: Any, rows: Rows, progress: Progress) -> Costs:
        """Write a vector and a truncation flag for every text; report progress."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchedChunk:
    """A chunk whose work was handed to a device.

    Attributes:
        is_done: whether `finish` returns without waiting for the device.
        finish: waits for the vectors, writes them to their rows and returns their costs; called
            once.
    """

    is_done: Callable[[], bool]
    finish: Callable[[], Costs]


@runtime_checkable
class QueuingBackend(Protocol):
    """A `Backend` that queues its work, so that a chunk is launched before the last one ends."""

    def launch(self, prepared: Any, rows: Rows, progress: Progress) -> LaunchedChunk:
        """Queue the work of `forward` without waiting for it."""
        ...


@runtime_checkable
class TokenIds(Protocol):
    """A `Backend` that takes texts as token ids, made by a `TextTokenizer` elsewhere."""

    truncation_side: str

    def prepare_ids(self, data: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Any:
        """`prepare` of the texts whose ids, int32, are the bytes `data[starts[i]:stops[i]]`."""
        ...


@runtime_checkable
class BudgetedBackend(Backend, Protocol):
    """A `Backend` whose passes have at most `token_budget` tokens.

    Attributes:
        budget_candidates: token budgets to measure at a first start, ascending.
        streams: concurrent passes.
    """

    token_budget: int
    budget_candidates: tuple[int, ...]
    streams: int


def encode_texts(
    backend: Backend, texts: list[str], dimension: int, dtype: str
) -> tuple[np.ndarray, Costs]:
    """Return the vectors, [texts, dimension], outside of the arena, and their costs."""
    matrix = np.empty((len(texts), dimension), dtype)
    rows = Rows.of_all(matrix, np.empty(len(texts), np.uint8))
    return matrix, backend.forward(backend.prepare(texts), rows, lambda: None)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error).lower() for words in _OUT_OF_MEMORY
    )
