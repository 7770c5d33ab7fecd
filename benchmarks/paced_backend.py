"""An encoder of a fixed speed: unit vectors, at so many seconds per text, whatever else the machine is doing.

With no seconds it is as fast as memory is written. Where storage or bookkeeping is measured, the encoder must not be
what varies; an encoder that computes would take its cores from what is measured, which a GPU does not.
"""

from __future__ import annotations

import os
import time

import numpy as np

from surge_dagster.engine.encoder.worker.backends.base import BackendSettings, ChunkMetrics, Progress
from surge_dagster.engine.model.spec import Space

BACKEND = "benchmarks.paced_backend:PacedBackend"
# Read in the worker when it starts: a worker inherits the environment of the process that starts the pool.
SECONDS_PER_TEXT = "SURGE_BENCH_SECONDS_PER_TEXT"
_BEHIND_SECONDS = 0.005  # that a late chunk may make up for; more would hide what held it up


class PacedBackend:
    """The worker's side of `backend=BACKEND`."""

    name = "paced"
    detail = "unit vectors at a fixed speed"
    token_budget = 0

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        self._seconds_per_text = float(os.environ.get(SECONDS_PER_TEXT, "0"))
        self._due = 0.0
        self._vector = np.full(space.dimension, space.dimension**-0.5, space.dtype)

    def prepare(self, texts: list[str], progress: Progress) -> int:
        progress()
        return len(texts)

    def forward(self, prepared: int, matrix: np.ndarray, truncated: np.ndarray, progress: Progress) -> ChunkMetrics:
        begun = time.perf_counter()
        self._due = max(self._due, begun - _BEHIND_SECONDS) + prepared * self._seconds_per_text
        matrix[:] = self._vector
        truncated[:] = 0
        while (left := self._due - time.perf_counter()) > 0:
            time.sleep(min(left, 1.0))
            progress()
        return ChunkMetrics(
            tokens=prepared,
            padded_tokens=prepared,
            truncated=0,
            tokenize_seconds=0.0,
            forward_seconds=time.perf_counter() - begun,
        )
