"""The strategies of the evaluation: the paper's three baselines, and SURGE with and without each of
its components.

All read the same partitions, encode with the same pool, and write the same files to the same store.
The baselines also run on sentence-transformers' own multi-process pool. `measure_on` measures a
strategy in this process; `measure` does so in a fresh one, so that memory which others left behind
does not count.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from benchmarks.encode.inputs import spec_of
from benchmarks.evaluation import published
from benchmarks.evaluation.baselines import (
    Encoder,
    Files,
    LibraryTexts,
    PoolTexts,
    fixed_size_batches,
    packed_partitions,
    partition_by_partition,
)
from benchmarks.evaluation.metering import Meter, MeteredPool, covered
from benchmarks.evaluation.stores import PROFILES, SlowStore, StorageProfile
from benchmarks.harness import Document, in_own_process, temporary_folder
from benchmarks.paced_runs import DIMENSION, drawn_partitions, embed, paced_pool
from benchmarks.synthetic import LOG_SIGMA, partition_sizes
from surge_dagster import EncoderPool
from surge_dagster.engine.encoder.schedule import EncodeCall
from surge_dagster.engine.files import rows
from surge_dagster.engine.run.report import Event, SuperBatchReport
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition

MEMORY_FOLDER = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Case:
    """What strategies are compared on.

    Attributes:
        texts, partitions: N and P; sizes are log-normal with this sigma, scaled to N in all.
        model: "simulated", "minilm", or a shape with random weights.
        library: whose pool; sentence-transformers' has a process per core and runs the baselines
            only.
        workers: G.
        text_seconds: c_enc of the simulated model, of a text on one worker.
        call_seconds: c_ipc of the simulated model, in addition to the pool's own.
        dimension: of the simulated model.
        profile: of the store, which is a folder in main memory.
        clock: the multiple of the paper's speed at which a simulated encoder and the store run.
        thresholds: of SURGE; B_min is also B of the baselines.
    """

    texts: int
    partitions: int
    sigma: float = LOG_SIGMA
    seed: int = 0
    model: str = "simulated"
    library: Literal["surge", "sentence-transformers"] = "surge"
    workers: int = 1
    text_seconds: float = 0.0
    call_seconds: float = 0.0
    dimension: int = DIMENSION
    profile: StorageProfile = PROFILES["null"]
    clock: float = 1.0
    thresholds: Thresholds = Thresholds()  # noqa: RUF009 (frozen)


@dataclass(frozen=True, slots=True)
class Work:
    """What a strategy gets.

    Attributes:
        pool: a `MeteredPool`, or for baselines also `LibraryTexts`.
    """

    partitions: Iterable[Partition]
    store: SlowStore
    pool: Any
    thresholds: Thresholds


Strategy = Callable[[Work], object]


def surge_async(work: Work) -> None:
    """Run the engine as it is."""
    embed(work.pool, work.partitions, work.store, work.thresholds)


def surge_sync(work: Work) -> None:
    """Publish each SuperBatch, file by file, before the next one is encoded."""
    pool: Any = OneAtATime(work.pool)
    embed(
        pool,
        work.partitions,
        work.store,
        work.thresholds,
        seen=pool.seen,
        publish_threads=1,
    )


class OneAtATime:
    """A pool that encodes a SuperBatch only after the previous one is published."""

    def __init__(self, pool: MeteredPool) -> None:
        self._pool = pool
        self._may_encode = threading.Semaphore(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def submit(self, *arguments: Any) -> EncodeCall:
        """Wait until the previous SuperBatch is published, then encode; the returned call has
        ended."""
        self._may_encode.acquire()
        call: Any = self._pool.submit(*arguments)
        call.result()
        return call

    def seen(self, event: Event) -> None:
        """Receive every event of the run."""
        if isinstance(event, SuperBatchReport):
            self._may_encode.release()


def surge_without_superbatches(work: Work) -> None:
    """Call for each partition, while the file of the previous one is written."""
    surge_async(replace(work, thresholds=replace(work.thresholds, b_min=1)))


def surge_without_zero_copy(work: Work) -> None:
    """Turn vectors into Python lists of floats on their way into the Arrow column (the paper's
    listing 1)."""

    def from_lists(columns: pa.Schema, matrix: np.ndarray) -> pa.Array:
        return pa.array([row.tolist() for row in matrix], columns.field("embedding").type)

    with patch.object(rows, "embedding_array", from_lists):
        surge_async(work)


def _baseline(
    run: Callable[[Iterable[Partition], Encoder, Files, int], None],
) -> Strategy:
    """Return a baseline with batches of B_min texts, on this engine's pool or on the library's."""

    def strategy(work: Work) -> None:
        with contextlib.ExitStack() as opened:
            encoder = work.pool
            if not isinstance(encoder, LibraryTexts):
                encoder = opened.enter_context(closing(PoolTexts(encoder)))
            files = opened.enter_context(closing(Files(work.store, encoder.space)))
            run(work.partitions, encoder, files, work.thresholds.b_min or published.B_MIN)

    return strategy


STRATEGIES: dict[str, Strategy] = {
    "pbp": _baseline(partition_by_partition),
    "fsb": _baseline(fixed_size_batches),
    "pb-pbp-lb": _baseline(packed_partitions),
    "surge-sync": surge_sync,
    "surge-async": surge_async,
    "surge-without-superbatches": surge_without_superbatches,
    "surge-without-zero-copy": surge_without_zero_copy,
}


def measure(name: str, strategy: str, case: Case, group: str) -> Document:
    """Run a strategy in its own process."""
    return in_own_process(_measure, name, strategy, case, group)


def _measure(name: str, strategy: str, case: Case, group: str) -> Document:
    with opened(case) as pool:
        return measure_on(pool, name, strategy, case, group)


def measure_on(
    pool: EncoderPool | LibraryTexts, name: str, strategy: str, case: Case, group: str
) -> Document:
    """Run a strategy in this process, on a pool of the case.

    Args:
        group: a model, a sigma, a profile or a number of texts; empty if there is one group.
    """
    sizes = partition_sizes(case.texts, case.partitions, case.sigma, case.seed).tolist()
    meter = Meter()
    if isinstance(pool, LibraryTexts):
        front = pool
        front.meter = meter
    else:
        front = MeteredPool(pool, meter)
    with temporary_folder(MEMORY_FOLDER) as folder:
        store = SlowStore(folder, case.profile, case.clock)
        work = Work(drawn_partitions(sizes), store, front, case.thresholds)
        with meter:
            STRATEGIES[strategy](work)
    return {"name": name, "group": group, **_figures(strategy, case, meter, store)}


def _figures(strategy: str, case: Case, meter: Meter, store: SlowStore) -> Document:
    """Return the figures of a run.

    Returns:
        - throughput: texts/s at the paper's clock; with a real encoder, as measured.
        - encoding: the same of the encode calls only.
        - memory: GB above the start.
        - ttfo: seconds until the first file, at the paper's scale; with a real encoder, as
          measured.
        - ttfo_seconds: as measured.
        - largest: texts of one encode call.
        - wall_seconds: from a pool that is ready to the last file.
        - exposed: seconds in which files were written and nothing was encoded, before the last call
          ended.
    """
    texts = sum(meter.call_texts)
    assert texts == case.texts
    assert len(store.published) == case.partitions
    last_file = max(store.published)
    wall_seconds = last_file - meter.begun
    first_seconds = min(store.published) - meter.begun
    encode_seconds = covered(meter.calls)
    tail_seconds = max(0.0, last_file - meter.calls[-1][1])
    exposed_seconds = covered([*meter.calls, *store.files]) - encode_seconds
    return {
        "texts": texts,
        "partitions": case.partitions,
        "throughput": texts / wall_seconds / case.clock,
        "encoding": texts / encode_seconds / case.clock,
        "memory": meter.grown_bytes / 1e9,
        "ttfo": first_seconds * case.clock * _first_output_factor(strategy, case),
        "ttfo_seconds": first_seconds,
        "largest": max(meter.call_texts),
        "b_max": case.thresholds.b_max or 0,
        "wall_seconds": wall_seconds,
        "exposed": max(0.0, exposed_seconds - tail_seconds),
    }


def _first_output_factor(strategy: str, case: Case) -> float:
    """Return how much more the paper encodes before its first file: all texts, or a larger
    batch."""
    # only the encoder's speed is simulated, at the paper's own clock
    if not case.call_seconds:
        return 1.0
    if strategy == "fsb":
        return published.TEXTS / case.texts
    return published.MEAN_SIZE * case.partitions / case.texts


@contextlib.contextmanager
def opened(case: Case) -> Iterator[EncoderPool | LibraryTexts]:
    """Yield the encoder of a case."""
    with temporary_folder(MEMORY_FOLDER) as folder, contextlib.ExitStack() as stack:
        if case.model == "simulated":
            speed = 1 / case.text_seconds if case.text_seconds else float("inf")
            workers = case.workers
            pool = paced_pool(
                speed, case.dimension, workers=workers, call_seconds=case.call_seconds
            )
            yield stack.enter_context(pool)
            return
        spec = spec_of(case.model, folder)
        if case.library == "sentence-transformers":
            yield stack.enter_context(closing(LibraryTexts(spec.resolve())))
            return
        devices = ",".join(["cpu"] * case.workers)
        pool = stack.enter_context(EncoderPool(spec, devices=devices, precision="fp32"))
        pool.start()
        yield pool
