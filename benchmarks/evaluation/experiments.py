"""The experiments: a function for each table of the paper that compares strategies; `EXPERIMENTS`
has them all.

Each gives rows with what was measured. What the paper published stands in `published`, and the
page brings both together.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.encode.costs import PEER_SIZES, SIZES, peer_call_cost, pool_call_cost
from benchmarks.evaluation import published
from benchmarks.evaluation.failures import failures
from benchmarks.evaluation.metering import Meter
from benchmarks.evaluation.scales import Scale, case_of
from benchmarks.evaluation.stores import PROFILES
from benchmarks.evaluation.strategies import MEMORY_FOLDER, Case, measure, measure_on, opened
from benchmarks.harness import Document, say, seconds_of
from benchmarks.output import drawn_rows, write_rows
from surge_dagster.engine.encoder.devices import usable_cores
from surge_dagster.engine.plan.cost_model import CostConstants
from surge_dagster.engine.run.thresholds import Thresholds

_BINS = 10  # of a catalog that is smaller than the paper's B
_PEER_SIZES = PEER_SIZES[:4]  # the larger ones take most of the time


def calls(scale: Scale) -> Iterator[Document]:
    """Section 4.1: c_ipc of this engine's pool and of sentence-transformers' with encoders that
    compute nothing.

    In milliseconds, with its 95 % interval.
    """
    for name, cost in (
        ("this engine", pool_call_cost(SIZES, scale.call_rounds)),
        ("sentence-transformers", peer_call_cost(_PEER_SIZES, scale.call_rounds, usable_cores())),
    ):
        yield {
            "name": name,
            "milliseconds": 1_000 * cost.intercept,
            "low": 1_000 * cost.low,
            "high": 1_000 * cost.high,
        }


def end_to_end(scale: Scale) -> Iterator[Document]:
    """Table 1: every strategy in a process of its own."""
    for name, strategy, b_min in (
        ("PBP", "pbp", published.B_MIN),
        *((f"FSB {thousands}K", "fsb", 1_000 * thousands) for thousands in (10, 50, 100)),
        ("SURGE sync", "surge-sync", published.B_MIN),
        ("SURGE async", "surge-async", published.B_MIN),
    ):
        yield _measured(
            name,
            strategy,
            case_of(published.MINILM, scale.end_to_end, clock=scale.clock, b_min=b_min),
        )
    divided = case_of(
        published.MINILM, scale.end_to_end, clock=scale.clock, processes=published.MINILM.workers
    )
    yield _measured("SURGE async, 4 processes", "surge-async", divided)


def packing(scale: Scale) -> Iterator[Document]:
    """Tables 2 and 5, which share an encoder and a sigma: PB-PBP-LB, and partition sizes of three
    spreads."""
    case = case_of(published.MINILM_ON_TWO, scale.packing, clock=scale.clock)
    with opened(case) as pool:
        for sigma in published.SIGMAS:
            varied = replace(case, sigma=float(sigma))
            yield _measured("PBP", "pbp", varied, sigma, pool)
            yield _measured("SURGE async", "surge-async", varied, sigma, pool)
        for thousands in (100, 200):
            packed = case_of(
                published.MINILM_ON_TWO, scale.packing, clock=scale.clock, b_min=1_000 * thousands
            )
            yield _measured(f"PB-PBP-LB {thousands}K", "pb-pbp-lb", packed, "1.72", pool)


def bound(scale: Scale) -> Iterator[Document]:
    """Section 5.3 at sigma 2.5, where partitions pass B_max; at four times the speed, because the
    batches count."""
    case = case_of(published.MINILM_ON_TWO, scale.bound, clock=4 * scale.clock, sigma=2.5)
    yield _measured("PB-PBP-LB 100K", "pb-pbp-lb", case, "2.5")
    yield _measured("SURGE async", "surge-async", case, "2.5")


def ablation(scale: Scale) -> Iterator[Document]:
    """Table 3."""
    case = case_of(published.MINILM, scale.ablation, clock=scale.clock)
    with opened(case) as pool:
        for name, strategy in (
            ("full", "surge-async"),
            ("without SuperBatches", "surge-without-superbatches"),
            ("without async", "surge-sync"),
            ("without zero copy", "surge-without-zero-copy"),
        ):
            yield _measured(name, strategy, case, pool=pool)
    alone = CostConstants(published.MINILM.call_seconds, published.MINILM.text_seconds)
    yield _measured("one worker", "surge-async", case_of(alone, scale.ablation, clock=scale.clock))


def models(scale: Scale) -> Iterator[Document]:
    """Table 4 with the paper's constants."""
    for model, costs, dimension in (
        ("bge-base", published.BGE_BASE, 768),
        ("E5-large", published.E5_LARGE, 1_024),
    ):
        case = case_of(costs, scale.simulated_models, clock=scale.clock, dimension=dimension)
        with opened(case) as pool:
            for name, strategy in (
                ("PBP", "pbp"),
                ("FSB 100K", "fsb"),
                ("SURGE async", "surge-async"),
            ):
                yield _measured(name, strategy, case, model, pool)


def real_models(scale: Scale) -> Iterator[Document]:
    """Table 4 with encoders that compute, on this machine; MiniLM also on sentence-transformers'
    pool."""
    for model, texts in scale.models.items():
        case = Case(texts, max(2, texts // scale.partition_texts), model=model)
        packed = replace(case, thresholds=Thresholds(b_min=max(1, texts // _BINS)))
        baselines = {
            "PBP": ("pbp", case),
            "FSB 100K": ("fsb", case),
            f"PB-PBP-LB, B = N/{_BINS}": ("pb-pbp-lb", packed),
        }
        with opened(case) as pool:
            for name, (strategy, its_case) in {
                **baselines,
                "SURGE async": ("surge-async", case),
            }.items():
                yield _measured(name, strategy, its_case, model, pool)
        if model == "minilm":
            with opened(replace(case, library="sentence-transformers")) as library:
                for name, (strategy, its_case) in baselines.items():
                    yield _measured(
                        f"{name}, sentence-transformers", strategy, its_case, model, library
                    )


def profiles(scale: Scale) -> Iterator[Document]:
    """Table 6."""
    cases = {
        name: case_of(published.MINILM, scale.profiles, clock=scale.clock, profile=name)
        for name in PROFILES
    }
    with opened(cases["null"]) as pool:
        for profile, case in cases.items():
            for name in ("sync", "async"):
                yield _measured(name, f"surge-{name}", case, profile, pool)


def thresholds(scale: Scale) -> Iterator[Document]:
    """Table 7."""
    with opened(case_of(published.MINILM, scale.thresholds, clock=scale.clock)) as pool:
        for b_min in published.THRESHOLDS:
            count = int(b_min.replace(",", ""))
            case = case_of(published.MINILM, scale.thresholds, clock=scale.clock, b_min=count)
            yield _measured(b_min, "surge-async", case, pool=pool)


def serialization(scale: Scale) -> Iterator[Document]:
    """Table 8: a Python list of floats of every row (listing 1), beside the engine's writer; MB
    beside the matrix."""
    for rows in scale.serialization:
        say(f"  {rows:,} rows")
        both = []
        for is_naive in (True, False):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                both.append(fresh.submit(_write_one, rows, is_naive).result())
        (naive_seconds, naive_mb), (seconds, mb) = both
        naive = {"naive_seconds": naive_seconds, "naive_mb": naive_mb}
        yield {"rows": rows, "seconds": seconds, "mb": mb} | naive


def _write_one(rows: int, is_naive: bool) -> tuple[float, float]:
    """Seconds and megabytes for a Parquet file in main memory."""
    ids, texts, matrix = drawn_rows(rows)
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as folder:
        path = Path(folder) / "one.parquet"

        def write_naively() -> None:
            lists = [row.tolist() for row in matrix]
            pq.write_table(pa.table({"id": ids, "text": texts, "embedding": lists}), path)

        write_rows(path, ids[:10], texts[:10], matrix[:10])  # loads code and codecs
        with Meter() as meter:
            seconds = seconds_of(
                write_naively if is_naive else lambda: write_rows(path, ids, texts, matrix)
            )
        return seconds, meter.grown_bytes / 1e6


def scaling(scale: Scale) -> Iterator[Document]:
    """Table 9 with the product as it is: its own cost of a call, and thresholds derived from it.

    Every run has a process of its own, and the paper's partitions and clock.
    """
    for texts in scale.scaling:
        paced = case_of(published.MINILM, texts, clock=scale.scaling_clock, shrink=1.0)
        case = replace(paced, call_seconds=0.0, thresholds=Thresholds())
        yield _measured("SURGE async", "surge-async", case, f"{texts}")
        if texts in scale.batched:
            yield _measured(
                "FSB 100K",
                "fsb",
                replace(case, thresholds=Thresholds(b_min=published.B_MIN)),
                f"{texts}",
            )


EXPERIMENTS: dict[str, Callable[[Scale], Iterator[Document]]] = {
    "calls": calls,
    "end_to_end": end_to_end,
    "packing": packing,
    "bound": bound,
    "ablation": ablation,
    "models": models,
    "real_models": real_models,
    "profiles": profiles,
    "thresholds": thresholds,
    "serialization": serialization,
    "scaling": scaling,
    "failures": lambda scale: map(asdict, failures(scale.failures)),
}


def _measured(name: str, strategy: str, case: Case, group: str = "", pool: Any = None) -> Document:
    """Run a strategy, in a process of its own or on a pool that is there."""
    say(f"  {group} {name}, {case.texts:,} texts")
    work = measure if pool is None else partial(measure_on, pool)
    return asdict(work(name, strategy, case, group))
