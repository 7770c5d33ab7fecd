"""The experiments: a function for each table of the paper that compares strategies; `EXPERIMENTS`
has them all.

Each yields rows with what was measured. `published` has what the paper measured, and the page
brings both together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.encode.costs import CallCost, peer_call_cost, pool_call_cost
from benchmarks.evaluation import published
from benchmarks.evaluation.failures import failures
from benchmarks.evaluation.metering import Meter
from benchmarks.evaluation.scales import Scale, case_of
from benchmarks.evaluation.stores import PROFILES
from benchmarks.evaluation.strategies import (
    MEMORY_FOLDER,
    Case,
    measure,
    measure_on,
    opened,
)
from benchmarks.harness import Document, in_own_process, say, seconds_of, temporary_folder
from benchmarks.output import drawn_rows, write_output
from surge_dagster.engine.plan.cost_model import CostConstants
from surge_dagster.engine.run.thresholds import Thresholds

_BINS = 10  # of a catalog that is smaller than the paper's B
_PEER_SIZES = (100, 200, 500, 1_000)  # larger ones would take most of the time

_PBP = ("PBP", "pbp")
_FSB = ("FSB 100K", "fsb")
_SURGE = ("SURGE async", "surge-async")


def calls(scale: Scale) -> Iterator[Document]:
    """Section 4.1: c_ipc of this engine's pool and of sentence-transformers' with encoders that
    compute nothing.

    In milliseconds, with its 95 % interval.
    """

    def row(name: str, cost: CallCost) -> Document:
        low, high = cost.as_dict()["interval_ms"]
        return {
            "name": name,
            "milliseconds": 1e3 * cost.intercept,
            "low": low,
            "high": high,
        }

    yield row("this engine", pool_call_cost(scale.call_rounds))
    yield row("sentence-transformers", peer_call_cost(scale.call_rounds, _PEER_SIZES))


def end_to_end(scale: Scale) -> Iterator[Document]:
    """Table 1: every strategy in its own process."""
    for name, strategy, b_min in (
        (*_PBP, published.B_MIN),
        ("FSB 10K", "fsb", 10_000),
        ("FSB 50K", "fsb", 50_000),
        (*_FSB, 100_000),
        ("SURGE sync", "surge-sync", published.B_MIN),
        (*_SURGE, published.B_MIN),
    ):
        case = _minilm(scale, scale.end_to_end, b_min=b_min)
        yield _measured(name, strategy, case)
    workers = published.MINILM.workers
    divided = _minilm(scale, scale.end_to_end, processes=workers)
    yield _measured("SURGE async, 4 processes", "surge-async", divided)


def packing(scale: Scale) -> Iterator[Document]:
    """Tables 2 and 5, which share an encoder and a sigma: PB-PBP-LB, and partition sizes of three
    spreads."""
    costs = published.MINILM_ON_TWO
    case = case_of(costs, scale.packing, clock=scale.clock)
    with opened(case) as pool:
        for sigma in published.SIGMAS:
            varied = replace(case, sigma=float(sigma))
            yield _measured(*_PBP, varied, sigma, pool)
            yield _measured(*_SURGE, varied, sigma, pool)
        for b_min in (100_000, 200_000):
            packed = case_of(costs, scale.packing, clock=scale.clock, b_min=b_min)
            yield _measured(f"PB-PBP-LB {b_min // 1_000}K", "pb-pbp-lb", packed, "1.72", pool)


def bound(scale: Scale) -> Iterator[Document]:
    """Section 5.3 at sigma 2.5, where partitions pass B_max; at four times the speed, because the
    batches count."""
    case = case_of(published.MINILM_ON_TWO, scale.bound, clock=4 * scale.clock, sigma=2.5)
    yield _measured("PB-PBP-LB 100K", "pb-pbp-lb", case, "2.5")
    yield _measured(*_SURGE, case, "2.5")


def ablation(scale: Scale) -> Iterator[Document]:
    """Table 3."""
    case = _minilm(scale, scale.ablation)
    with opened(case) as pool:
        for name, strategy in (
            ("full", "surge-async"),
            ("without SuperBatches", "surge-without-superbatches"),
            ("without async", "surge-sync"),
            ("without zero copy", "surge-without-zero-copy"),
        ):
            yield _measured(name, strategy, case, pool=pool)
    one = CostConstants(published.MINILM.call_seconds, published.MINILM.text_seconds)
    yield _measured("one worker", "surge-async", case_of(one, scale.ablation, clock=scale.clock))


def models(scale: Scale) -> Iterator[Document]:
    """Table 4 with the paper's constants."""
    for model, costs, dimension in (
        ("bge-base", published.BGE_BASE, 768),
        ("E5-large", published.E5_LARGE, 1_024),
    ):
        case = case_of(costs, scale.simulated_models, clock=scale.clock, dimension=dimension)
        with opened(case) as pool:
            for strategy in (_PBP, _FSB, _SURGE):
                yield _measured(*strategy, case, model, pool)


def real_models(scale: Scale) -> Iterator[Document]:
    """Table 4 with encoders that compute, on this machine; MiniLM also on sentence-transformers'
    pool."""
    for model, texts in scale.models.items():
        case = Case(texts, max(2, texts // scale.partition_texts), model=model)
        packed = replace(case, thresholds=Thresholds(b_min=max(1, texts // _BINS)))
        baselines = (
            (*_PBP, case),
            (*_FSB, case),
            (f"PB-PBP-LB, B = N/{_BINS}", "pb-pbp-lb", packed),
        )
        with opened(case) as pool:
            for baseline in baselines:
                yield _measured(*baseline, model, pool)
            yield _measured(*_SURGE, case, model, pool)
        if model == "minilm":
            with opened(replace(case, library="sentence-transformers")) as library:
                for name, strategy, its_case in baselines:
                    full_name = f"{name}, sentence-transformers"
                    yield _measured(full_name, strategy, its_case, model, library)


def profiles(scale: Scale) -> Iterator[Document]:
    """Table 6."""
    with opened(_minilm(scale, scale.profiles)) as pool:
        for profile in PROFILES:
            case = _minilm(scale, scale.profiles, profile=profile)
            for name in ("sync", "async"):
                yield _measured(name, f"surge-{name}", case, profile, pool)


def thresholds(scale: Scale) -> Iterator[Document]:
    """Table 7."""
    with opened(_minilm(scale, scale.thresholds)) as pool:
        for b_min in published.THRESHOLDS:
            count = int(b_min.replace(",", ""))
            case = _minilm(scale, scale.thresholds, b_min=count)
            yield _measured(b_min, "surge-async", case, pool=pool)


def serialization(scale: Scale) -> Iterator[Document]:
    """Table 8: a Python list of floats of every row (listing 1), and the engine's writer; MB are
    those that the matrix does not take."""
    for rows in scale.serialization:
        say(f"  {rows:,} rows")
        naive_seconds, naive_mb = in_own_process(_write_one, rows, _write_naively)
        seconds, mb = in_own_process(_write_one, rows, write_output)
        yield {
            "rows": rows,
            "seconds": seconds,
            "mb": mb,
            "naive_seconds": naive_seconds,
            "naive_mb": naive_mb,
        }


def _write_one(rows: int, write: Callable[..., None]) -> tuple[float, float]:
    """Return seconds and megabytes for a Parquet file in main memory."""
    ids, texts, matrix = drawn_rows(rows)
    with temporary_folder(MEMORY_FOLDER) as folder:
        path = folder / "one.parquet"
        write_output(path, ids[:10], texts[:10], matrix[:10])  # loads code and codecs
        with Meter() as meter:
            seconds = seconds_of(lambda: write(path, ids, texts, matrix))
        return seconds, meter.grown_bytes / 1e6


def _write_naively(path: Path, ids: pa.Array, texts: pa.Array, matrix: Any) -> None:
    lists = [row.tolist() for row in matrix]
    pq.write_table(pa.table({"id": ids, "text": texts, "embedding": lists}), path)


def scaling(scale: Scale) -> Iterator[Document]:
    """Table 9 with the product as it is: its own cost of a call, and thresholds derived from it.

    Every run has its own process, and the paper's partitions and clock.
    """
    for texts in scale.scaling:
        paced = case_of(published.MINILM, texts, clock=scale.scaling_clock, shrink=1.0)
        case = replace(paced, call_seconds=0.0, thresholds=Thresholds())
        yield _measured(*_SURGE, case, f"{texts}")
        if texts in scale.batched:
            batched = replace(case, thresholds=Thresholds(b_min=published.B_MIN))
            yield _measured(*_FSB, batched, f"{texts}")


_ALL: tuple[Callable[[Scale], Iterator[Document]], ...] = (
    calls,
    end_to_end,
    packing,
    bound,
    ablation,
    models,
    real_models,
    profiles,
    thresholds,
    serialization,
    scaling,
    failures,
)
EXPERIMENTS = {experiment.__name__: experiment for experiment in _ALL}


def _minilm(scale: Scale, texts: int, **options: Any) -> Case:
    return case_of(published.MINILM, texts, clock=scale.clock, **options)


def _measured(name: str, strategy: str, case: Case, group: str = "", pool: Any = None) -> Document:
    """Run a strategy, in its own process or on a pool that is there."""
    say(f"  {group} {name}, {case.texts:,} texts")
    if pool is None:
        return measure(name, strategy, case, group)
    return measure_on(pool, name, strategy, case, group)
