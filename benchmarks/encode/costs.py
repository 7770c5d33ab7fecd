"""What the pool costs in addition to encoding: the fixed cost of a call (c_ipc), and the start.

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
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from benchmarks.harness import Document, in_turns, median_ratio, say, seconds_of
from benchmarks.paced_runs import drawn_texts, paced_pool
from surge_dagster import EncoderPool, EncodingSpec
from surge_dagster.engine.encoder.devices import usable_cores

_SIZES = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
# sentence-transformers cuts a call into ten chunks per process; smaller calls have fewer chunks and
# lie on another line.
_PEER_SIZES = (100, 200, 500, 1_000, 3_000, 10_000)
_LOAD = """
import sys
from sentence_transformers import SentenceTransformer
SentenceTransformer(sys.argv[1], device="cpu", local_files_only=True)
"""


@dataclass(frozen=True, slots=True)
class CallCost:
    """The intercept of a line through seconds by size, and its 95 % interval."""

    intercept: float
    low: float
    high: float

    def as_dict(self) -> Document:
        return {
            "c_ipc_ms": 1e3 * self.intercept,
            "interval_ms": [1e3 * self.low, 1e3 * self.high],
        }


def call_cost_document(is_quick: bool) -> Document:
    """Return the fixed cost of a call of both pools, in milliseconds."""
    say("fixed cost of a call")
    if is_quick:
        ours = pool_call_cost(3, _SIZES[:7])
        theirs = peer_call_cost(2, _PEER_SIZES[:4])
    else:
        ours = pool_call_cost(25)
        theirs = peer_call_cost(9)
    return {
        "pool": ours.as_dict(),
        "sentence_transformers_pool": theirs.as_dict(),
    }


def pool_call_cost(calls: int, sizes: Sequence[int] = _SIZES) -> CallCost:
    """Return the cost of a call of this engine's pool with an encoder that computes nothing."""
    longest = max(sizes)
    texts = drawn_texts(longest)
    with (
        paced_pool(dimension=8) as pool,
        pool.arena(slots=len(sizes), max_texts=longest, max_bytes=texts.nbytes) as arena,
    ):
        slots = {size: arena.acquire() for size in sizes}
        for size, slot in slots.items():
            slot.append(texts.slice(0, size))
        return measure_calls(lambda size: pool.encode(slots[size]), sizes, calls)


def peer_call_cost(calls: int, sizes: Sequence[int] = _PEER_SIZES) -> CallCost:
    """Return the cost of a call of sentence-transformers' multi-process pool with a model that
    computes nothing."""
    from sentence_transformers import SentenceTransformer

    from benchmarks.encode.null_module import NullModule

    texts = drawn_texts(max(sizes)).to_pylist()
    model = SentenceTransformer(modules=[NullModule()], device="cpu")
    devices = ["cpu"] * usable_cores()
    pool = model.start_multi_process_pool(devices)

    def call(size: int) -> None:
        model.encode(texts[:size], pool=pool, batch_size=size)

    try:
        # every process imports its libraries before the first call counts
        for _ in devices:
            model.encode(texts[:100], pool=pool, chunk_size=1)
        return measure_calls(call, sizes, calls)
    finally:
        # stopping waits without end for a process that does not stop by itself
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
            seconds[size].append(seconds_of(partial(call, size)))
    return fit_line(sizes, [median(timings) for timings in seconds.values()])


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> CallCost:
    """Fit a line by least squares with weights 1 / seconds²."""
    from scipy import stats  # takes a second of every process that imports this module

    weights = 1 / np.asarray(seconds)
    (_, intercept), covariance = np.polyfit(sizes, seconds, 1, w=weights, cov=True)
    margin = stats.t.ppf(0.975, len(sizes) - 2) * np.sqrt(covariance[1, 1])
    return CallCost(float(intercept), float(intercept - margin), float(intercept + margin))


def start_cost_document(rounds: int) -> Document:
    """Return the median seconds of both starts, and the median of their ratios."""
    say("start")
    spec = EncodingSpec()
    folder = spec.resolve().model_path
    command = [sys.executable, "-c", _LOAD, folder]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}

    def start() -> float:
        with EncoderPool(spec) as pool:
            pool.start()
            return pool.start_seconds

    def load() -> float:
        run = partial(subprocess.run, command, check=True, capture_output=True, env=environment)
        return seconds_of(run)

    start()  # leaves the caches warm
    turns = in_turns({"pool": start, "load": load}, rounds)
    return {
        "pool_start_seconds": median(turns["pool"]),
        "sentence_transformers_load_seconds": median(turns["load"]),
        "ratio": median_ratio(turns["pool"], turns["load"]),
    }
