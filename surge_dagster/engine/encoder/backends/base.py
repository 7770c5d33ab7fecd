"""The contract between a worker and what computes its vectors.

Work comes in two steps so that they can overlap: while `forward` computes chunk i on the device, another thread runs
`prepare` (tokenization) for chunk i + 1. Vectors are written to the rows given, which lie in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Progress = Callable[[], None]


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """How a worker is to compute.

    Attributes:
        device: "cpu", or "cuda:N" as this process numbers them.
        precision: "fp32", "fp16" or "bf16".
        threads: CPU threads this worker may use.
        token_budget: tokens of one forward pass, None for the backend's own choice.
    """

    device: str
    precision: str
    threads: int
    token_budget: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkFigures:
    """What a chunk cost: tokens that count, tokens computed with padding, texts cut, seconds in each step."""

    tokens: int
    padded_tokens: int
    truncated: int
    tokenize_seconds: float
    forward_seconds: float


class Backend(Protocol):
    """Computes vectors. `name` and `detail` go into reports and cache keys."""

    name: str
    detail: str

    def prepare(self, texts: list[str], progress: Progress) -> Any:
        """Turns texts into whatever `forward` takes; runs beside a `forward`."""
        ...

    def forward(self, prepared: Any, matrix: np.ndarray, truncated: np.ndarray, progress: Progress) -> ChunkFigures:
        """Writes a vector and a truncation flag for every text; calls `progress` after each piece of work."""
        ...
