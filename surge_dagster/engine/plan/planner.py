"""The planner: what a run will cost, from the sizes of its partitions and the costs of its stages.

The aggregator's rule makes SuperBatches of the sizes (`predict_flushes`), the measured costs give
the seconds of each stage for each of them, and `forecast` lets these pass the stages as a run does:
one encodes while the one before it is published and the next one is read, into the slot of the one
before these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import numpy as np

from surge_dagster.engine.encoder.metrics import overlap_ratio
from surge_dagster.engine.encoder.speed import Speed
from surge_dagster.engine.plan.cost_model import (
    CostConstants,
    Flush,
    IoCosts,
    Recommendation,
    predict_flushes,
    recommend,
    small_share,
    speedup,
    variation,
)
from surge_dagster.engine.run.memory import SLOTS, MemoryPlan
from surge_dagster.engine.run.report import NO_PRICES, Failure, Prices, million_cost
from surge_dagster.engine.run.thresholds import Bounds

_LEAST_GAIN = 0.01  # of the encoding time; less is within what a prediction is wrong by


@dataclass(frozen=True, slots=True)
class RunCosts:
    """All that a prediction is made from.

    Attributes:
        core_share: see `EncoderPool`.
    """

    speed: Speed
    io: IoCosts
    vector_bytes: int
    core_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted times of a run; names and meaning are those of the report.

    Attributes:
        margin_seconds: the encoding may take so much more or less, as far as SuperBatches of
            earlier runs differ (95 %). None if too few are known.
    """

    wall_seconds: float = 0.0
    margin_seconds: float | None = None
    texts_per_second: float = 0.0
    encode_seconds: float = 0.0
    publish_seconds: float = 0.0
    time_to_first_output_seconds: float = 0.0
    overlap_ratio: float = 1.0


def forecast(flushes: Sequence[Flush], costs: RunCosts) -> Forecast:
    if not flushes:
        return Forecast()
    speed = costs.speed
    texts, partitions, text_bytes, reused = np.array([astuple(flush) for flush in flushes], float).T
    new_texts = texts - reused
    tokens = text_bytes * new_texts / np.maximum(texts, 1) * speed.tokens_per_byte
    file_bytes = text_bytes + texts * costs.vector_bytes

    read = np.column_stack([partitions, texts, reused, text_bytes]) @ costs.io.read
    encode = speed.seconds(new_texts * (1 - speed.equal_share), tokens)
    encode += np.minimum(encode, costs.core_share * _host_seconds(partitions, costs.io))
    publish = np.column_stack([np.ones(len(flushes)), partitions, file_bytes]) @ costs.io.publish

    ready = 0.0
    encoded = 0.0
    published = list[float]()
    for index in range(len(flushes)):
        slot_free = published[index - SLOTS] if index >= SLOTS else 0.0
        ready = max(ready, slot_free) + read[index]
        encoded = max(ready, encoded) + encode[index]
        published.append(max(encoded, published[-1] if published else 0.0) + publish[index])

    wall_seconds = float(published[-1])
    encode_seconds = float(encode.sum())
    publish_seconds = float(publish.sum())
    return Forecast(
        wall_seconds=wall_seconds,
        margin_seconds=None if speed.spread is None else speed.spread * encode_seconds,
        texts_per_second=float(new_texts.sum()) / wall_seconds if wall_seconds else 0.0,
        encode_seconds=encode_seconds,
        publish_seconds=publish_seconds,
        time_to_first_output_seconds=float(published[0]),
        overlap_ratio=overlap_ratio(publish_seconds, encode_seconds),
    )


def _host_seconds(partitions: np.ndarray, io: IoCosts) -> np.ndarray:
    """Return the processor seconds of the run's own process while each SuperBatch is encoded: of
    reading the next one and of publishing the one before, each about half of all its work."""
    host = np.column_stack([np.ones(len(partitions)), partitions]) @ io.host
    around = np.concatenate([[0.0], host, [0.0]])
    return (around[:-2] + around[2:]) / 2


@dataclass(frozen=True, slots=True)
class Goals:
    """What a plan is also made for.

    Attributes:
        prices: of this machine and of tokens.
        deadline_seconds: size a fleet that ends in time.
        tokens_per_minute, texts_per_minute: that an encoder behind HTTP may be sent at most.
    """

    prices: Prices = NO_PRICES
    deadline_seconds: float | None = None
    tokens_per_minute: float | None = None
    texts_per_minute: float | None = None

    def limited(self, times: Forecast, texts: int, tokens: int) -> Forecast:
        """Return the forecast of a run that these limits may hold up."""
        least_seconds = 60 * tokens / (self.tokens_per_minute or math.inf)
        least_seconds = max(least_seconds, 60 * texts / (self.texts_per_minute or math.inf))
        if least_seconds <= times.wall_seconds:
            return times
        return replace(times, wall_seconds=least_seconds, texts_per_second=texts / least_seconds)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers that finish in time, and their machines.

    No number of workers is enough if `wall_seconds` is above the deadline.
    """

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
    workers_per_machine: int | None,
) -> Fleet:
    """Return the fewest workers that encode within what other seconds leave of the deadline.

    Zero's rule gives their machines; None counts all workers to one machine.
    """
    left = deadline_seconds - other_seconds - calls * model.call_seconds
    encode_seconds = texts * model.text_seconds
    workers = max(1, math.ceil(encode_seconds / (left if left > 0 else deadline_seconds)))
    machines = 1
    if workers_per_machine:
        machines = math.ceil(workers / workers_per_machine)
        workers = machines * math.ceil(workers / machines)  # each has as many
    with_them = CostConstants(model.call_seconds, model.text_seconds, workers)
    wall_seconds = other_seconds + with_them.seconds(calls, texts)
    return Fleet(deadline_seconds, workers, machines, wall_seconds)


@dataclass(frozen=True, slots=True)
class PaperModel:
    """What SuperBatches gain over one encode call per partition, by the paper's model.

    Attributes:
        break_even_texts: n*, which phi is measured against.
        paper_recommendation: what the paper's table says of phi and CV, whatever a call costs here.
        verdict: what SuperBatches gain by the costs that were measured here.
    """

    partition_by_partition_seconds: float
    speedup: float
    alpha: float
    break_even_texts: float
    phi: float
    cv: float
    paper_recommendation: Recommendation
    verdict: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The prediction of a run.

    Attributes:
        texts: of all rows.
        texts_encoded: those without a vector in an old file; equal ones count.
        rows_reused: the others.
        tokens_counted: whether the model's tokenizer counted those of `texts_sampled` texts; else
            they are as many per byte as in earlier runs.
        call_seconds, text_seconds: c_ipc, and c_enc of a text of the catalog's mean length, on one
            worker.
        peak_resident_bytes: the most that the run will hold; `memory_limit_bytes` is what it may.
            None: not known.
        workers_per_machine: the workers that one machine's way to the store can serve, by Zero's
            rule (U/S)·BW; None if nothing was published there yet.
        cost, cost_per_million_texts: at the given prices; the texts are those that are
            encoded.
        partitions_fresh, partitions_uncounted, partitions_refused: left out: those that a run
            passes over, those of unknown size, and those that it refuses, as far as their files and
            first rows show.
    """

    forecast: Forecast
    bounds: Bounds
    paper: PaperModel
    partitions: int
    texts: int
    texts_encoded: int
    rows_reused: int
    text_bytes: int
    tokens: int
    largest_partition_texts: int
    workers: int
    superbatches: int
    fill_ratio: float
    call_seconds: float
    text_seconds: float
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
        """Return one JSON-ready document; what the report has too has its name there."""
        document = asdict(self)
        parts = [document.pop(name) for name in ("forecast", "bounds", "paper")]
        return parts[0] | parts[1] | parts[2] | document


@dataclass(frozen=True, slots=True)
class _Work:
    """The partitions of a run; arrays have an entry for each.

    Attributes:
        new: rows that are encoded.
        text_bytes: of all rows.
    """

    rows: np.ndarray
    new: np.ndarray
    text_bytes: np.ndarray
    speed: Speed

    @property
    def texts(self) -> int:
        return int(self.rows.sum())

    @property
    def texts_encoded(self) -> int:
        return int(self.new.sum())

    @property
    def mean_bytes(self) -> float:
        return float(self.text_bytes.sum()) / max(1, self.texts)

    @property
    def mean_tokens(self) -> float:
        return self.mean_bytes * self.speed.tokens_per_single_byte

    @property
    def model(self) -> CostConstants:
        """The costs of a row; equal texts take no time."""
        row_seconds = self.speed.worker_seconds(self.mean_tokens) * (1 - self.speed.equal_share)
        return CostConstants(self.speed.call_seconds, row_seconds, self.speed.workers)


def plan(
    sizes: Sequence[int] | np.ndarray,
    text_bytes: Sequence[float] | np.ndarray,
    costs: RunCosts,
    bounds: Bounds,
    *,
    rows_reused: Sequence[int] | np.ndarray | int = 0,
    memory: MemoryPlan | None = None,
    goals: Goals | None = None,
) -> Plan:
    """Predict a run over partitions of these sizes, in the source's order; see `planned_run.plan`.

    Args:
        text_bytes: of each partition.
        rows_reused: of each partition.
    """
    rows = np.asarray(sizes, dtype=np.int64)
    work = _Work(rows, rows - rows_reused, np.asarray(text_bytes, dtype=float), costs.speed)
    mean_sizes = work.text_bytes / np.maximum(rows, 1)
    flushes = predict_flushes(rows, bounds, mean_sizes, rows_reused)
    planned = _plan_of(work, flushes, costs, bounds)
    if memory is not None:
        peak = _peak_resident_bytes(flushes, memory)
        planned = replace(planned, peak_resident_bytes=peak, memory_limit_bytes=memory.limit)
    return _with_goals(planned, work, goals or Goals())


def _plan_of(work: _Work, flushes: Sequence[Flush], costs: RunCosts, bounds: Bounds) -> Plan:
    speed = work.speed
    encoded = work.texts_encoded
    times = forecast(flushes, costs)
    return Plan(
        forecast=times,
        bounds=bounds,
        paper=_paper_model(work, len(flushes)),
        partitions=len(work.rows),
        texts=work.texts,
        texts_encoded=encoded,
        rows_reused=work.texts - encoded,
        text_bytes=int(work.text_bytes.sum()),
        tokens=round(sum(flush.encoded_bytes for flush in flushes) * speed.tokens_per_byte),
        largest_partition_texts=int(work.rows.max(initial=0)),
        workers=speed.workers,
        superbatches=len(flushes),
        fill_ratio=encoded / len(flushes) / bounds.b_min if flushes else 0.0,
        call_seconds=speed.call_seconds,
        text_seconds=speed.worker_seconds(work.mean_tokens),
        workers_per_machine=_served_workers(work, costs, times),
    )


def _with_goals(planned: Plan, work: _Work, goals: Goals) -> Plan:
    """Return the plan with its cost, and with the machines that a deadline takes."""
    times = goals.limited(planned.forecast, planned.texts_encoded, planned.tokens)
    planned = replace(planned, forecast=times)
    cost = goals.prices.cost(times.wall_seconds, planned.tokens)
    if cost is not None:
        of_million = million_cost(cost, planned.texts_encoded)
        planned = replace(planned, cost=cost, cost_per_million_texts=of_million)
    if goals.deadline_seconds is not None:
        calls = planned.superbatches
        others = times.publish_seconds / max(1, calls)
        fleet = size_fleet(
            work.model,
            planned.texts_encoded,
            calls,
            others,
            goals.deadline_seconds,
            planned.workers_per_machine,
        )
        planned = replace(planned, fleet=fleet)
    return planned


def _paper_model(work: _Work, superbatches: int) -> PaperModel:
    speed = work.speed
    calls = int(np.count_nonzero(work.new))
    alpha = work.model.alpha(calls, work.texts_encoded)
    gain = speedup(alpha, superbatches, calls)
    break_even_texts = speed.break_even_texts(work.mean_tokens) / (1 - speed.equal_share)
    phi = small_share(work.new, break_even_texts)
    cv = variation(work.new)
    return PaperModel(
        partition_by_partition_seconds=work.model.seconds(calls, work.texts_encoded),
        speedup=gain,
        alpha=alpha,
        break_even_texts=break_even_texts,
        phi=phi,
        cv=cv,
        paper_recommendation=recommend(phi, cv),
        verdict=verdict(gain),
    )


def _served_workers(work: _Work, costs: RunCosts, times: Forecast) -> int | None:
    """Return the workers whose vectors one machine can send, by Zero's rule."""
    file_bytes = work.texts * (work.mean_bytes + costs.vector_bytes)
    if not times.publish_seconds or not file_bytes:
        return None
    bandwidth = file_bytes / times.publish_seconds
    return max(1, int(bandwidth * work.model.text_seconds * work.texts_encoded / file_bytes))


def verdict(gain: float) -> str:
    """Return what SuperBatches gain here, in one sentence."""
    saved = 1 - 1 / gain
    if saved < _LEAST_GAIN:
        return (
            "SuperBatches make little difference here: they save less than "
            f"{_LEAST_GAIN:.0%} of the encoding time."
        )
    return f"SuperBatches save {saved:.0%} of the encoding time here."


def _peak_resident_bytes(flushes: Sequence[Flush], memory: MemoryPlan) -> int:
    """Return the most bytes of the reader and of the SuperBatches that are alive together.

    One is being filled, one is encoded, and one is published.
    """
    sizes = list[int]()
    for flush in flushes:
        strings = math.ceil(flush.held_bytes)
        sizes.append(strings + memory.result.of_rows(flush.texts, strings))
    together = [sum(sizes[start : start + SLOTS]) for start in range(len(sizes))]
    return min(memory.limit, memory.reader + max(together, default=0))
