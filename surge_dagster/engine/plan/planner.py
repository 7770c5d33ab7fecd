"""The planner: what a run will cost, from the sizes of its partitions and the calibrated costs of
its stages.

The aggregator's rule makes SuperBatches of the sizes (`predict_flushes`), the fitted costs give the
seconds of each stage for each of them, and `forecast` lets these pass the stages as a run does: one
encodes while the one before it is published and the next one is read, into the slot of the one
before these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np

from surge_dagster.engine.encoder.costs import EncodeCosts, Fit
from surge_dagster.engine.encoder.metrics import overlap_ratio
from surge_dagster.engine.plan.cost_model import (
    CostConstants,
    Flush,
    Recommendation,
    flushes_upper_bound,
    predict_flushes,
    recommend,
    small_share,
    speedup,
    superbatch_bytes,
    variation,
)
from surge_dagster.engine.run.memory import SLOTS, MemoryPlan
from surge_dagster.engine.run.report import Failure
from surge_dagster.engine.run.thresholds import PARTITION_OVERHEAD_BYTES, Bounds

_TOKENS_OF_TEXTS = (8, 32, 128, 512)
_LEAST_GAIN = 0.01  # of the encoding time; less is within what a prediction is wrong by


@dataclass(frozen=True, slots=True)
class IoCosts:
    """The costs of reading SuperBatches and publishing them to one kind of store; all 0 where that
    was not done yet.

    Attributes:
        read: seconds of a partition, of a row, of a row that keeps its old vector, and of a byte of
            text.
        write: seconds of a file and of a byte, to serialize and upload them, summed over threads.
        publish: seconds of a SuperBatch, of a file and of a byte, by the clock.
        start_seconds: from the beginning of a run to its first encode call, without reading.
    """

    read: Fit
    write: Fit
    publish: Fit
    start_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RunCosts:
    """All that a prediction is made from.

    Attributes:
        waiting_seconds: of a run, in which workers wait for the last one of them: at its end, and
            where a small SuperBatch at its beginning does not divide.
    """

    encode: EncodeCosts
    io: IoCosts
    vector_bytes: int
    waiting_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted times of a run; names and meaning are those of the report."""

    wall_seconds: float = 0.0
    # half of the 95 % confidence interval; None where the costs were given
    margin_seconds: float | None = None
    texts_per_second: float = 0.0
    encode_seconds: float = 0.0
    publish_seconds: float = 0.0
    exposed_io_seconds: float = 0.0
    time_to_first_output_seconds: float = 0.0
    overlap_ratio: float = 1.0
    duty_cycle: float = 0.0


def forecast(flushes: Sequence[Flush], costs: RunCosts) -> Forecast:
    if not flushes:
        return Forecast()
    texts, partitions, text_bytes, reused = np.array([astuple(flush) for flush in flushes], float).T
    encoded_texts = (texts - reused) * (1 - costs.encode.equal_share)
    tokens = text_bytes * (texts - reused) / np.maximum(texts, 1) * costs.encode.tokens_per_byte
    encoded_bytes = text_bytes * encoded_texts / np.maximum(texts, 1)
    file_bytes = text_bytes + texts * costs.vector_bytes
    read = costs.io.read.seconds(np.column_stack([partitions, texts, reused, text_bytes]))
    encode = costs.encode.seconds(encoded_texts, tokens, encoded_bytes)
    # at most as if one did it all
    encode[-1] += min(costs.waiting_seconds, (costs.encode.workers - 1) * encode.sum())
    publish = costs.io.publish.seconds(
        np.column_stack([np.ones(len(flushes)), partitions, file_bytes])
    )
    ready = encoded = costs.io.start_seconds
    exposed, published = 0.0, list[float]()
    for index in range(len(flushes)):
        slot_free = published[index - SLOTS] if index >= SLOTS else 0.0
        exposed += max(0.0, slot_free - max(ready, encoded))
        ready = max(ready, slot_free) + read[index]
        encoded = max(ready, encoded) + encode[index]
        published.append(max(encoded, published[-1] if published else 0.0) + publish[index])
    wall, all_encode, all_publish = float(published[-1]), float(encode.sum()), float(publish.sum())
    return Forecast(
        wall_seconds=wall,
        margin_seconds=costs.encode.margin(encoded_texts, tokens, encoded_bytes),
        texts_per_second=float((texts - reused).sum()) / wall if wall else 0.0,
        encode_seconds=all_encode,
        publish_seconds=all_publish,
        exposed_io_seconds=float(exposed),
        time_to_first_output_seconds=float(published[0]),
        overlap_ratio=overlap_ratio(all_publish, all_encode),
        duty_cycle=all_encode / wall if wall else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers that finish in time, and their machines; no number is enough where `wall_seconds`
    is too long."""

    deadline_seconds: float
    workers: int
    machines: int
    wall_seconds: float


def size_fleet(
    model: CostConstants,
    texts: int,
    calls: int,
    other_seconds: float,
    deadline_seconds: float,
    served: int | None,
) -> Fleet:
    """The fewest workers that encode in time what other seconds leave of it, and Zero's rule for
    their machines.

    One machine's way to the store can serve so many workers; None counts them all to one machine.
    """
    left = deadline_seconds - other_seconds - calls * model.call_seconds
    workers = max(
        1, math.ceil(texts * model.text_seconds / (left if left > 0 else deadline_seconds))
    )
    machines = math.ceil(workers / served) if served else 1
    workers = machines * math.ceil(workers / machines)  # each has as many
    with_them = CostConstants(model.call_seconds, model.text_seconds, workers)
    return Fleet(
        deadline_seconds, workers, machines, other_seconds + with_them.seconds(calls, texts)
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """The prediction of a run.

    Attributes:
        texts: of all rows.
        texts_encoded: those without a vector in an old file; equal ones count.
        rows_reused: the others.
        tokens_counted: whether the model's tokenizer counted those of `texts_sampled` texts; else
            they are as many per byte as in earlier runs.
        partitions_sampled: partitions of which the first rows were read.
        superbatches_bound: the most that the thresholds in texts can make, whatever the partitions
            are.
        call_seconds, text_seconds: c_ipc, and c_enc of a text of the catalog's mean length, on one
            worker.
        call_margin, text_margin: half of their 95 % confidence intervals; None where they were
            given.
        text_seconds_by_tokens: c_enc of texts of other lengths, with its margin.
        alpha: the paper's, with the mean fixed cost of a call for one partition.
        break_even_texts: n*, which phi is measured against.
        paper_recommendation: what the paper's table says of phi and CV, whatever a call costs here.
        verdict: what SuperBatches gain by the costs that were measured here.
        partition_by_partition_seconds: encoding with one call per partition; `speedup` compares it
            with SuperBatches.
        peak_superbatch_bytes: lemma 3, of the largest SuperBatch that the sizes will make.
        bound_superbatch_bytes: of the largest one that B_max admits.
        peak_resident_bytes: the most that the run will hold; `memory_limit_bytes` is what it may.
            None: not known.
        workers_per_machine: the workers that one machine's way to the store can serve, by Zero's
            rule (U/S)·BW; None where nothing was published there yet.
        cost, cost_per_million_texts: at the given price of an hour; the texts are those that are
            encoded.
        partitions_fresh, partitions_uncounted, partitions_refused: left out: those that a run
            passes over, those of unknown size, and those that it refuses, as far as their files and
            first rows show.
    """

    forecast: Forecast
    bounds: Bounds
    partitions: int
    texts: int
    texts_encoded: int
    rows_reused: int
    text_bytes: int
    tokens: int
    largest_partition_texts: int
    workers: int
    superbatches: int
    superbatches_bound: int
    fill_ratio: float
    call_seconds: float
    call_margin: float | None
    text_seconds: float
    text_margin: float | None
    text_seconds_by_tokens: dict[int, tuple[float, float | None]]
    partition_by_partition_seconds: float
    speedup: float
    alpha: float
    break_even_texts: float
    phi: float
    cv: float
    paper_recommendation: Recommendation
    verdict: str
    peak_superbatch_bytes: int
    bound_superbatch_bytes: int
    peak_resident_bytes: int | None = None
    memory_limit_bytes: int | None = None
    workers_per_machine: int | None = None
    cost: float | None = None
    cost_per_million_texts: float | None = None
    fleet: Fleet | None = None
    partitions_fresh: int = 0
    partitions_uncounted: int = 0
    partitions_refused: tuple[Failure, ...] = ()
    partitions_sampled: int = 0
    texts_sampled: int = 0
    tokens_counted: bool = False

    def as_dict(self) -> dict[str, Any]:
        """One JSON-ready document; what the report has too has its name there."""
        document = asdict(self)
        return document.pop("forecast") | document.pop("bounds") | document


def plan(
    sizes: Sequence[int] | np.ndarray,
    text_bytes: Sequence[float] | np.ndarray,
    costs: RunCosts,
    bounds: Bounds,
    *,
    beside_bytes: float = 0.0,
    rows_reused: Sequence[int] | np.ndarray | int = 0,
    memory: MemoryPlan | None = None,
    price_per_hour: float | None = None,
    deadline_seconds: float | None = None,
    bandwidth: float | None = None,
) -> Plan:
    """Predict a run over partitions of these sizes, in the source's order; see `planned_run.plan`.

    Args:
        text_bytes: of each partition.
        beside_bytes: of a row: its id and the columns that travel with it.
        rows_reused: of each partition.
    """
    counts, in_bytes = np.asarray(sizes, dtype=np.int64), np.asarray(text_bytes, dtype=float)
    partitions, texts, encode = len(counts), int(counts.sum()), costs.encode
    flushes = predict_flushes(
        counts, bounds, in_bytes / np.maximum(counts, 1), beside_bytes, rows_reused
    )
    new = counts - rows_reused
    encoded, new_bytes = int(new.sum()), in_bytes * new / np.maximum(counts, 1)
    times = forecast(flushes, costs)
    mean_bytes = float(in_bytes.sum()) / max(1, texts)
    mean_tokens = mean_bytes * encode.tokens_per_single_byte
    largest = max((flush.texts for flush in flushes), default=0)
    text_seconds, encoded_share = encode.text_seconds(mean_tokens), 1 - encode.equal_share
    row_seconds = text_seconds * encoded_share
    of_texts = encoded * row_seconds / encode.workers
    own_calls = encode.seconds(
        new * encoded_share, new_bytes * encode.tokens_per_byte, new_bytes * encoded_share
    ).sum()
    own = CostConstants(
        max(0.0, float(own_calls) - of_texts) / max(1, partitions), row_seconds, encode.workers
    )
    alpha, break_even = (
        own.alpha(partitions, encoded),
        encode.break_even_texts(mean_tokens) / encoded_share,
    )
    phi, cv, gain = (
        small_share(new, break_even),
        variation(new),
        speedup(alpha, len(flushes), partitions),
    )
    file_bytes = texts * (mean_bytes + costs.vector_bytes)
    if bandwidth is None and times.publish_seconds > 0:
        bandwidth = file_bytes / times.publish_seconds
    served = None
    if bandwidth is not None and texts:
        served = max(1, int(bandwidth * row_seconds * encoded / file_bytes))
    cost = None if price_per_hour is None else price_per_hour * times.wall_seconds / 3600
    fleet = None
    if deadline_seconds is not None:
        model = CostConstants(encode.superbatch_seconds, row_seconds, encode.workers)
        other = (
            costs.io.start_seconds
            + costs.waiting_seconds
            + times.publish_seconds / max(1, len(flushes))
        )
        fleet = size_fleet(model, encoded, len(flushes), other, deadline_seconds, served)
    return Plan(
        forecast=times,
        bounds=bounds,
        partitions=partitions,
        texts=texts,
        texts_encoded=encoded,
        rows_reused=texts - encoded,
        text_bytes=int(in_bytes.sum()),
        tokens=round(sum(flush.encoded_bytes for flush in flushes) * encode.tokens_per_byte),
        largest_partition_texts=int(counts.max(initial=0)),
        workers=encode.workers,
        superbatches=len(flushes),
        superbatches_bound=flushes_upper_bound(texts, bounds),
        fill_ratio=encoded / len(flushes) / bounds.b_min if flushes else 0.0,
        call_seconds=encode.call_seconds,
        call_margin=encode.call_margin,
        text_seconds=text_seconds,
        text_margin=encode.text_margin(mean_tokens),
        text_seconds_by_tokens={
            tokens: (encode.text_seconds(tokens), encode.text_margin(tokens))
            for tokens in _TOKENS_OF_TEXTS
        },
        partition_by_partition_seconds=float(own_calls),
        speedup=gain,
        alpha=alpha,
        break_even_texts=break_even,
        phi=phi,
        cv=cv,
        paper_recommendation=recommend(phi, cv),
        verdict=verdict(gain),
        peak_superbatch_bytes=superbatch_bytes(largest, mean_bytes, costs.vector_bytes, itemsize=1),
        bound_superbatch_bytes=superbatch_bytes(
            bounds.b_max, mean_bytes, costs.vector_bytes, itemsize=1
        ),
        peak_resident_bytes=_peak_resident_bytes(flushes, beside_bytes, memory) if memory else None,
        memory_limit_bytes=memory.limit if memory else None,
        workers_per_machine=served,
        cost=cost,
        cost_per_million_texts=None if cost is None or not encoded else 1e6 * cost / encoded,
        fleet=fleet,
    )


def verdict(gain: float) -> str:
    """Return what SuperBatches gain here, in one sentence."""
    saved = 1 - 1 / gain
    if saved < _LEAST_GAIN:
        return f"SuperBatches make little difference here: they save less than {_LEAST_GAIN:.0%} of the encoding time."
    return f"SuperBatches save {saved:.0%} of the encoding time here."


def _peak_resident_bytes(flushes: Sequence[Flush], beside_bytes: float, memory: MemoryPlan) -> int:
    """Of the reader and of the SuperBatches that are alive together: one filling, one encoding, one
    being published."""
    strings = [
        math.ceil(flush.text_bytes + flush.texts * beside_bytes)
        + flush.partitions * PARTITION_OVERHEAD_BYTES
        for flush in flushes
    ]
    each = [
        size + memory.result.of_rows(flush.texts, size)
        for flush, size in zip(flushes, strings, strict=True)
    ]
    together = [sum(each[start : start + SLOTS]) for start in range(len(each))]
    return min(memory.limit, memory.reader + max(together, default=0))
