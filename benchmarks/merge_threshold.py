"""Would some partitions be better sent to the encoder by themselves than copied into a SuperBatch?

Small blocks cost less when they travel together, but putting them together is a copy; the paper on the system Zero
gives the cost difference of merging every block up to a threshold T,

    P(T) = Tr(Σ s_i) + Σ Cp(s_i) - Σ Tr(s_i)        over the blocks s_i ≤ T; most negative is best

with Tr(s) the cost of handing over a block of s bytes and Cp(s) that of copying it. Here Tr is an encode call on texts
that already lie in shared memory, with a backend that computes nothing, and Cp is `Slot.append`; both are profiled and
taken as straight lines. The engine merges everything that fits a SuperBatch (T = infinity); this says what another
threshold would gain over the blocks of the synthetic catalog, as a share of the time that encoding them takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.regression import Line, fit_line
from surge_dagster.catalogs.synthetic import MEAN_BYTES, draw_texts, partition_sizes
from surge_dagster.engine.encoder.arena import Arena

CATALOG = (10_000_000, 4_000)  # texts and partitions of the papers' workload
COPY_SIZES = (1, 30, 300, 3_000, 30_000, 100_000)

Cost = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Profits:
    """P(T) in seconds for each threshold in bytes; the first is 0 (merge nothing), the last the largest block."""

    thresholds: np.ndarray
    seconds: np.ndarray

    @property
    def best(self) -> int:
        """Index of the threshold with the lowest cost."""
        return int(np.argmin(self.seconds))


def profits(sizes: np.ndarray, transfer: Cost, copy: Cost) -> Profits:
    """P(T) with every block's size as the threshold once, as the paper does, and 0 before them."""
    ordered = np.sort(np.asarray(sizes, np.float64))
    difference = transfer(np.cumsum(ordered)) + np.cumsum(copy(ordered)) - np.cumsum(transfer(ordered))
    # Blocks of one size are merged all or none: the last of them has the sums.
    last = np.append(ordered[1:] != ordered[:-1], True)
    return Profits(np.append(0.0, ordered[last]), np.append(0.0, difference[last]))


def copy_cost(sizes: tuple[int, ...], repeats: int) -> Line:
    """Seconds of `Slot.append` over the bytes of a block, with memory that was touched before."""
    texts = draw_texts(0, 1, np.arange(max(sizes), dtype=np.uint64)).cast(pa.large_string())
    blocks = {size: texts.slice(0, size) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    with Arena(slots=1, max_texts=max(sizes), max_bytes=texts.nbytes, dimension=1, dtype="float32") as arena:
        slot = arena.acquire()
        slot.append(texts)
        for _ in range(repeats):
            for size, block in blocks.items():
                slot.truncate(0)
                begun = time.perf_counter()
                slot.append(block)
                seconds[size].append(time.perf_counter() - begun)
        slot.release()
    text_bytes = [float(size * MEAN_BYTES) for size in sizes]
    return fit_line(text_bytes, [statistics.median(seconds[size]) for size in sizes])


def merge_document(call: Line, texts_per_second: float, quick: bool) -> dict[str, Any]:
    """The best threshold for the synthetic catalog and what it would gain.

    Args:
        call: seconds of an encode call over its number of texts, with a backend that computes nothing.
        texts_per_second: of the pool on short texts, in the same run.
        quick: a smaller profile.
    """
    transfer = Line(call.intercept, call.slope / MEAN_BYTES, call.low, call.high)
    copy = copy_cost(COPY_SIZES[:4] if quick else COPY_SIZES, 5 if quick else 51)
    texts, partitions = CATALOG
    blocks = partition_sizes(texts, partitions) * float(MEAN_BYTES)
    found = profits(blocks, transfer, copy)
    best, everything = found.seconds[found.best], found.seconds[-1]
    encode_seconds = texts / texts_per_second
    merged = found.thresholds[found.best]
    return {
        "texts": texts,
        "partitions": partitions,
        "transfer_us": 1e6 * transfer.intercept,
        "transfer_us_per_mb": 1e12 * transfer.slope,
        "copy_us": 1e6 * copy.intercept,
        "copy_us_per_mb": 1e12 * copy.slope,
        "best_threshold_bytes": float(merged),
        "partitions_merged_at_best": int(np.count_nonzero(blocks <= merged)),
        "profit_at_best_seconds": float(best),
        "profit_of_merging_all_seconds": float(everything),
        "gain_over_merging_all_share": float(everything - best) / encode_seconds,
        "gain_of_merging_all_share": float(-everything) / encode_seconds,
    }
