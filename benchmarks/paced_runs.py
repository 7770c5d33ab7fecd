"""Whole runs with partitions drawn in memory and an encoder of a fixed speed.

The time of such a run shows the path from the aggregator to the store. The encoder sleeps instead
of computing, because an encoder that computes takes its cores from what is measured, which a GPU
does not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from benchmarks.synthetic import draw_texts
from surge_dagster import EmbeddingRun, EncoderPool, EncodingSpec, RunReport
from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.schedule import EncodeCall, EncodeMetrics
from surge_dagster.engine.encoder.worker.backends import BackendSettings, Progress, Rows
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.plan.planned_run import learning
from surge_dagster.engine.run.report import Event
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store.store import Store

BACKEND = "benchmarks.paced_runs:PacedBackend"
DIMENSION = 384
# Read by the worker, which inherits the environment of the process that starts the pool.
SECONDS_PER_TEXT = "SURGE_BENCH_SECONDS_PER_TEXT"
_SECONDS_PER_CALL = "SURGE_BENCH_SECONDS_PER_CALL"
_BEHIND_SECONDS = 0.005  # that a late portion may catch up; more would hide what delayed it
_BATCH_ROWS = 8192
_BATCH_BYTES = 2 * 1024 * 1024


class PacedBackend:
    """A worker's backend that gives unit vectors at a fixed speed, or without a speed as fast as
    memory is written."""

    name = "paced"

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        self._seconds_per_text = float(os.environ.get(SECONDS_PER_TEXT, "0"))
        per_call = float(os.environ.get(_SECONDS_PER_CALL, "0"))  # which the pool waits
        # Each speed has its own calibration.
        self.detail = f"{self._seconds_per_text} s per text, {per_call} s per call"
        self._due = 0.0
        self._vector = np.full(space.dimension, space.dimension**-0.5, space.dtype)

    def prepare(self, texts: list[str]) -> int:
        return len(texts)

    def forward(self, prepared: int, rows: Rows, progress: Progress) -> Costs:
        begun = time.perf_counter()
        if begun - self._due > _BEHIND_SECONDS:  # it was idle
            self._due = begun
        self._due += prepared * self._seconds_per_text
        rows.matrix[rows.places] = self._vector
        rows.truncated[rows.places] = 0
        while (left := self._due - time.perf_counter()) > 0:
            time.sleep(min(left, 1.0))
            progress()
        seconds = time.perf_counter() - begun
        return Costs(tokens=prepared, padded_tokens=prepared, forward_seconds=seconds)


class PacedPool(EncoderPool):
    """A pool whose calls take turns, each after a pause in which no worker encodes: c_ipc of the
    cost model.

    Args:
        call_seconds: the pause.
        options: those of `EncoderPool`.
    """

    def __init__(self, spec: EncodingSpec, call_seconds: float, **options: Any) -> None:
        self._call_seconds = call_seconds
        self._turns = ThreadPoolExecutor(1, "paced-calls")
        super().__init__(spec, **options)

    def submit(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, slot: Slot, *arrays: Any
    ) -> _PacedCall:
        """See `EncoderPool.submit`."""
        return _PacedCall(self._turns.submit(self._call, slot, *arrays), self._call_seconds)

    def _call(self, *arguments: Any) -> EncodeCall:
        time.sleep(self._call_seconds)
        call = super().submit(*arguments)
        call.result()
        return call

    def close(self) -> None:
        """See `EncoderPool.close`."""
        super().close()
        self._turns.shutdown()


class _PacedCall:
    """A call that waits for its turn; its seconds are those of the call and the pause."""

    def __init__(self, turn: Future[EncodeCall], call_seconds: float) -> None:
        self._turn = turn
        self._call_seconds = call_seconds

    def result(self, timeout_seconds: float | None = None) -> EncodeMetrics | None:
        try:
            self._turn.result(timeout_seconds)
        except TimeoutError:
            return None
        return self.metrics

    def abandon(self) -> None:
        self._turn.result()

    @property
    def encoded(self) -> list[tuple[int, int]]:
        return self._turn.result().encoded

    @property
    def finished_rows(self) -> int:
        if not self._turn.done():
            return 0
        return self._turn.result().finished_rows

    @property
    def metrics(self) -> EncodeMetrics:
        metrics = self._turn.result().metrics
        pause = Costs(encode_seconds=self._call_seconds)
        return replace(metrics, costs=metrics.costs.plus(pause))


@contextlib.contextmanager
def paced_pool(
    texts_per_second: float = float("inf"),
    dimension: int = DIMENSION,
    *,
    workers: int = 1,
    call_seconds: float = 0.0,
) -> Iterator[EncoderPool]:
    """Yield a pool with the encoder above.

    Args:
        texts_per_second: of one worker.
        call_seconds: c_ipc, in addition to the pool's own; if it is 0, calls follow each other
            without a pause.
    """
    environment = {
        SECONDS_PER_TEXT: str(1 / texts_per_second),
        _SECONDS_PER_CALL: str(call_seconds),
    }
    new_pool: Callable[..., EncoderPool] = EncoderPool
    if call_seconds:
        new_pool = partial(PacedPool, call_seconds=call_seconds)
    devices = ",".join(["cpu"] * workers)
    with (
        patch.dict(os.environ, environment),
        new_pool(EncodingSpec(f"hash://{dimension}"), backend=BACKEND, devices=devices) as pool,
    ):
        pool.start()  # otherwise the first run would wait for it
        yield pool


def drawn_texts(
    count: int, mean_bytes: int = 47, *, seed: int = 0, number: int = 1
) -> pa.LargeStringArray:
    """Return the first texts of a partition of the synthetic catalog."""
    rows = np.arange(count, dtype=np.uint64)
    texts: Any = draw_texts(seed, number, rows, mean_bytes).cast(pa.large_string())
    return texts


def drawn_partitions(sizes: Sequence[int], mean_bytes: int = 47) -> Iterator[Partition]:
    """Yield partitions of these sizes, drawn while they are read and not kept."""
    for number, size in enumerate(sizes):
        yield _partition(number, size, partial(_draw, number, size, mean_bytes))


def embed(
    pool: EncoderPool,
    partitions: Iterable[Partition],
    store: Store,
    thresholds: Thresholds | None = None,
    *,
    seen: Callable[[Event], None] = lambda event: None,
    learns: bool = False,
    **options: Any,
) -> RunReport:
    """Execute a run to its end.

    Args:
        seen: gets every event.
        learns: as the runs of the command and of Dagster do.
        options: those of `EmbeddingRun`.

    Raises:
        RuntimeError: a partition failed.
    """
    run = EmbeddingRun(partitions, store, pool, thresholds or Thresholds(), **options)
    for event in learning(run, pool, store) if learns else run.events():
        seen(event)
    if run.failed:
        raise RuntimeError(f"Partitions failed in the run: {run.report.partitions_failed[:3]}")
    return run.report


def _partition(number: int, size: int, read: Callable[[], Iterator[RowBatch]]) -> Partition:
    return Partition(f"category-{number:06d}", "v1", read, lambda: "v1", rows=int(size))


def _draw(number: int, size: int, mean_bytes: int) -> Iterator[RowBatch]:
    step = max(1, min(_BATCH_ROWS, _BATCH_BYTES // mean_bytes))
    for start in range(0, size, step):
        rows = np.arange(start, min(start + step, size), dtype=np.uint64)
        if mean_bytes <= 100_000:
            texts: Any = draw_texts(0, number, rows, mean_bytes).cast(pa.large_string())
        else:  # drawing word by word would take longer than the run
            padded = [f"{number}/{row} ".ljust(mean_bytes, "x") for row in rows.tolist()]
            texts = pa.array(padded, pa.large_string())
        yield RowBatch(pa.array(rows.astype(np.int64)), texts)
