"""Prediction beside outcome: plan a run, run it, and compare the wall times.

    python -m benchmarks.prediction [--models minilm,bge-base,e5-large,simulated] [--sigmas 1.0,1.72,2.5]
        [--workers 1,2] [--seconds 60] [--repeats 3] [--histories calibration,long,language,model,busy]

For each model shape, number of workers and spread of the partition sizes: calibrate on the catalog,
or forget earlier runs and embed another catalog (of texts of 1 MB, in another language, with
another model, or on a machine that is busy). Then plan and embed the catalog a few times, as night
by night: each plan knows the runs before it. Prints a table and, as the last line of standard
output, one JSON document. `simulated` is an encoder that sleeps for a fixed time per text;
everything else of its run is real. The error of a case is the mean of its plans' errors without
their signs. The spread of the repeated runs stands beside it: no prediction can be closer than
that.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pyarrow as pa

from benchmarks.encode.inputs import SHAPES, write_model
from benchmarks.harness import (
    Document,
    Target,
    at_most,
    command_line,
    names_of,
    numbers,
    print_document,
    say,
    start_document,
)
from benchmarks.paced_runs import paced_pool
from benchmarks.synthetic import build_synthetic_catalog
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.plan.calibrating import learning
from surge_dagster.engine.plan.calibration_run import calibrate
from surge_dagster.engine.plan.planned_run import plan
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import RunReport
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.tables.opening import open_source

MODELS = ("minilm", *SHAPES, "simulated")
_SIMULATED_SPEED = 5_000.0  # texts per second of one worker
_TOKENS = 11.0  # of a text of the synthetic catalog
# texts of a partition: a quarter of the paper's, so that a short run has many
_MEAN_SIZE = 2_500 / 4
_LARGEST_ERROR, _LARGEST_FIRST_ERROR = 0.02, 0.10
# What the texts of another catalog are made into, and how many seconds of its run, at the speed of
# plain texts.
_HISTORIES = {"long": (20_000, 0.02), "language": (1, 0.3), "model": (1, 0.1), "busy": (1, 0.5)}
_CYRILLIC = str.maketrans("abcdefghijklmnoprstuvz", "абцдефгхийклмнопрстувз")


def measure(arguments: argparse.Namespace) -> Document:
    """Plan and embed each combination and give the document."""
    document = start_document(
        "prediction", arguments, ("openvino", "torch", "sentence-transformers")
    )
    cases = document["cases"] = []
    for model, workers in itertools.product(arguments.models, map(int, arguments.workers)):
        with tempfile.TemporaryDirectory() as folder, _pool(model, workers, Path(folder)) as pool:
            for spread, history in itertools.product(
                arguments.sigmas, map(str, arguments.histories)
            ):
                sigma = float(spread)
                say(f"{model}, {workers} workers, sigma {sigma}, after {history}")
                case = {"model": model, "workers": workers, "sigma": sigma, "history": history}
                measured = _case(
                    pool, sigma, history, arguments.seconds, arguments.repeats, Path(folder)
                )
                cases.append(case | {"precision": pool.precision} | measured)
    return document


@contextlib.contextmanager
def _pool(model: str, workers: int, folder: Path) -> Iterator[EncoderPool]:
    if model == "simulated":
        with paced_pool(_SIMULATED_SPEED, workers=workers) as pool:
            yield pool
        return
    spec = EncodingSpec() if model == "minilm" else EncodingSpec(write_model(model, folder))
    with EncoderPool(spec, devices=",".join(["cpu"] * workers)) as pool:
        yield pool


def _catalog(
    folder: Path, pool: EncoderPool, seconds: float, sigma: float, seed: int
) -> list[Partition]:
    texts = max(100, round(seconds * pool.speed.workers / pool.speed.worker_seconds(_TOKENS)))
    build_synthetic_catalog(
        folder, texts=texts, partitions=max(4, round(texts / _MEAN_SIZE)), sigma=sigma, seed=seed
    )
    return list(open_source(str(folder)))


def _embed(
    pool: EncoderPool, partitions: list[Partition], store: Store, thresholds: Thresholds
) -> RunReport:
    run = EmbeddingRun(partitions, store, pool, thresholds)
    for _ in learning(run, pool, store):
        pass
    return run.report


def _other(history: str, pool: EncoderPool, seconds: float, folder: Path) -> None:
    """Embed another catalog, with no run before it that counts."""
    pool.measure_speed(anew=True)
    times, share = _HISTORIES[history]

    def read(partition: Partition) -> Iterator[RowBatch]:
        for batch in partition.read():
            texts = [text.as_py() * times for text in batch.texts]
            if history == "language":
                texts = [text.translate(_CYRILLIC) for text in texts]
            yield RowBatch(batch.ids, pa.array(texts, pa.large_string()))

    partitions = [
        replace(each, read=partial(read, each))
        for each in _catalog(folder, pool, share * seconds, 1.0, 2)
    ]
    busy = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in busy if history == "busy" else ():
        process.start()
    output = open_store(folder.with_suffix(".output"))
    if history == "model":
        other = "bge-base" if pool.space.dimension == 384 else "minilm"
        with _pool(other, pool.speed.workers, folder) as other_pool:
            other_pool.measure_speed(anew=True)
            _embed(other_pool, partitions, output, Thresholds())
    else:
        _embed(pool, partitions, output, Thresholds())
    for process in busy if history == "busy" else ():
        process.kill()
        process.join()


def _spin() -> None:
    while True:
        pass


def _case(
    pool: EncoderPool, sigma: float, history: str, seconds: float, repeats: int, folder: Path
) -> Document:
    """One catalog, planned and embedded `repeats` times."""
    output = folder / f"output-{sigma}-{history}"
    partitions = _catalog(folder / f"catalog-{sigma}", pool, seconds, sigma, 1)
    if history in _HISTORIES:
        _other(history, pool, seconds, folder / f"other-{sigma}-{history}")
    else:
        calibrate(partitions, str(output), StorageOptions(), pool)
    bounds = Thresholds().resolve(pool.speed.b_min)
    pinned = Thresholds(bounds.b_min, bounds.b_max, first_b_min=bounds.first_b_min)
    plans, reports = [], []
    for number in range(repeats):
        store = open_store(output / str(number))
        plans.append(plan(partitions, store, pool, pinned))
        reports.append(_embed(pool, partitions, store, pinned))
    texts = plans[0].texts
    predicted, walls = (
        [planned.forecast.wall_seconds for planned in plans],
        [report.wall_seconds for report in reports],
    )
    return {
        "texts": texts,
        "partitions": len(partitions),
        "plan": plans[0].as_dict(),
        "runs": [report.as_dict() for report in reports],
        "predicted_wall_seconds": predicted,
        "wall_seconds": walls,
        "prediction_errors": [
            planned / wall - 1 for planned, wall in zip(predicted, walls, strict=True)
        ],
        "spread": (max(walls) - min(walls)) / fmean(walls),
    }


def prediction_lines(document: Document) -> list[str]:
    lines = [
        f"{'model':12}{'after':12}{'workers':>8}{'sigma':>7}{'texts':>10}{'alpha':>8}{'measured s':>12}{'error':>8}"
        f"{'spread':>8}{'flushes':>9}  errors of each plan"
    ]
    for case in document["cases"]:
        planned, done = case["plan"]["superbatches"], case["runs"][0]["superbatches"]
        lines.append(
            f"{case['model']:12}{case['history']:12}{case['workers']:8}{case['sigma']:7.2f}{case['texts']:10,}{case['plan']['alpha']:8.3f}"
            f"{fmean(case['wall_seconds']):12.1f}{_error(case):8.1%}{case['spread']:8.1%}{planned:5} /{done:3}  "
            + " ".join(f"{error:+.1%}" for error in case["prediction_errors"])
        )
    return lines


def prediction_targets(document: Document) -> Iterable[Target]:
    """The aims: 2 %, or the spread of the runs where that is more, and the planned number of
    SuperBatches.

    The first plan after another catalog may be wrong by 10 %, and its tokens by 2 %.
    """
    for case in document["cases"]:
        name = f"{case['model']}, {case['workers']} workers, sigma {case['sigma']:g}, after {case['history']}"
        aim = max(_LARGEST_ERROR, case["spread"])
        first = max(aim, _LARGEST_FIRST_ERROR) if case["history"] in _HISTORIES else aim
        yield at_most(f"error of the predicted wall time: {name}", round(aim, 4), _error(case))
        yield at_most(
            f"error of the first plan: {name}", round(first, 4), abs(case["prediction_errors"][0])
        )
        tokens = abs(case["plan"]["tokens"] / max(1, case["runs"][0]["tokens"]) - 1)
        yield at_most(f"error of the tokens: {name}", _LARGEST_ERROR, tokens)
        wrong = abs(case["plan"]["superbatches"] - case["runs"][0]["superbatches"])
        yield at_most(f"SuperBatches that were planned wrongly: {name}", 0, wrong)


def _error(case: Document) -> float:
    """Of the plans that know a run over the catalog, or parts of it."""
    errors = case["prediction_errors"]
    return fmean(
        map(abs, errors[1:] if case["history"] in _HISTORIES and len(errors) > 1 else errors)
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", type=names_of(MODELS), default=list(MODELS))
    parser.add_argument("--sigmas", type=numbers, default=[1.0, 1.72, 2.5])
    parser.add_argument("--workers", type=numbers, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run, about")
    parser.add_argument("--repeats", type=int, default=3)
    histories = ("calibration", *_HISTORIES)
    parser.add_argument("--histories", type=names_of(histories), default=["calibration"])
    document = measure(parser.parse_args())
    print_document(document, prediction_lines(document), prediction_targets(document))


if __name__ == "__main__":
    main()
