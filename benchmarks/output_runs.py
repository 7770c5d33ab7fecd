"""Whole runs without a disk in front of them: partitions are drawn in memory, and the encoder's speed is given.

So what a run's time shows is the way from the aggregator to the store, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from benchmarks.paced_backend import BACKEND, SECONDS_PER_TEXT
from surge_dagster.catalogs.synthetic import draw_texts
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.report import RunReport
from surge_dagster.engine.run import EmbeddingRun, Event
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.thresholds import Thresholds

_BATCH_ROWS = 8192
_BATCH_BYTES = 2 * 1024 * 1024


@contextlib.contextmanager
def paced_pool(dimension: int, texts_per_second: float | None = None) -> Iterator[EncoderPool]:
    """One worker that gives unit vectors, at a fixed speed or (None) as fast as it can write them."""
    before = os.environ.get(SECONDS_PER_TEXT)
    os.environ[SECONDS_PER_TEXT] = str(1 / texts_per_second if texts_per_second else 0)
    try:
        with EncoderPool(EncodingSpec(f"hash://{dimension}"), backend=BACKEND, devices="cpu") as pool:
            yield pool
    finally:
        if before is None:
            del os.environ[SECONDS_PER_TEXT]
        else:
            os.environ[SECONDS_PER_TEXT] = before


def drawn_partitions(sizes: Sequence[int], mean_bytes: int = 47, seed: int = 0) -> Iterator[Partition]:
    """Partitions of these sizes, drawn while they are read; nothing of them is kept."""
    return (_partition(number, partial(_draw, seed, number, size, mean_bytes)) for number, size in enumerate(sizes))


def ready_partitions(count: int, texts: int) -> list[Partition]:
    """Partitions that are drawn before: drawing few texts at a time takes longer than embedding them."""
    ids = pa.array([f"{row}" for row in range(texts)], pa.string())
    drawn = draw_texts(0, 1, np.arange(count * texts, dtype=np.uint64)).cast(pa.large_string())

    def read(start: int) -> Iterator[RowBatch]:
        yield RowBatch(ids, drawn.slice(start, texts))  # pyright: ignore[reportArgumentType]

    return [_partition(number, partial(read, number * texts)) for number in range(count)]


def embed(
    pool: EncoderPool,
    partitions: Iterable[Partition],
    store: Store,
    thresholds: Thresholds | None = None,
    *,
    seen: Callable[[Event], None] = lambda event: None,
    publish_threads: int | None = None,
    memory_limit: int | None = None,
) -> RunReport:
    """A run to its end; `seen` is told of every event.

    Raises:
        RuntimeError: a partition failed.
    """
    run = EmbeddingRun(partitions, store, pool, thresholds, publish_threads=publish_threads, memory_limit=memory_limit)
    for event in run.events():
        seen(event)
    if run.failed:
        raise RuntimeError(f"partitions failed in the run: {run.report.partitions_failed[:3]}")
    return run.report


def _partition(number: int, read: Callable[[], Iterator[RowBatch]]) -> Partition:
    return Partition(f"category-{number:06d}", "v1", read, lambda: "v1")


def _draw(seed: int, number: int, size: int, mean_bytes: int) -> Iterator[RowBatch]:
    step = max(1, min(_BATCH_ROWS, _BATCH_BYTES // mean_bytes))
    for start in range(0, size, step):
        rows = np.arange(start, min(start + step, size), dtype=np.uint64)
        if mean_bytes <= 100_000:
            texts = draw_texts(seed, number, rows, mean_bytes).cast(pa.large_string())
        else:  # words drawn one by one would take longer than anything that is measured
            texts = pa.array([f"{number}/{row} ".ljust(mean_bytes, "x") for row in rows.tolist()], pa.large_string())
        yield RowBatch(pa.array(rows.astype(np.int64)), texts)  # pyright: ignore[reportArgumentType]
