"""The strategies of the evaluation: the paper's three baselines, and SURGE with and without each of its components.

All read the same partitions, encode with the same pool, and write the same files to the same store. The baselines also
run on sentence-transformers' own multi-process pool. `run` measures a strategy in this process; `measure` runs a case
in a fresh one, so that memory which others left behind does not count.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from benchmarks.evaluation.baselines import (
    Files,
    TextEncoder,
    fixed_size_batches,
    packed_partitions,
    partition_by_partition,
)
from benchmarks.evaluation.encoders import PoolTexts, SentenceTransformersTexts
from benchmarks.evaluation.metering import Meter, MeteredPool, MeteredTexts, Outcome
from benchmarks.paced_runs import DIMENSION, drawn_partitions, embed, paced_pool
from benchmarks.shapes import SHAPES, write_model
from benchmarks.storage_profiles import PROFILES, DelayedStore, OneAtATime, StorageProfile
from surge_dagster.catalogs.synthetic import LOG_SIGMA, MEAN_BYTES, partition_sizes
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files import rows
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.embedding_run import publishing_threads
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store

MODELS = ("simulated", "minilm", *SHAPES)
PUBLISHED_B_MIN = 100_000

Strategy = Callable[[Iterable[Partition], Store, Any, Thresholds], None]


def surge_async(partitions: Iterable[Partition], store: Store, pool: Any, thresholds: Thresholds) -> None:
    """The product as it is."""
    embed(pool, partitions, store, thresholds)


def surge_sync(partitions: Iterable[Partition], store: Store, pool: Any, thresholds: Thresholds) -> None:
    """Each SuperBatch is published, file by file, before the next one is encoded."""
    front: Any = OneAtATime(pool)
    embed(front, partitions, store, thresholds, seen=front.seen, publish_threads=1)


def surge_without_superbatches(
    partitions: Iterable[Partition], store: Store, pool: Any, thresholds: Thresholds
) -> None:
    """A call for each partition, while the file of the one before is written."""
    embed(pool, partitions, store, replace(thresholds, b_min=1))


def surge_without_zero_copy(partitions: Iterable[Partition], store: Store, pool: Any, thresholds: Thresholds) -> None:
    """Vectors become Python lists of floats on their way into the Arrow column (the paper's listing 1)."""
    with patch.object(rows, "embedding_array", _naive_column):
        embed(pool, partitions, store, thresholds)


def _naive_column(columns: pa.Schema, matrix: np.ndarray) -> pa.Array:
    return pa.array([row.tolist() for row in matrix], columns.field("embedding").type)


def _baseline(work: Callable[[Iterable[Partition], TextEncoder, Files, int], None]) -> Strategy:
    """A baseline with batches of B_min texts, on this engine's pool or on an encoder of texts."""

    def strategy(partitions: Iterable[Partition], store: Store, pool: Any, thresholds: Thresholds) -> None:
        with contextlib.ExitStack() as opened:
            is_texts = isinstance(pool, MeteredTexts)
            encoder = pool if is_texts else opened.enter_context(closing(PoolTexts(pool)))
            threads = publishing_threads(store, encoder.workers)
            files = opened.enter_context(Files(store, encoder.space, encoder.precision, threads))
            work(partitions, encoder, files, thresholds.b_min or PUBLISHED_B_MIN)

    return strategy


BASELINES: dict[str, Strategy] = {
    "pbp": _baseline(partition_by_partition),
    "fsb": _baseline(fixed_size_batches),
    "pb-pbp-lb": _baseline(packed_partitions),
}
ABLATIONS: dict[str, Strategy] = {
    "surge-without-superbatches": surge_without_superbatches,
    "surge-without-zero-copy": surge_without_zero_copy,
}
STRATEGIES: dict[str, Strategy] = {
    **BASELINES,
    "surge-sync": surge_sync,
    "surge-async": surge_async,
    **ABLATIONS,
}


@dataclass(frozen=True, slots=True)
class Case:
    """What strategies are compared on.

    Attributes:
        texts, partitions: N and P; sizes are log-normal with this sigma, scaled to N in all.
        model: "simulated", "minilm", or a shape with random weights.
        library: whose pool; sentence-transformers' has a process per core and runs the baselines only.
        workers: G.
        text_seconds: c_enc of the simulated model, of a text on one worker.
        call_seconds: c_ipc of the simulated model, in addition to the pool's own.
        dimension: of the simulated model.
        profile: of the store, which is a folder in main memory.
        bandwidth_scale: of the profile.
        thresholds: of SURGE; B_min is also B of the baselines.
        folder: where outputs are written, and removed.
    """

    texts: int
    partitions: int
    sigma: float = LOG_SIGMA
    seed: int = 0
    mean_bytes: int = MEAN_BYTES
    model: str = "simulated"
    library: Literal["surge", "sentence-transformers"] = "surge"
    workers: int = 1
    text_seconds: float = 0.0
    call_seconds: float = 0.0
    dimension: int = DIMENSION
    precision: str = "auto"
    profile: StorageProfile = PROFILES["null"]
    bandwidth_scale: float = 1.0
    thresholds: Thresholds = Thresholds()  # noqa: RUF009 (frozen)
    folder: str = "/dev/shm"


def run(
    strategy: str,
    partitions: Iterable[Partition],
    store: Store,
    pool: EncoderPool | TextEncoder,
    thresholds: Thresholds,
) -> Outcome:
    """Run a strategy in this process.

    Args:
        strategy: one of `STRATEGIES`.
        pool: this engine's, or for one of `BASELINES` any encoder of texts.
        thresholds: of SURGE; the baselines' B is its B_min, 100,000 where it has none.
    """
    meter = Meter()
    front = MeteredPool(pool, meter) if isinstance(pool, EncoderPool) else MeteredTexts(pool, meter)
    with meter, meter.watching(store):
        STRATEGIES[strategy](partitions, store, front, thresholds)
    return meter.outcome()


def measure(strategy: str, case: Case) -> Outcome:
    """Run a strategy in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(_measured, strategy, case).result()


def _measured(strategy: str, case: Case) -> Outcome:
    with opened(case) as pool:
        return measure_on(pool, strategy, case)


def measure_on(pool: EncoderPool | TextEncoder, strategy: str, case: Case) -> Outcome:
    """Run a strategy in this process, on a pool of the case."""
    sizes = partition_sizes(case.texts, case.partitions, case.sigma, case.seed).tolist()
    with tempfile.TemporaryDirectory(prefix="surge-eval-", dir=case.folder) as folder:
        store = DelayedStore(Path(folder), case.profile, case.bandwidth_scale, keep=False)
        return run(strategy, drawn_partitions(sizes, case.mean_bytes), store, pool, case.thresholds)


@contextlib.contextmanager
def opened(case: Case) -> Iterator[EncoderPool | TextEncoder]:
    """The encoder of a case."""
    if case.model == "simulated":
        speed = 1 / case.text_seconds if case.text_seconds else None
        with paced_pool(speed, case.dimension, workers=case.workers, call_seconds=case.call_seconds) as pool:
            yield pool
        return
    with tempfile.TemporaryDirectory(prefix="surge-eval-", dir=case.folder) as folder:
        spec = EncodingSpec() if case.model == "minilm" else EncodingSpec(write_model(case.model, Path(folder)))
        if case.library == "sentence-transformers":
            with closing(SentenceTransformersTexts(spec.resolve())) as encoder:
                yield encoder
        else:
            with EncoderPool(spec, devices=",".join(["cpu"] * case.workers), precision=case.precision) as pool:
                pool.start()
                yield pool
