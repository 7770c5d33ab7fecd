"""The SURGE cost model: predicts the seconds of a run, and its SuperBatches from partition sizes.

One encode call costs `call_seconds` whatever it holds, and each text `text_seconds` on one worker.
Encoding partition by partition pays for P calls, SuperBatches for F of them (theorem 1):

    T_PBP   = P·c_ipc + N·c_enc/G          alpha   = P·c_ipc / (N·c_enc/G)
    T_SURGE = F·c_ipc + N·c_enc/G          speedup = (1 + alpha) / (1 + alpha·F/P)

The paper takes F = ceil(N / B_min). SuperBatches end with a partition, past B_min, so there are
usually fewer of them (the paper counts 89 where the formula says 100). `predict_flushes` follows
the aggregator's own rule over the actual sizes instead, and `plan` uses that.

Sizes are texts unless they say bytes. The paper's rho, which is measured and not planned, is
`metrics.overlap_ratio`.

Reading and publishing are not in the paper's model: see `io_costs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from enum import StrEnum
from urllib.parse import urlsplit

import numpy as np

from surge_dagster.engine.run.report import SuperBatchReport
from surge_dagster.engine.run.thresholds import PARTITION_OVERHEAD_BYTES, Bounds
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.fitting import pace

CALL_SECONDS = 0.001  # c_ipc of this engine, where it was not measured
# Seconds that `IoCosts` consist of on 2 cores of AMD Zen 4 with a local disk, 2026-11-29; those of
# other machines and of buckets are a multiple.
_READ = np.array([0.8e-3, 1e-6, 5e-6, 5e-9])
_PUBLISH = np.array([0.01, 1e-3, 2e-9])
_HOST = np.array([0.04, 0.8e-3])


@dataclass(frozen=True, slots=True)
class CostConstants:
    """The costs of an encoder pool: c_ipc of a call, c_enc of a text on one worker, and G."""

    call_seconds: float
    text_seconds: float
    workers: int = 1

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
        """Return the cost of one call per partition as a multiple of that of the texts."""
        return partitions * self.call_seconds * self.texts_per_second / texts if texts else 0.0


class Recommendation(StrEnum):
    STRONG = "strongly recommended"
    BENEFICIAL = "beneficial"
    MODERATE = "moderately beneficial"
    OPTIONAL = "optional"


def speedup(alpha: float, flushes: int, partitions: int) -> float:
    """T_PBP / T_SURGE."""
    return (1 + alpha) / (1 + alpha * flushes / partitions) if partitions else 1.0


def small_share(sizes: Sequence[int] | np.ndarray, break_even_texts: float) -> float:
    """phi: the share of partitions below n*."""
    return float(np.mean(np.asarray(sizes) < break_even_texts)) if len(sizes) else 0.0


def variation(sizes: Sequence[int] | np.ndarray) -> float:
    """CV: standard deviation of the sizes over their mean."""
    mean = float(np.mean(sizes)) if len(sizes) else 0.0
    return float(np.std(sizes)) / mean if mean else 0.0


def recommend(phi: float, cv: float) -> Recommendation:
    """The paper's decision table; a value on the border belongs to the smaller side."""
    table = {
        (True, True): Recommendation.STRONG,
        (True, False): Recommendation.BENEFICIAL,
        (False, True): Recommendation.MODERATE,
        (False, False): Recommendation.OPTIONAL,
    }
    return table[phi > 0.5, cv > 1]


@dataclass(frozen=True, slots=True)
class Flush:
    """What one SuperBatch holds; a partition that is divided among several counts in each of them.

    Attributes:
        text_bytes: of its rows.
        reused: texts that have vectors already.
    """

    texts: int
    partitions: int = 1
    text_bytes: float = 0.0
    reused: int = 0

    @property
    def encoded_bytes(self) -> float:
        """Of the rows that are encoded, or get the vector of an equal one."""
        return self.text_bytes * (self.texts - self.reused) / max(1, self.texts)

    @property
    def held_bytes(self) -> float:
        """That the thresholds in bytes count."""
        return self.text_bytes + self.partitions * PARTITION_OVERHEAD_BYTES

    def plus(self, other: Flush) -> Flush:
        return Flush(
            self.texts + other.texts,
            self.partitions + other.partitions,
            self.text_bytes + other.text_bytes,
            self.reused + other.reused,
        )


def predict_flushes(
    sizes: Sequence[int] | np.ndarray,
    bounds: Bounds,
    text_bytes: Sequence[float] | np.ndarray | float = 0.0,
    rows_reused: Sequence[int] | np.ndarray | int = 0,
) -> list[Flush]:
    """The SuperBatches that the aggregator will make of these partitions, in their order.

    All rows of a partition count as its mean size.

    Args:
        text_bytes: mean size of a text, of each partition or of all.
        rows_reused: rows of each partition that have a vector already, spread evenly over its rows.
    """
    rows_of = np.asarray(sizes)
    mean_bytes = np.broadcast_to(np.asarray(text_bytes, dtype=float), rows_of.shape)
    reused_of = np.broadcast_to(np.asarray(rows_reused, dtype=int), rows_of.shape)
    made: list[Flush] = []
    pending = Flush(0, 0)
    for rows, size, reused in zip(
        rows_of.tolist(), mean_bytes.tolist(), reused_of.tolist(), strict=True
    ):
        current = Flush(rows, 1, rows * size, reused)
        joined = pending.plus(current)
        if pending.partitions and not _fits(joined, bounds):
            made.append(pending)
            joined = current
        if not _fits(joined, bounds):  # oversized, so nothing is pending by now
            segments, joined = _divided(current, size, bounds)
            made += segments
        pending = joined
        if _is_due(pending, bounds, len(made)):
            made.append(pending)
            pending = Flush(0, 0)
    return [*made, pending] if pending.partitions else made


def _fits(flush: Flush, bounds: Bounds) -> bool:
    return flush.texts <= bounds.b_max and flush.held_bytes <= bounds.b_max_bytes


def _divided(current: Flush, size: float, bounds: Bounds) -> tuple[list[Flush], Flush]:
    """Return full SuperBatches of a partition, and its tail; `size` is that of a row."""
    most = bounds.b_max
    if size:
        room = bounds.b_max_bytes - PARTITION_OVERHEAD_BYTES
        most = min(most, max(1, int(room / size)))
    rows = current.texts
    reused = current.reused
    segments: list[Flush] = []
    while rows > most:
        part = reused * most // rows
        segments.append(Flush(most, 1, most * size, part))
        rows -= most
        reused -= part
    return segments, Flush(rows, 1, rows * size, reused)


def _is_due(pending: Flush, bounds: Bounds, made: int) -> bool:
    b_min = bounds.b_min_of(made)
    is_full = pending.texts >= max(1, bounds.b_max * b_min // bounds.b_min)
    new_share = 1.0
    if pending.texts:
        new_share -= pending.reused / pending.texts
    is_enough = pending.texts - pending.reused >= b_min
    return is_full or is_enough or pending.held_bytes * new_share >= bounds.b_min_bytes


@dataclass(frozen=True, slots=True)
class Io:
    """A SuperBatch that was read and published.

    Attributes:
        reused: texts that kept their old vectors.
        file_bytes: of its vectors and texts.
        publish_seconds: by the clock, without waiting for the SuperBatch before.
        host_seconds: see `Costs`.
    """

    files: float
    texts: float
    reused: float
    file_bytes: float
    read_seconds: float
    publish_seconds: float
    host_seconds: float


@dataclass(frozen=True, slots=True)
class IoCosts:
    """Seconds of reading SuperBatches and publishing them to one kind of store; 0 if unknown.

    Attributes:
        read: of a partition, of a row, of a row that keeps its old vector, and of a byte of text.
        publish: of a SuperBatch, of a file and of a byte.
        host: processor seconds of both, of a SuperBatch and of a partition.
    """

    read: np.ndarray
    publish: np.ndarray
    host: np.ndarray


def io_costs(seen: Sequence[Io], vector_bytes: float = 0.0) -> IoCosts:
    """Return the usual costs, times the pace of what was seen.

    The SuperBatches of one catalog do not tell the cost of a file from that of a row: with costs
    from least squares the next catalog's plan was 13 % wrong, and with these 1 %.

    Args:
        vector_bytes: of a row.
    """
    rows = np.array([astuple(superbatch) for superbatch in seen], float)
    files, texts, reused, file_bytes, read, publish, host = rows.reshape(-1, len(fields(Io))).T
    ones = np.ones(len(seen))
    to_read = np.column_stack([files, texts, reused, file_bytes - texts * vector_bytes])
    return IoCosts(
        read=_paced(_READ, to_read, read),
        publish=_paced(_PUBLISH, np.column_stack([ones, files, file_bytes]), publish),
        host=_paced(_HOST, np.column_stack([ones, files]), host),
    )


def _paced(usual: np.ndarray, amounts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    return usual * pace(seconds, amounts @ usual) if len(seconds) else 0 * usual


def io_of(report: SuperBatchReport, vector_bytes: int) -> Io:
    """Return what reading and publishing a SuperBatch took."""
    costs = report.costs
    waited = 0.0
    if report.serialize_span is not None and report.encode_span is not None:
        waited = max(0.0, report.serialize_span.begun - report.encode_span.ended)
    return Io(
        files=report.partitions,
        texts=report.texts,
        reused=costs.rows_reused,
        file_bytes=report.text_bytes + report.texts * vector_bytes,
        read_seconds=costs.read_seconds,
        publish_seconds=max(0.0, costs.publish_seconds - waited),
        host_seconds=costs.host_seconds,
    )


def store_kind(store: Store) -> str:
    """Return what stores of equal costs have in common: a bucket, or the local disk."""
    if not store.is_remote:
        return "local"
    url = urlsplit(store.url)
    return f"{url.scheme}://{url.netloc}"
