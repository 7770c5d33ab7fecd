"""The experiments: a function for each table of the paper that compares strategies; `EXPERIMENTS` has them all.

Each gives rows of frozen dataclasses with what was measured. What the paper published stands in `published`, and the
page brings both together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.evaluation import published
from benchmarks.evaluation.calls import calls
from benchmarks.evaluation.failures import failures
from benchmarks.evaluation.scales import PARTITION_TEXTS, Scale, case_of
from benchmarks.evaluation.serialization import serialization
from benchmarks.evaluation.strategies import Case, measure, measure_on, opened
from benchmarks.harness import say
from benchmarks.storage_profiles import PROFILES
from surge_dagster.engine.plan.cost_model import CostConstants
from surge_dagster.engine.run.thresholds import Thresholds

_BINS = 10  # of a catalog that is smaller than the paper's B
FIXED_BATCHES = {"FSB 10K": 10_000, "FSB 50K": 50_000, "FSB 100K": 100_000}


@dataclass(frozen=True, slots=True)
class Measured:
    """A strategy's run.

    Attributes:
        group: what the run is one of: a model, a sigma, a profile, a number of texts. Empty where there is one group.
        throughput: texts/s at the paper's clock; with a real encoder, as measured.
        encoding: the same of the encode calls alone.
        memory: GB above the start.
        ttfo: seconds until the first file, at the paper's scale; with a real encoder, as measured.
        ttfo_seconds: as measured.
        exposed: seconds in which files were written and nothing was encoded, before the last call ended.
    """

    name: str
    group: str
    texts: int
    partitions: int
    throughput: float
    encoding: float
    duty: float
    rho: float
    memory: float
    ttfo: float
    ttfo_seconds: float
    calls: int
    largest: int
    b_max: int
    wall_seconds: float
    encode_seconds: float
    exposed: float
    tail: float


def end_to_end(scale: Scale) -> Iterator[Measured]:
    """Table 1: every strategy in a process of its own."""
    for name, strategy, b_min in (
        ("PBP", "pbp", published.B_MIN),
        *((name, "fsb", b_min) for name, b_min in FIXED_BATCHES.items()),
        ("SURGE sync", "surge-sync", published.B_MIN),
        ("SURGE async", "surge-async", published.B_MIN),
    ):
        found = case_of(published.MINILM, scale.end_to_end, clock=scale.clock, b_min=b_min)
        yield _measured(name, strategy, found, scale.clock)
    divided = case_of(published.MINILM, scale.end_to_end, clock=scale.clock, processes=published.MINILM.workers)
    yield _measured("SURGE async, 4 processes", "surge-async", divided, scale.clock)


def packing(scale: Scale) -> Iterator[Measured]:
    """Tables 2 and 5, which share an encoder and a sigma: PB-PBP-LB, and partition sizes of three spreads."""
    case = case_of(published.MINILM_ON_TWO, scale.packing, clock=scale.clock)
    with opened(case) as pool:
        for sigma in published.SIGMAS:
            varied = replace(case, sigma=sigma)
            yield _measured("PBP", "pbp", varied, scale.clock, f"{sigma}", pool)
            yield _measured("SURGE async", "surge-async", varied, scale.clock, f"{sigma}", pool)
        for thousands in (100, 200):
            packed = case_of(published.MINILM_ON_TWO, scale.packing, clock=scale.clock, b_min=1_000 * thousands)
            yield _measured(f"PB-PBP-LB {thousands}K", "pb-pbp-lb", packed, scale.clock, "1.72", pool)


def bound(scale: Scale) -> Iterator[Measured]:
    """Section 5.3 at sigma 2.5, where partitions pass B_max; at four times the speed, because the batches count."""
    clock = 4 * scale.clock
    case = case_of(published.MINILM_ON_TWO, scale.bound, clock=clock, sigma=2.5)
    yield _measured("PB-PBP-LB 100K", "pb-pbp-lb", case, clock, "2.5")
    yield _measured("SURGE async", "surge-async", case, clock, "2.5")


def ablation(scale: Scale) -> Iterator[Measured]:
    """Table 3."""
    case = case_of(published.MINILM, scale.ablation, clock=scale.clock)
    with opened(case) as pool:
        for name, strategy in (
            ("full", "surge-async"),
            ("without SuperBatches", "surge-without-superbatches"),
            ("without async", "surge-sync"),
            ("without zero copy", "surge-without-zero-copy"),
        ):
            yield _measured(name, strategy, case, scale.clock, pool=pool)
    alone = CostConstants(published.MINILM.call_seconds, published.MINILM.text_seconds)
    yield _measured("one worker", "surge-async", case_of(alone, scale.ablation, clock=scale.clock), scale.clock)


def models(scale: Scale) -> Iterator[Measured]:
    """Table 4 with the paper's constants."""
    for model, costs, dimension in (("bge-base", published.BGE_BASE, 768), ("E5-large", published.E5_LARGE, 1_024)):
        case = case_of(costs, scale.simulated_models, clock=scale.clock, dimension=dimension)
        with opened(case) as pool:
            for name, strategy in (("PBP", "pbp"), ("FSB 100K", "fsb"), ("SURGE async", "surge-async")):
                yield _measured(name, strategy, case, scale.clock, model, pool)


def real_models(scale: Scale) -> Iterator[Measured]:
    """Table 4 with encoders that compute, on this machine; MiniLM also on sentence-transformers' pool."""
    for model, texts in scale.models.items():
        case = Case(texts, max(2, texts // scale.partition_texts), model=model, precision="fp32")
        packed = replace(case, thresholds=Thresholds(b_min=max(1, texts // _BINS)))
        baselines = {
            "PBP": ("pbp", case),
            "FSB 100K": ("fsb", case),
            f"PB-PBP-LB, B = N/{_BINS}": ("pb-pbp-lb", packed),
        }
        with opened(case) as pool:
            for name, (strategy, one) in {**baselines, "SURGE async": ("surge-async", case)}.items():
                yield _measured(name, strategy, one, group=model, pool=pool)
        if model == "minilm":
            with opened(replace(case, library="sentence-transformers")) as library:
                for name, (strategy, one) in baselines.items():
                    yield _measured(f"{name}, sentence-transformers", strategy, one, group=model, pool=library)


def profiles(scale: Scale) -> Iterator[Measured]:
    """Table 6."""
    cases = {name: case_of(published.MINILM, scale.profiles, clock=scale.clock, profile=name) for name in PROFILES}
    with opened(cases["null"]) as pool:
        for profile, case in cases.items():
            for name in ("sync", "async"):
                yield _measured(name, f"surge-{name}", case, scale.clock, profile, pool)


def thresholds(scale: Scale) -> Iterator[Measured]:
    """Table 7."""
    cases = {
        b_min: case_of(published.MINILM, scale.thresholds, clock=scale.clock, b_min=b_min)
        for b_min in published.THRESHOLDS
    }
    with opened(cases[published.B_MIN]) as pool:
        for b_min, case in cases.items():
            yield _measured(f"{b_min:,}", "surge-async", case, scale.clock, pool=pool)


def scaling(scale: Scale) -> Iterator[Measured]:
    """Table 9 with the product as it is: its own cost of a call, and thresholds derived from it.

    Every run has a process of its own, and the paper's partitions and clock.
    """
    clock = scale.scaling_clock
    for texts in scale.scaling:
        paced = case_of(published.MINILM, texts, clock=clock, shrink=1.0)
        case = replace(paced, call_seconds=0.0, thresholds=Thresholds())
        yield _measured("SURGE async", "surge-async", case, clock, f"{texts}")
        if texts in scale.batched:
            batched = replace(case, thresholds=Thresholds(b_min=published.B_MIN))
            yield _measured("FSB 100K", "fsb", batched, clock, f"{texts}")


EXPERIMENTS: dict[str, Callable[[Scale], Iterator[Any]]] = {
    "calls": lambda scale: calls(scale.call_rounds),
    "end_to_end": end_to_end,
    "packing": packing,
    "bound": bound,
    "ablation": ablation,
    "models": models,
    "real_models": real_models,
    "profiles": profiles,
    "thresholds": thresholds,
    "serialization": lambda scale: serialization(scale.serialization),
    "scaling": scaling,
    "failures": lambda scale: failures(scale.failures),
}


def _measured(
    name: str,
    strategy: str,
    case: Case,
    clock: float = 1.0,
    group: str = "",
    pool: Any = None,
) -> Measured:
    """Run a strategy, in a process of its own or on a pool that is there; `clock` is that of a simulated encoder."""
    say(f"  {group} {name}, {case.texts:,} texts")
    found = measure(strategy, case) if pool is None else measure_on(pool, strategy, case)
    assert found.texts == case.texts
    assert found.partitions == case.partitions
    return Measured(
        name=name,
        group=group,
        texts=found.texts,
        partitions=found.partitions,
        throughput=found.texts_per_second / clock,
        encoding=found.texts / found.encode_seconds / clock,
        duty=found.duty,
        rho=found.overlap_ratio,
        memory=found.peak_rss_bytes / 1e9,
        ttfo=found.time_to_first_output_seconds * clock * _first_output_size(strategy, case),
        ttfo_seconds=found.time_to_first_output_seconds,
        calls=found.calls,
        largest=found.largest_superbatch_texts,
        b_max=case.thresholds.b_max or 0,
        wall_seconds=found.wall_seconds,
        encode_seconds=found.encode_seconds,
        exposed=max(0.0, found.exposed_io_seconds - found.tail_seconds),
        tail=found.tail_seconds,
    )


def _first_output_size(strategy: str, case: Case) -> float:
    """How much more the paper encodes before its first file: all texts, or a larger batch."""
    if not case.call_seconds:  # nothing but the encoder's speed is simulated, at the paper's own clock
        return 1.0
    return published.TEXTS / case.texts if strategy == "fsb" else PARTITION_TEXTS * case.partitions / case.texts
