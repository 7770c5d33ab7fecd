"""Prediction compared with outcome: plan a run, run it, and compare the wall times.

    python -m benchmarks.prediction [--model minilm] [--seconds 60] [--repeats 3]
        [--histories calibration,long,language,model,busy] [--quick]

For each history: calibrate on the catalog, or forget earlier runs and embed another catalog (of
texts of 1 MB, in another language, with another model, or on a busy machine). Then plan and embed
the catalog a few times, as on successive nights: each plan learns from the runs before it.
`simulated` is an encoder that sleeps for a fixed time per text; everything else of its run is real.
The error of a case is the mean of its plans' errors without their signs. No prediction can be
closer than the spread of the repeated runs.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa

from benchmarks.encode.inputs import spec_of
from benchmarks.gpu_models import SHAPES
from benchmarks.harness import (
    Document,
    Options,
    Target,
    at_most,
    print_document,
    say,
    start_document,
    temporary_folder,
)
from benchmarks.paced_runs import embed, paced_pool
from benchmarks.synthetic import LOG_SIGMA, build_synthetic_catalog
from surge_dagster import EncoderPool, open_source, open_store, plan
from surge_dagster.engine.plan.planned_run import calibrate
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store import StorageOptions

_MODELS = (*SHAPES, "simulated")
_SIMULATED_SPEED = 5_000.0  # texts per second of one worker
_TOKENS = 11.0  # of a text of the synthetic catalog
# Texts of a partition: a quarter of the paper's, so that a short run has many partitions.
_MEAN_SIZE = 2_500 / 4
_LARGEST_ERROR = 0.02
_LARGEST_FIRST_ERROR = 0.10
# How often the texts of another catalog are repeated, and the share of the seconds that its run
# takes at the speed of plain texts.
_HISTORIES = {
    "long": (20_000, 0.02),
    "language": (1, 0.3),
    "model": (1, 0.1),
    "busy": (1, 0.5),
}
_CYRILLIC = str.maketrans("abcdefghijklmnoprstuvz", "абцдефгхийклмнопрстувз")


@contextlib.contextmanager
def open_pool(model: str, folder: Path) -> Iterator[EncoderPool]:
    """Yield a pool of this model with two workers."""
    if model == "simulated":
        pool = paced_pool(_SIMULATED_SPEED, workers=2)
    else:
        pool = EncoderPool(spec_of(model, folder), devices="cpu,cpu")
    with pool as opened:
        yield opened


def measure_case(
    pool: EncoderPool, history: str, arguments: argparse.Namespace, folder: Path
) -> Document:
    """Plan and embed one catalog a few times."""
    seconds = arguments.seconds
    partitions = build_catalog(folder / "catalog", pool, seconds, LOG_SIGMA, seed=1)
    if history in _HISTORIES:
        embed_another_catalog(history, pool, seconds, folder / "other")
    else:
        calibrate(partitions, str(folder / "output"), StorageOptions(), pool)
    bounds = Thresholds().resolve(pool.speed.b_min)
    pinned = Thresholds(bounds.b_min, bounds.b_max, first_b_min=bounds.first_b_min)

    plans = []
    reports = []
    for number in range(arguments.repeats):
        store = open_store(folder / f"output-{number}")
        plans.append(plan(partitions, store, pool, pinned))
        reports.append(embed(pool, partitions, store, pinned, learns=True))
    predicted = [planned.forecast.wall_seconds for planned in plans]
    walls = [report.wall_seconds for report in reports]
    errors = [planned / wall - 1 for planned, wall in zip(predicted, walls, strict=True)]
    return {
        "history": history,
        "texts": plans[0].texts,
        "partitions": len(partitions),
        "plan": plans[0].as_dict(),
        "runs": [report.as_dict() for report in reports],
        "predicted_wall_seconds": predicted,
        "wall_seconds": walls,
        "prediction_errors": errors,
        "spread": (max(walls) - min(walls)) / fmean(walls),
    }


def build_catalog(
    folder: Path, pool: EncoderPool, seconds: float, sigma: float, seed: int
) -> list[Partition]:
    """Build a catalog that the pool encodes in some seconds."""
    texts = max(100, round(seconds * pool.speed.workers / pool.speed.worker_seconds(_TOKENS)))
    partitions = max(4, round(texts / _MEAN_SIZE))
    build_synthetic_catalog(folder, texts=texts, partitions=partitions, sigma=sigma, seed=seed)
    return list(open_source(str(folder)))


def embed_another_catalog(history: str, pool: EncoderPool, seconds: float, folder: Path) -> None:
    """Embed another catalog after the pool has forgotten its runs."""
    pool.measure_speed(anew=True)
    repeats, share = _HISTORIES[history]

    def read(partition: Partition) -> Iterator[RowBatch]:
        for batch in partition.read():
            texts = [text.as_py() * repeats for text in batch.texts]
            if history == "language":
                texts = [text.translate(_CYRILLIC) for text in texts]
            changed: Any = pa.array(texts, pa.large_string())
            yield RowBatch(batch.ids, changed)

    catalog = build_catalog(folder / "catalog", pool, share * seconds, 1.0, seed=2)
    partitions = [replace(each, read=partial(read, each)) for each in catalog]
    with contextlib.ExitStack() as stack:
        if history == "busy":
            stack.enter_context(_busy_machine())
        if history == "model":
            other = "bge-base" if pool.space.dimension == 384 else "minilm"
            pool = stack.enter_context(open_pool(other, folder))
            pool.measure_speed(anew=True)
        embed(pool, partitions, open_store(folder / "output"), learns=True)


@contextlib.contextmanager
def _busy_machine() -> Iterator[None]:
    """Keep every core busy."""
    count = os.cpu_count() or 1
    processes = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin() -> None:
    while True:
        pass


def lines(document: Document) -> Iterator[str]:
    """Yield the table."""
    yield (
        f"{'after':12}{'texts':>10}{'measured s':>12}{'error':>8}{'spread':>8}{'flushes':>9}"
        "  errors of each plan"
    )
    for case in document["cases"]:
        planned = case["plan"]["superbatches"]
        done = case["runs"][0]["superbatches"]
        errors = " ".join(f"{error:+.1%}" for error in case["prediction_errors"])
        yield (
            f"{case['history']:12}{case['texts']:10,}"
            f"{fmean(case['wall_seconds']):12.1f}{error_of(case):8.1%}"
            f"{case['spread']:8.1%}{planned:5} /{done:3}  {errors}"
        )


def targets(document: Document) -> Iterator[Target]:
    """Yield the aims: 2 %, or the spread of the runs if that is more, and the planned number of
    SuperBatches.

    The first plan after another catalog may be wrong by 10 %, and its tokens by 2 %.
    """
    for case in document["cases"]:
        name = f"after {case['history']}"
        aim = first_aim = max(_LARGEST_ERROR, case["spread"])
        if case["history"] in _HISTORIES:
            first_aim = max(aim, _LARGEST_FIRST_ERROR)
        first_error = abs(case["prediction_errors"][0])
        yield at_most(f"error of the predicted wall time: {name}", round(aim, 4), error_of(case))
        yield at_most(f"error of the first plan: {name}", round(first_aim, 4), first_error)

        planned = case["plan"]
        run = case["runs"][0]
        tokens_error = abs(planned["tokens"] / max(1, run["tokens"]) - 1)
        yield at_most(f"error of the tokens: {name}", _LARGEST_ERROR, tokens_error)
        wrong = abs(planned["superbatches"] - run["superbatches"])
        yield at_most(f"SuperBatches that were planned wrongly: {name}", 0, wrong)


def error_of(case: Document) -> float:
    """Return the error of the plans that follow a run over the catalog, or parts of it."""
    errors = case["prediction_errors"]
    if case["history"] in _HISTORIES and len(errors) > 1:
        errors = errors[1:]
    return fmean(map(abs, errors))


def main() -> None:
    histories = ("calibration", *_HISTORIES)
    options = Options(__doc__)
    options.add_argument("--model", choices=_MODELS, default="minilm", help="(minilm)")
    options.add_size("--seconds", 60.0, 0.2, "of each run, about")
    options.add_size("--repeats", 3, 2)
    options.add_names("--histories", histories, ["calibration"])
    arguments = options.parse_args()
    libraries = ("openvino", "torch", "sentence-transformers")
    document = start_document("prediction", arguments, libraries)
    document["cases"] = []
    with temporary_folder() as folder, open_pool(arguments.model, folder) as pool:
        for history in arguments.histories:
            say(f"after {history}")
            case = measure_case(pool, history, arguments, folder / history)
            document["cases"].append(case)
    print_document(document, lines, targets)


if __name__ == "__main__":
    main()
