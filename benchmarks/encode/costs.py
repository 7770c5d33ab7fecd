"""What the pool costs besides encoding: the fixed cost of a call (c_ipc), and the start.

c_ipc is the intercept of a straight line through the times of calls of 1 to 100,000 texts, with an
encoder that computes nothing and the texts already in shared memory. Sizes take turns in random
order, and the median of a size counts. A timing is off by a share of itself, so each point is
weighted by 1 / seconds². sentence-transformers' multi-process pool goes through the same
regression. The published system, which starts such a pool once and reuses it, reports 87 ms.

The start is compared with loading the same model with sentence-transformers in a fresh process.
Both find their files on disk, include the imports, and take turns.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from benchmarks.harness import Document, say
from benchmarks.paced_runs import paced_pool
from benchmarks.synthetic import draw_texts
from surge_dagster.engine.encoder.devices import usable_cores
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec

SIZES = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
# sentence-transformers cuts a call into ten chunks per process; smaller calls have fewer chunks and
# lie on another line.
PEER_SIZES = (100, 200, 500, 1_000, 3_000, 10_000)
PUBLISHED_MS = 87.0
_LOAD = (
    "import sys; from sentence_transformers import SentenceTransformer; "
    "SentenceTransformer(sys.argv[1], device=sys.argv[2], local_files_only=True); print('ready', flush=True)"
)


@dataclass(frozen=True, slots=True)
class CallCost:
    """The line seconds = intercept + slope · size, and the 95 % interval of its intercept."""

    intercept: float
    slope: float
    low: float
    high: float


def call_cost_document(quick: bool) -> Document:
    """The fixed cost of a call of both pools, in milliseconds, and the timings behind it."""
    say("fixed cost of a call")
    ours = pool_call_cost(SIZES[:7] if quick else SIZES, 3 if quick else 25)
    theirs = peer_call_cost(
        PEER_SIZES[:4] if quick else PEER_SIZES, 2 if quick else 9, usable_cores()
    )
    return {
        "pool": _milliseconds(ours),
        "sentence_transformers_pool": _milliseconds(theirs),
        "published_ms": PUBLISHED_MS,
    }


def pool_call_cost(sizes: Sequence[int], calls: int) -> CallCost:
    """The cost of a call of this engine's pool with an encoder that computes nothing."""
    texts = draw_texts(0, 1, np.arange(max(sizes), dtype=np.uint64)).cast(pa.large_string())
    with (
        paced_pool(dimension=8) as pool,
        pool.arena(slots=len(sizes), max_texts=max(sizes), max_bytes=texts.nbytes) as arena,
    ):
        slots = {size: arena.acquire() for size in sizes}
        for size, slot in slots.items():
            slot.append(texts.slice(0, size))
        return measure_calls(lambda size: pool.encode(slots[size]), sizes, calls)


def peer_call_cost(sizes: Sequence[int], calls: int, processes: int) -> CallCost:
    """The cost of a call of sentence-transformers' multi-process pool with a model that computes
    nothing."""
    from sentence_transformers import SentenceTransformer

    from benchmarks.encode.null_module import NullModule

    texts = draw_texts(0, 1, np.arange(max(sizes), dtype=np.uint64)).to_pylist()
    model = SentenceTransformer(modules=[NullModule()], device="cpu")
    pool = model.start_multi_process_pool(["cpu"] * processes)
    try:
        # every process imports its libraries before the first call counts
        for _ in range(processes):
            model.encode(texts[:100], pool=pool, chunk_size=1)
        return measure_calls(
            lambda size: model.encode(texts[:size], pool=pool, batch_size=size), sizes, calls
        )
    finally:
        # one that does not end when it is asked to would be waited for without end
        for process in pool["processes"]:
            process.kill()
        model.stop_multi_process_pool(pool)


def measure_calls(call: Callable[[int], object], sizes: Sequence[int], calls: int) -> CallCost:
    """Time `call` over `sizes` in mixed order, after one call of each size to warm up, and fit the
    line."""
    order = random.Random(0)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for size in sizes:
        call(size)
    for _ in range(calls):
        for size in order.sample(list(sizes), len(sizes)):
            begun = time.perf_counter()
            call(size)
            seconds[size].append(time.perf_counter() - begun)
    return fit_line(sizes, [statistics.median(seconds[size]) for size in sizes])


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> CallCost:
    """Weighted least squares with weights 1 / seconds², and the 95 % interval of the intercept."""
    from scipy import stats  # takes a second of every process that collects tests

    y = np.asarray(seconds, np.float64)
    x = np.column_stack([np.ones(len(y)), np.asarray(sizes, np.float64)])
    weights = 1 / y**2
    inverse = np.linalg.inv(x.T @ (weights[:, None] * x))
    intercept, slope = (float(value) for value in inverse @ (x.T @ (weights * y)))
    freedom = len(y) - 2
    variance = float(weights @ (y - intercept - slope * x[:, 1]) ** 2) / freedom
    margin = float(stats.t.ppf(0.975, freedom)) * float(np.sqrt(variance * inverse[0, 0]))
    return CallCost(intercept, slope, intercept - margin, intercept + margin)


def start_cost_document(spec: EncodingSpec, device: str, repeats: int) -> Document:
    """Median seconds of both starts, and the median of their ratios."""
    say("start")
    with EncoderPool(spec) as pool:
        pool.start()  # leaves the caches warm
        folder = pool.space.model_path
    pools, loads = [], []
    for _ in range(repeats):
        with EncoderPool(spec) as pool:
            pool.start()
            pools.append(pool.start_seconds)
        loads.append(_load_seconds(folder, device))
    return {
        "pool_start_seconds": statistics.median(pools),
        "sentence_transformers_load_seconds": statistics.median(loads),
        "ratio": statistics.median(
            ours / theirs for ours, theirs in zip(pools, loads, strict=True)
        ),
        "repeats": repeats,
    }


def _milliseconds(cost: CallCost) -> Document:
    return {
        "c_ipc_ms": 1e3 * cost.intercept,
        "interval_ms": [1e3 * cost.low, 1e3 * cost.high],
        "microseconds_per_text": 1e6 * cost.slope,
    }


def _load_seconds(folder: str, device: str) -> float:
    begun = time.perf_counter()
    command = [sys.executable, "-c", _LOAD, folder, device]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    return time.perf_counter() - begun
