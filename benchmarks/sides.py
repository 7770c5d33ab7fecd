"""This engine's sides of the comparison: the pool alone, and a whole run around it.

The pool's side begins with the same list of strings that every peer is given and ends with vectors in host memory, so
making the Arrow column and filling the slot are part of its time. A run's side goes from a Parquet catalog to published
files, which no peer does.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.calls import EncodeMetrics
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.report import SuperBatchReport
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.sources import open_source
from surge_dagster.engine.store import open_store


class PoolSide:
    """An encoder pool with one slot that takes all the texts; `figures` are those of the last call."""

    def __init__(self, pool: EncoderPool, texts: list[str]) -> None:
        self.pool = pool
        self.metrics = EncodeMetrics()
        self.workers = len(pool.worker_pids)
        self._arena = pool.arena(
            slots=1, max_texts=len(texts), max_bytes=max(1, sum(len(text.encode()) for text in texts))
        )
        self._slot = self._arena.acquire()

    def encode(self, texts: list[str]) -> np.ndarray:
        self._slot.truncate(0)
        self._slot.append(pa.array(texts, pa.large_string()))  # pyright: ignore[reportArgumentType]
        self.metrics = self.pool.encode(self._slot)
        return self._slot.matrix(0, len(texts))

    @property
    def padding_ratio(self) -> float:
        """Share of the computed tokens that were padding."""
        return 1 - self.metrics.tokens / max(1, self.metrics.padded_tokens)

    @property
    def idle_ratio(self) -> float:
        """Share of the workers' time in the last call in which they computed no vectors."""
        return _idle(self.metrics.forward_seconds, self.workers, self.metrics.encode_seconds)

    def close(self) -> None:
        self._slot.release()
        self._arena.close()


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run: texts over seconds from the pool being ready to the last publish, and the workers' idle share of it."""

    seconds: float
    idle_ratio: float


class RunSide:
    """Whole runs over a catalog, each to an output of its own."""

    def __init__(self, pool: EncoderPool, catalog: Path, scratch: Path) -> None:
        self._pool = pool
        self._catalog = catalog
        self._output = scratch / "output"

    def run(self) -> RunFigures:
        begun = time.perf_counter()
        run = EmbeddingRun(open_source(self._catalog), open_store(self._output), self._pool)
        forward_seconds = sum(event.forward_seconds for event in run.events() if isinstance(event, SuperBatchReport))
        wall_seconds = run.report.wall_seconds or time.perf_counter() - begun
        shutil.rmtree(self._output)
        if run.report.partitions_failed:
            raise RuntimeError(f"partitions failed in the run: {run.report.partitions_failed[:3]}")
        idle = getattr(run.report, "worker_idle_ratio", None)
        workers = len(self._pool.worker_pids)
        return RunFigures(wall_seconds, _idle(forward_seconds, workers, wall_seconds) if idle is None else idle)


def _idle(forward_seconds: float, workers: int, seconds: float) -> float:
    return max(0.0, 1 - forward_seconds / (workers * seconds)) if seconds > 0 else 0.0
