"""c_ipc, the fixed cost of one encode call: what a call costs at size zero.

Measured with a backend that computes nothing, by regression over calls of 1 to 100,000 texts, from outside of
`pool.encode`, with the texts already in shared memory. Sizes take turns in random order, and each size counts with the
median of its calls. sentence-transformers' own multi-process pool goes through the same, with a model that computes
nothing either. The published system, which starts its pool around every call, reports 87 ms.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.regression import Line, fit_line
from surge_dagster.catalogs.synthetic import draw_texts
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.fingerprint import usable_cores
from surge_dagster.engine.model.spec import EncodingSpec

SIZES = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
# sentence-transformers cuts a call into ten chunks per process: smaller calls have fewer, and lie on another line.
PEER_SIZES = (100, 200, 500, 1_000, 3_000, 10_000)
PUBLISHED_SECONDS = 0.087
BACKEND = "benchmarks.null_backend:NullBackend"


@dataclass(frozen=True, slots=True)
class CallCost:
    """Median seconds of a call of each size, the line through them, and the same line with every size alike."""

    sizes: Sequence[int]
    seconds: Sequence[float]
    line: Line
    unweighted: Line

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def pool_call_cost(sizes: Sequence[int], calls: int, workers: str = "cpu") -> CallCost:
    """What a call of this engine's pool costs, with a backend that computes nothing."""
    texts = draw_texts(0, 1, np.arange(max(sizes), dtype=np.uint64)).cast(pa.large_string())
    with (
        EncoderPool(EncodingSpec("hash://8"), backend=BACKEND, devices=workers) as pool,
        pool.arena(slots=len(sizes), max_texts=max(sizes), max_bytes=texts.nbytes) as arena,
    ):
        slots = {size: arena.acquire() for size in sizes}
        for size, slot in slots.items():
            slot.append(texts.slice(0, size))
        return measure_calls(lambda size: pool.encode(slots[size]), sizes, calls)


def peer_call_cost(sizes: Sequence[int], calls: int, processes: int) -> CallCost:
    """What a call of sentence-transformers' multi-process pool costs, with a model that computes nothing."""
    from sentence_transformers import SentenceTransformer

    from benchmarks.null_module import NullModule

    texts = draw_texts(0, 1, np.arange(max(sizes), dtype=np.uint64)).to_pylist()
    model = SentenceTransformer(modules=[NullModule()], device="cpu")
    pool = model.start_multi_process_pool(["cpu"] * processes)
    try:
        for _ in range(processes):  # every process imports its libraries before the first call counts
            model.encode(texts[:100], pool=pool, chunk_size=1)
        # One batch per chunk: what is measured is the way there and back.
        return measure_calls(lambda size: model.encode(texts[:size], pool=pool, batch_size=size), sizes, calls)
    finally:
        model.stop_multi_process_pool(pool)


def measure_calls(call: Callable[[int], object], sizes: Sequence[int], calls: int) -> CallCost:
    """Times `call` over `sizes`, in an order that mixes them, and fits both lines."""
    order = random.Random(0)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for size in sizes:
        call(size)
    for _ in range(calls):
        for size in order.sample(list(sizes), len(sizes)):
            begun = time.perf_counter()
            call(size)
            seconds[size].append(time.perf_counter() - begun)
    medians = [statistics.median(seconds[size]) for size in sizes]
    return CallCost(tuple(sizes), medians, fit_line(sizes, medians), fit_line(sizes, medians, relative=False))


def call_cost_document(quick: bool) -> dict[str, Any]:
    """Both pools' fixed cost, in milliseconds, and what they were read from."""
    processes = usable_cores()
    ours = pool_call_cost([size for size in SIZES if size <= (1_000 if quick else math.inf)], 3 if quick else 25)
    theirs = peer_call_cost(PEER_SIZES[:4] if quick else PEER_SIZES, 2 if quick else 9, processes)
    return {
        "pool": _milliseconds(ours),
        "sentence_transformers_pool": _milliseconds(theirs) | {"processes": processes},
        "published_ms": 1_000 * PUBLISHED_SECONDS,
        "ratio_to_sentence_transformers_pool": theirs.line.intercept / ours.line.intercept,
        "ratio_to_published": PUBLISHED_SECONDS / ours.line.intercept,
        "samples": {"pool": ours.as_dict(), "sentence_transformers_pool": theirs.as_dict()},
    }


def _milliseconds(cost: CallCost) -> dict[str, Any]:
    return {
        "c_ipc_ms": 1_000 * cost.line.intercept,
        "interval_ms": [1_000 * cost.line.low, 1_000 * cost.line.high],
        "unweighted_ms": 1_000 * cost.unweighted.intercept,
        "unweighted_interval_ms": [1_000 * cost.unweighted.low, 1_000 * cost.unweighted.high],
        "microseconds_per_text": 1e6 * cost.line.slope,
    }
