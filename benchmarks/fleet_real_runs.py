"""Shards on a small fleet, to compare the simulator with: machines are threads, their encoders sleep.

The whole product is at work on each: reading, encoder pool, publishing, ranges of large partitions. What a start costs
is left out on both sides, since eight processes that start on two cores take longer than on eight machines.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.fleet_costs import FleetCosts
from benchmarks.fleet_simulation import Catalog, Faults
from benchmarks.fleet_ways import ShardWay
from benchmarks.harness import Document, seconds_of
from benchmarks.paced_runs import BACKEND, SECONDS_PER_TEXT, drawn_partitions
from surge_dagster.catalogs.synthetic import MEAN_BYTES, partition_sizes
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition, RowBatch, within
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.orchestration.shards import Stretch, cut

_TEXTS_PER_SECOND = 300.0  # few enough for eight machines on two cores
_DIMENSION, _MEMORY = 64, 256 << 20
_LEAST_SECONDS = 6.0  # of a shard: a tenth of the product's, as the whole run is shorter
_NO_STARTS = Faults(lost_per_hour=0.0, cold_seconds=0.0)


def compare(costs: FleetCosts, machines: int, seconds: float, partitions: int, sigma: float) -> Document:
    """Efficiency, real and simulated, for the same partitions and machines."""
    costs = replace(
        costs,
        run_seconds=0.0,
        pool_seconds=0.0,
        enqueue_seconds=0.0,
        launch_seconds=0.0,
        dequeue_seconds=0.05,
        of_objects={1: 0.0},
        of_writers={1: 0.0},
    )
    texts = round(seconds * machines * _TEXTS_PER_SECOND)
    drawn = drawn_partitions(partition_sizes(texts, partitions, sigma).tolist())
    catalog = Catalog(map(_divisible, drawn))
    speed = _TEXTS_PER_SECOND * MEAN_BYTES
    fleet = ShardWay(catalog, machines, speed, costs, _NO_STARTS, 0)
    fleet.least_seconds = _LEAST_SECONDS
    speeds = [each / MEAN_BYTES for each in fleet.speeds]
    with tempfile.TemporaryDirectory(prefix="surge-fleet-") as folder:
        measured = _real_shards(PacedRuns(catalog.partitions, list(speeds), Path(folder)))
    simulated = fleet.run()
    real = texts / sum(speeds) / measured
    return {"real": real, "simulated": simulated.efficiency, "difference": simulated.efficiency / real - 1}


def _divisible(partition: Partition) -> Partition:
    def read_range(start: int, stop: int) -> Iterator[RowBatch]:
        for batch, first, last in within(partition.read(), start, stop):
            yield batch.rows(first, last)

    return replace(partition, text_bytes=(partition.rows or 0) * MEAN_BYTES, read_range=read_range)


@dataclass(frozen=True)
class PacedRuns:
    """How the runs of all machines are made; `speeds`, in texts per second, are in the order of their starts."""

    catalog: dict[str, Partition]
    speeds: list[float]
    output: Path

    def open_pool(self) -> EncoderPool:
        os.environ[SECONDS_PER_TEXT] = str(1 / self.speeds.pop(0))
        pool = EncoderPool(EncodingSpec(f"hash://{_DIMENSION}"), backend=BACKEND, devices="cpu")
        pool.start()  # its workers read the speed now
        return pool

    def new_run(self, partitions: Iterable[Partition], pool: EncoderPool, **options: Any) -> EmbeddingRun:
        thresholds = Thresholds(b_min=1_000, b_max=4_000)
        store = LocalStore(self.output)
        return EmbeddingRun(partitions, store, pool, thresholds, memory_limit_bytes=_MEMORY, **options)


def _real_shards(runs: PacedRuns) -> float:
    count, speed = len(runs.speeds), sum(runs.speeds) / len(runs.speeds) * MEAN_BYTES
    waiting, published, lock = queue.SimpleQueue[Stretch](), set[str](), threading.Lock()
    for stretch in cut(list(runs.catalog), runs.catalog, count, round(_LEAST_SECONDS * speed)):
        waiting.put(stretch)

    def work(pool: EncoderPool) -> None:
        while True:
            try:
                stretch = waiting.get_nowait()
            except queue.Empty:
                return
            partitions = [runs.catalog[key] for key in stretch.keys]
            run = runs.new_run(partitions, pool, ranges=[stretch.part] if stretch.part else [])
            for _ in run.events():
                pass
            with lock:
                published.update(run.published)

    with ExitStack() as stack, ThreadPoolExecutor(count) as threads:
        pools = [stack.enter_context(runs.open_pool()) for _ in range(count)]
        seconds = seconds_of(lambda: list(threads.map(work, pools)))
    assert published == runs.catalog.keys(), "a partition is missing"
    return seconds
