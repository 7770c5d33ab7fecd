"""The strategies of the evaluation: the paper's three baselines, and SURGE with and without each of
its components.

All read the same partitions, encode with the same pool, and write the same files to the same store.
The baselines also run on sentence-transformers' own multi-process pool. `measure_on` measures a
strategy in this process; `measure` does so in a fresh one, so that memory which others left behind
does not count.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from benchmarks.encode.inputs import write_model
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
from benchmarks.paced_runs import DIMENSION, drawn_partitions, embed, paced_pool
from benchmarks.synthetic import LOG_SIGMA, partition_sizes
from surge_dagster.engine.encoder.calls import EncodeCall
from surge_dagster.engine.encoder.metrics import overlap_ratio
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files import rows
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.report import Event, SuperBatchReport
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition

MEMORY_FOLDER = "/dev/shm"

Strategy = Callable[[Iterable[Partition], SlowStore, Any, Thresholds], object]


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
class Measured:
    """A strategy's run.

    Attributes:
        group: what the run is one of: a model, a sigma, a profile, a number of texts. Empty where
            there is one group.
        throughput: texts/s at the paper's clock; with a real encoder, as measured.
        encoding: the same of the encode calls only.
        duty: share of the wall time in which an encode call was running.
        rho: the paper's overlap (equation 4), of all calls and files together.
        memory: GB above the start.
        ttfo: seconds until the first file, at the paper's scale; with a real encoder, as measured.
        ttfo_seconds: as measured.
        calls: encode calls.
        largest: texts of one encode call.
        wall_seconds: from a pool that is ready to the last file.
        exposed: seconds in which files were written and nothing was encoded, before the last call
            ended.
        tail: seconds after the last call.
    """

    name: str
    group: str
    texts: int
    partitions: int
    throughput: float
    encoding: float
    duty: float
    rho: float
    memory: float
    ttfo: float
    ttfo_seconds: float
    calls: int
    largest: int
    b_max: int
    wall_seconds: float
    encode_seconds: float
    exposed: float
    tail: float


def surge_sync(
    partitions: Iterable[Partition], store: SlowStore, pool: Any, thresholds: Thresholds
) -> None:
    """Each SuperBatch is published, file by file, before the next one is encoded."""
    front: Any = OneAtATime(pool)
    embed(front, partitions, store, thresholds, seen=front.seen, publish_threads=1)


class OneAtATime:
    """Wraps a pool and encodes a SuperBatch only after the one before is published."""

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


def surge_without_superbatches(
    partitions: Iterable[Partition], store: SlowStore, pool: Any, thresholds: Thresholds
) -> None:
    """A call for each partition, while the file of the one before is written."""
    embed(pool, partitions, store, replace(thresholds, b_min=1))


def surge_without_zero_copy(
    partitions: Iterable[Partition], store: SlowStore, pool: Any, thresholds: Thresholds
) -> None:
    """Vectors become Python lists of floats on their way into the Arrow column (the paper's listing
    1)."""

    def from_lists(columns: pa.Schema, matrix: np.ndarray) -> pa.Array:
        return pa.array([row.tolist() for row in matrix], columns.field("embedding").type)

    with patch.object(rows, "embedding_array", from_lists):
        embed(pool, partitions, store, thresholds)


def _baseline(work: Callable[[Iterable[Partition], Encoder, Files, int], None]) -> Strategy:
    """A baseline with batches of B_min texts, on this engine's pool or on the library's."""

    def strategy(
        partitions: Iterable[Partition], store: SlowStore, pool: Any, thresholds: Thresholds
    ) -> None:
        with contextlib.ExitStack() as opened:
            encoder = (
                pool
                if isinstance(pool, LibraryTexts)
                else opened.enter_context(closing(PoolTexts(pool)))
            )
            files = opened.enter_context(closing(Files(store, encoder.space)))
            work(partitions, encoder, files, thresholds.b_min or published.B_MIN)

    return strategy


STRATEGIES: dict[str, Strategy] = {
    "pbp": _baseline(partition_by_partition),
    "fsb": _baseline(fixed_size_batches),
    "pb-pbp-lb": _baseline(packed_partitions),
    "surge-sync": surge_sync,
    "surge-async": lambda partitions, store, pool, thresholds: embed(
        pool, partitions, store, thresholds
    ),
    "surge-without-superbatches": surge_without_superbatches,
    "surge-without-zero-copy": surge_without_zero_copy,
}


def measure(name: str, strategy: str, case: Case, group: str) -> Measured:
    """Run a strategy in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(_measure, name, strategy, case, group).result()


def _measure(name: str, strategy: str, case: Case, group: str) -> Measured:
    with opened(case) as pool:
        return measure_on(pool, name, strategy, case, group)


def measure_on(
    pool: EncoderPool | LibraryTexts, name: str, strategy: str, case: Case, group: str
) -> Measured:
    """Run a strategy in this process, on a pool of the case."""
    sizes = partition_sizes(case.texts, case.partitions, case.sigma, case.seed).tolist()
    meter = Meter()
    front = MeteredPool(pool, meter) if isinstance(pool, EncoderPool) else pool
    if isinstance(front, LibraryTexts):
        front.meter = meter
    with tempfile.TemporaryDirectory(prefix="surge-eval-", dir=MEMORY_FOLDER) as folder:
        store = SlowStore(Path(folder), case.profile, case.clock)
        with meter:
            STRATEGIES[strategy](drawn_partitions(sizes), store, front, case.thresholds)
    texts = sum(meter.call_texts)
    assert (texts, len(store.published)) == (case.texts, case.partitions)
    wall_seconds, first_seconds = (
        max(store.published) - meter.begun,
        min(store.published) - meter.begun,
    )
    encode_seconds = covered(meter.calls)
    tail_seconds = max(0.0, max(store.published) - meter.calls[-1][1])
    exposed_seconds = covered([*meter.calls, *store.files]) - encode_seconds
    return Measured(
        name=name,
        group=group,
        texts=texts,
        partitions=len(store.published),
        throughput=texts / wall_seconds / case.clock,
        encoding=texts / encode_seconds / case.clock,
        duty=encode_seconds / wall_seconds,
        rho=overlap_ratio(covered(store.files), encode_seconds),
        memory=meter.grown_bytes / 1e9,
        ttfo=first_seconds * case.clock * _first_output_factor(strategy, case),
        ttfo_seconds=first_seconds,
        calls=len(meter.calls),
        largest=max(meter.call_texts),
        b_max=case.thresholds.b_max or 0,
        wall_seconds=wall_seconds,
        encode_seconds=encode_seconds,
        exposed=max(0.0, exposed_seconds - tail_seconds),
        tail=tail_seconds,
    )


def _first_output_factor(strategy: str, case: Case) -> float:
    """How much more the paper encodes before its first file: all texts, or a larger batch."""
    # nothing but the encoder's speed is simulated, at the paper's own clock
    if not case.call_seconds:
        return 1.0
    return (
        published.TEXTS / case.texts
        if strategy == "fsb"
        else published.MEAN_SIZE * case.partitions / case.texts
    )


@contextlib.contextmanager
def opened(case: Case) -> Iterator[EncoderPool | LibraryTexts]:
    """The encoder of a case."""
    if case.model == "simulated":
        speed = 1 / case.text_seconds if case.text_seconds else None
        with paced_pool(
            speed, case.dimension, workers=case.workers, call_seconds=case.call_seconds
        ) as pool:
            yield pool
        return
    with tempfile.TemporaryDirectory(prefix="surge-eval-", dir=MEMORY_FOLDER) as folder:
        spec = (
            EncodingSpec()
            if case.model == "minilm"
            else EncodingSpec(write_model(case.model, Path(folder)))
        )
        if case.library == "sentence-transformers":
            with closing(LibraryTexts(spec.resolve())) as encoder:
                yield encoder
        else:
            with EncoderPool(
                spec, devices=",".join(["cpu"] * case.workers), precision="fp32"
            ) as pool:
                pool.start()
                yield pool
