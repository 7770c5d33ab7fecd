"""A backend that computes nothing: what a call costs with it is what a call costs by itself.

Texts are handed to it as to any other backend, and every row is reported as done; the matrix stays as it is.
"""

from __future__ import annotations

import numpy as np

from surge_dagster.engine.encoder.worker.backends.base import BackendSettings, ChunkMetrics, Progress
from surge_dagster.engine.model.spec import Space


class NullBackend:
    """The worker's side of `backend="benchmarks.null_backend:NullBackend"`."""

    name = "null"
    detail = "no vectors"

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        pass

    def prepare(self, texts: list[str], progress: Progress) -> int:
        progress()
        return len(texts)

    def forward(self, prepared: int, matrix: np.ndarray, truncated: np.ndarray, progress: Progress) -> ChunkMetrics:
        truncated[:] = 0
        progress()
        return ChunkMetrics(
            tokens=prepared, padded_tokens=prepared, truncated=0, tokenize_seconds=0.0, forward_seconds=0.0
        )
