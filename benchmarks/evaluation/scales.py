"""The sizes of the evaluation, and how the paper's workload is brought to this machine's scale.

The simulated encoder is the paper's: c_ipc for each call, and c_enc / G for each text. One process
sleeps for all G workers, because a call of few texts does not divide among more (a portion has some
400 texts), and the paper's cost model divides every call. Two factors make it fit:

- `CLOCK`: its times and those of the store are divided by this. Texts then come faster than the
  paper's, which is against this engine: reading, serializing and writing take as long as they take.
- `SHRINK`: partitions, thresholds and c_ipc are divided by this, so that a short run has as many
  SuperBatches per text of a partition as the paper's. A file takes as long compared with its
  encoding as in the paper.

Catalogs that grow have neither factor, and the product's own thresholds and c_ipc. In the others
alpha, phi, CV and F/P are those of the paper. Throughput is given at the paper's clock, divided by
`CLOCK`; the time to first output times both, as that of a first SuperBatch of the paper's size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from benchmarks.evaluation import published
from benchmarks.evaluation.stores import PROFILES
from benchmarks.evaluation.strategies import Case
from benchmarks.synthetic import LOG_SIGMA
from surge_dagster.engine.plan.cost_model import CostConstants
from surge_dagster.engine.run.thresholds import Thresholds

CLOCK = 2.0  # page.md names both
SHRINK = 5.0
B_MAX_FACTOR = 5
SEED = 1  # of sizes whose CV is close to the law's, and whose first SuperBatch is close to B_min


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the experiments, in texts unless they say otherwise.

    Attributes:
        models: by model with a real encoder.
        partition_texts: mean size of a partition with a real encoder.
        serialization: in rows.
        scaling: of the catalogs that grow.
        batched: those of them that fixed-size batches encode too, which hold all vectors in memory.
        scaling_clock: their `CLOCK`; their `SHRINK` is 1.
        call_rounds: timed calls of each size.
        clock: `CLOCK`.
    """

    end_to_end: int = 400_000
    packing: int = 200_000
    bound: int = 1_000_000
    ablation: int = 200_000
    models: dict[str, int] = field(
        default_factory=lambda: {"minilm": 2_400, "bge-base": 300, "e5-large": 90}
    )
    partition_texts: int = 9
    simulated_models: int = 80_000
    profiles: int = 260_000
    thresholds: int = 250_000
    serialization: tuple[int, ...] = (10_000, 50_000, 100_000)
    scaling: tuple[int, ...] = (1_000_000, 2_000_000)
    batched: tuple[int, ...] = (2_000_000,)
    failures: int = 40_000
    scaling_clock: float = 1.0
    call_rounds: int = 9
    clock: float = CLOCK


SCALES = {
    "eval": Scale(),
    "full": Scale(
        end_to_end=2_000_000,
        packing=1_000_000,
        bound=2_000_000,
        ablation=500_000,
        models={"minilm": 20_000, "bge-base": 3_000, "e5-large": 900},
        simulated_models=500_000,
        profiles=500_000,
        thresholds=1_000_000,
        serialization=(10_000, 50_000, 100_000, 200_000, 500_000),
        scaling=(1_000_000, 2_000_000, 10_000_000, 50_000_000),
        batched=(1_000_000, 2_000_000),
        failures=400_000,
    ),
    # Shows that everything runs, and measures nothing.
    "tiny": Scale(
        **dict.fromkeys(("end_to_end", "packing", "bound", "ablation"), 2_000),
        models={"minilm": 90, "bge-base": 45},
        **dict.fromkeys(("simulated_models", "profiles", "thresholds"), 1_000),
        serialization=(1_000,),
        scaling=(1_000, 2_000),
        batched=(1_000, 2_000),
        failures=4_000,
        scaling_clock=1_000.0,
        call_rounds=1,
        clock=1_000.0,
    ),
}


def case_of(
    costs: CostConstants,
    texts: int,
    *,
    clock: float = CLOCK,
    shrink: float = SHRINK,
    sigma: float = LOG_SIGMA,
    b_min: int = published.B_MIN,
    dimension: int = 384,
    profile: str = "gcs",
    processes: int = 1,
) -> Case:
    """Return a case whose simulated encoder and store are the paper's at this scale.

    Args:
        b_min: the paper's.
        processes: that the G workers are divided among.
    """
    store = PROFILES[profile]
    wanted = max(1, round(b_min / shrink))
    return Case(
        texts,
        max(2, round(texts * shrink / published.MEAN_SIZE)),
        sigma,
        SEED,
        workers=processes,
        text_seconds=processes / costs.texts_per_second / clock,
        call_seconds=costs.call_seconds / (clock * shrink),
        dimension=dimension,
        profile=replace(store, latency_seconds=store.latency_seconds / (clock * shrink)),
        clock=clock,
        thresholds=Thresholds(b_min=wanted, b_max=B_MAX_FACTOR * wanted),
    )
