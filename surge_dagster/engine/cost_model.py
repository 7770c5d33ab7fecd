"""The SURGE cost model: predicts the seconds of a run, and its SuperBatches from the sizes of the partitions.

One encode call costs `call_seconds` whatever it holds, and each text `text_seconds` on one worker. Encoding partition
by partition pays for P calls, SuperBatches for F of them (theorem 1):

    T_PBP   = P·c_ipc + N·c_enc/G          alpha   = P·c_ipc / (N·c_enc/G)
    T_SURGE = F·c_ipc + N·c_enc/G          speedup = (1 + alpha) / (1 + alpha·F/P)

The paper takes F = ceil(N / B_min). That is an upper bound as long as no partition passes B_max: SuperBatches end with
a partition, past B_min, so there are fewer of them (the paper counts 89 where the formula says 100). `predict_flushes`
follows the aggregator's own rule over the actual sizes instead, and `plan` uses that.

Sizes are texts unless they say bytes. The paper's rho, which is measured and not planned, is `report.overlap_ratio`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.thresholds import PARTITION_OVERHEAD_BYTES, Bounds, Thresholds, stepped_b_min

CALL_SECONDS = 0.001  # c_ipc of this engine, where it was not measured


@dataclass(frozen=True, slots=True)
class CostConstants:
    """The measured costs of an encoder pool.

    Attributes:
        call_seconds: c_ipc, fixed cost of one encode call.
        text_seconds: c_enc, cost of one text on one worker.
        workers: G.
    """

    call_seconds: float
    text_seconds: float
    workers: int = 1

    def __post_init__(self) -> None:
        if self.call_seconds < 0 or self.text_seconds <= 0 or self.workers < 1:
            raise ConfigError(
                "the cost model needs call_seconds of at least 0, text_seconds above 0 and at least one worker, "
                f"not {self.call_seconds}, {self.text_seconds} and {self.workers}"
            )

    @property
    def texts_per_second(self) -> float:
        """G / c_enc: the speed of the pool if calls cost nothing."""
        return self.workers / self.text_seconds

    @property
    def break_even_texts(self) -> float:
        """n*: a partition below it spends more on its call than on its texts."""
        return self.call_seconds * self.workers / self.text_seconds

    def seconds(self, calls: int, texts: int) -> float:
        """T_PBP with calls = P, T_SURGE with calls = F."""
        return calls * self.call_seconds + texts / self.texts_per_second

    def alpha(self, partitions: int, texts: int) -> float:
        """Cost of all calls of a run partition by partition, as a multiple of the cost of its texts."""
        if texts == 0:
            return math.inf if partitions else 0.0
        return partitions * self.call_seconds * self.texts_per_second / texts


class Recommendation(StrEnum):
    """How much a catalog gains from SuperBatches."""

    STRONG = "strongly recommended"
    BENEFICIAL = "beneficial"
    MODERATE = "moderately beneficial"
    OPTIONAL = "optional"


def speedup(alpha: float, flushes: int, partitions: int) -> float:
    """T_PBP / T_SURGE."""
    if partitions == 0:
        return 1.0
    if math.isinf(alpha):
        return partitions / max(1, flushes)
    return (1 + alpha) / (1 + alpha * flushes / partitions)


def flushes_upper_bound(texts: int, b_min: int) -> int:
    """The paper's F, for catalogs without partitions above B_max."""
    return math.ceil(texts / b_min)


def small_share(sizes: Sequence[int] | np.ndarray, break_even_texts: float) -> float:
    """phi: the share of partitions below n*."""
    return float(np.mean(np.asarray(sizes) < break_even_texts)) if len(sizes) else 0.0


def variation(sizes: Sequence[int] | np.ndarray) -> float:
    """CV: standard deviation of the sizes over their mean."""
    mean = float(np.mean(sizes)) if len(sizes) else 0.0
    return float(np.std(sizes)) / mean if mean else 0.0


def recommend(phi: float, cv: float) -> Recommendation:
    """The paper's decision table; a value on the border belongs to the smaller side."""
    if phi > 0.5:
        return Recommendation.STRONG if cv > 1 else Recommendation.BENEFICIAL
    return Recommendation.MODERATE if cv > 1 else Recommendation.OPTIONAL


def superbatch_bytes(texts: int, mean_text_bytes: float, dimension: int, itemsize: int = 4) -> int:
    """M(S) of lemma 3: the texts of a SuperBatch and their matrix."""
    return math.ceil(texts * mean_text_bytes) + texts * dimension * itemsize


def predict_flushes(
    sizes: Sequence[int] | np.ndarray,
    b_min: int,
    b_max: int,
    *,
    mean_row_bytes: float = 0.0,
    b_min_bytes: int | None = None,
    b_max_bytes: int | None = None,
    first_b_min: int | None = None,
) -> list[int]:
    """The texts of each SuperBatch that the aggregator will make of these partitions, in their order.

    The thresholds in bytes count with the mean size of a row (id and text), so they are exact for equal rows only.
    """
    most_bytes = math.inf if b_max_bytes is None else b_max_bytes
    enough_bytes = math.inf if b_min_bytes is None else b_min_bytes

    def capacity(overhead_bytes: int) -> int:
        if mean_row_bytes <= 0 or math.isinf(most_bytes):
            return b_max
        return max(1, min(b_max, math.floor((most_bytes - overhead_bytes) / mean_row_bytes)))

    # A partition's overhead is counted once, with its first rows.
    first_capacity, next_capacity = capacity(PARTITION_OVERHEAD_BYTES), capacity(0)
    flushes: list[int] = []
    pending, pending_bytes, waiting = 0, 0.0, False
    for size in np.asarray(sizes).tolist():
        size_bytes = size * mean_row_bytes + PARTITION_OVERHEAD_BYTES
        if waiting and (pending + size > b_max or pending_bytes + size_bytes > most_bytes):
            flushes.append(pending)
            pending, pending_bytes = 0, 0.0
        room = first_capacity
        while size > room:  # oversized, so nothing is pending by now
            flushes.append(room)
            size -= room
            size_bytes, room = size * mean_row_bytes, next_capacity
        pending, pending_bytes, waiting = pending + size, pending_bytes + size_bytes, True
        if pending >= stepped_b_min(b_min, first_b_min, len(flushes)) or pending_bytes >= enough_bytes:
            flushes.append(pending)
            pending, pending_bytes, waiting = 0, 0.0, False
    return [*flushes, pending] if waiting else flushes


@dataclass(frozen=True, slots=True)
class Plan:
    """The predicted cost of a run over a catalog.

    Attributes:
        bounds: the thresholds that were planned with.
        seconds, texts_per_second: of the encoding, predicted.
        flushes: SuperBatches, predicted from the sizes; flushes_bound is the paper's ceil(N / B_min).
        fill_ratio: mean texts of a SuperBatch over B_min.
        partition_by_partition_seconds: the same work with one call per partition.
        phi, cv, break_even_texts: the catalog's shape, and n* that phi is measured against.
        peak_superbatch_bytes: of the largest SuperBatch that the sizes will make.
        bound_superbatch_bytes: of the largest one that B_max admits.
    """

    bounds: Bounds
    partitions: int
    texts: int
    largest_partition_texts: int
    seconds: float
    texts_per_second: float
    flushes: int
    flushes_bound: int
    fill_ratio: float
    partition_by_partition_seconds: float
    speedup: float
    alpha: float
    break_even_texts: float
    phi: float
    cv: float
    recommendation: Recommendation
    peak_superbatch_bytes: int
    bound_superbatch_bytes: int


def plan(
    sizes: Sequence[int] | np.ndarray,
    constants: CostConstants,
    thresholds: Thresholds | None = None,
    *,
    dimension: int = 384,
    itemsize: int = 4,
    mean_text_bytes: float = 47.0,
    mean_id_bytes: float = 0.0,
) -> Plan:
    """Predict a run over partitions of these sizes, in the source's order.

    Raises:
        ConfigError: thresholds that contradict each other.
    """
    counts = np.asarray(sizes, dtype=np.int64)
    partitions, texts = len(counts), int(counts.sum())
    bounds = (thresholds or Thresholds()).resolve(constants.texts_per_second)
    flushes = predict_flushes(
        counts,
        bounds.b_min,
        bounds.b_max,
        mean_row_bytes=mean_text_bytes + mean_id_bytes,
        b_min_bytes=bounds.b_min_bytes,
        b_max_bytes=bounds.b_max_bytes,
        first_b_min=bounds.first_b_min,
    )
    seconds = constants.seconds(len(flushes), texts)
    alpha = constants.alpha(partitions, texts)
    phi, cv = small_share(counts, constants.break_even_texts), variation(counts)
    return Plan(
        bounds=bounds,
        partitions=partitions,
        texts=texts,
        largest_partition_texts=int(counts.max(initial=0)),
        seconds=seconds,
        texts_per_second=texts / seconds if seconds else 0.0,
        flushes=len(flushes),
        flushes_bound=flushes_upper_bound(texts, bounds.b_min),
        fill_ratio=texts / len(flushes) / bounds.b_min if flushes else 0.0,
        partition_by_partition_seconds=constants.seconds(partitions, texts),
        speedup=speedup(alpha, len(flushes), partitions),
        alpha=alpha,
        break_even_texts=constants.break_even_texts,
        phi=phi,
        cv=cv,
        recommendation=recommend(phi, cv),
        peak_superbatch_bytes=superbatch_bytes(max(flushes, default=0), mean_text_bytes, dimension, itemsize),
        bound_superbatch_bytes=superbatch_bytes(bounds.b_max, mean_text_bytes, dimension, itemsize),
    )
