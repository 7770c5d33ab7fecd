"""Prediction beside outcome: plan a run, run it, and compare the wall times.

    python -m benchmarks.prediction [--models minilm,bge-base,e5-large,simulated] [--sigmas 1.0,1.72,2.5]
        [--workers 1,2] [--seconds 60] [--repeats 3]

For each model shape, number of workers and spread of the partition sizes: calibrate on the catalog, then plan and embed
it a few times, as night by night: each plan knows the calibration and the runs before it. Prints a table and, as the
last line of standard output, one JSON document. `simulated` is an encoder that sleeps for a fixed time per text;
everything else of its run is real. The error of a case is the mean of its plans' errors without their signs. The spread
of the repeated runs stands beside it: no prediction can be closer than that.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean

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
from benchmarks.paced_runs import embed, paced_pool
from surge_dagster.catalogs.synthetic import build_synthetic_catalog
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.plan.calibrating import known_costs
from surge_dagster.engine.plan.calibration_run import calibrate, estimate_bytes
from surge_dagster.engine.plan.planner import plan
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.tables.opening import open_source

MODELS = ("minilm", *SHAPES, "simulated")
_SIMULATED_SPEED = 5_000.0  # texts per second of one worker
_TOKENS = 11.0  # of a text of the synthetic catalog
_MEAN_SIZE = 2_500 / 4  # texts of a partition: a quarter of the paper's, so that a short run has many
_LARGEST_ERROR = 0.02


def measure(arguments: argparse.Namespace) -> Document:
    """Plan and embed each combination and give the document."""
    document = start_document("prediction", arguments, ("openvino", "torch", "sentence-transformers"))
    cases = document["cases"] = []
    for model in arguments.models:
        for workers in map(int, arguments.workers):
            with tempfile.TemporaryDirectory() as folder, _pool(model, workers, Path(folder)) as pool:
                for sigma in map(float, arguments.sigmas):
                    say(f"{model}, {workers} workers, sigma {sigma}")
                    case = {"model": model, "workers": workers, "sigma": sigma, "precision": pool.precision}
                    cases.append(case | _case(pool, sigma, arguments.seconds, arguments.repeats, Path(folder)))
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


def _case(pool: EncoderPool, sigma: float, seconds: float, repeats: int, folder: Path) -> Document:
    """One catalog, planned and embedded `repeats` times."""
    texts = max(100, round(seconds * pool.costs.workers / pool.costs.text_seconds(_TOKENS)))
    source, output = folder / f"catalog-{sigma}", folder / "output"
    build_synthetic_catalog(source, texts=texts, partitions=max(4, round(texts / _MEAN_SIZE)), sigma=sigma, seed=1)
    partitions = list(open_source(str(source)))
    calibrate(partitions, str(output), StorageOptions(), pool)
    store = open_store(output / f"{sigma}-0")
    bounds = Thresholds().resolve(pool.costs.efficient_texts)
    sizes, (text_bytes, beside_bytes) = [partition.rows or 0 for partition in partitions], estimate_bytes(partitions)
    pinned = Thresholds(bounds.b_min, bounds.b_max, first_b_min=bounds.first_b_min)
    plans, reports = [], []
    for number in range(repeats):
        costs = known_costs(pool, store)
        plans.append(plan(sizes, text_bytes, costs, bounds, beside_bytes=beside_bytes))
        reports.append(embed(pool, partitions, open_store(output / f"{sigma}-{number}"), pinned))
    predicted, walls = [planned.forecast.wall_seconds for planned in plans], [report.wall_seconds for report in reports]
    return {
        "texts": texts,
        "partitions": len(partitions),
        "plan": plans[0].as_dict(),
        "runs": [report.as_dict() for report in reports],
        "predicted_wall_seconds": predicted,
        "wall_seconds": walls,
        "prediction_errors": [planned / wall - 1 for planned, wall in zip(predicted, walls, strict=True)],
        "spread": (max(walls) - min(walls)) / fmean(walls),
    }


def prediction_lines(document: Document) -> list[str]:
    lines = [
        f"{'model':12}{'workers':>8}{'sigma':>7}{'texts':>10}{'alpha':>8}{'measured s':>12}{'error':>8}{'spread':>8}"
        f"{'flushes':>9}  errors of each plan"
    ]
    for case in document["cases"]:
        planned, done = case["plan"]["superbatches"], case["runs"][0]["superbatches"]
        lines.append(
            f"{case['model']:12}{case['workers']:8}{case['sigma']:7.2f}{case['texts']:10,}{case['plan']['alpha']:8.3f}"
            f"{fmean(case['wall_seconds']):12.1f}{_error(case):8.1%}{case['spread']:8.1%}{planned:5} /{done:3}  "
            + " ".join(f"{error:+.1%}" for error in case["prediction_errors"])
        )
    return lines


def prediction_targets(document: Document) -> Iterable[Target]:
    """The aims: 2 %, or the spread of the runs where that is more, and the planned number of SuperBatches."""
    for case in document["cases"]:
        name = f"{case['model']}, {case['workers']} workers, sigma {case['sigma']:g}"
        aim = max(_LARGEST_ERROR, case["spread"])
        yield at_most(f"error of the predicted wall time: {name}", round(aim, 4), _error(case))
        yield at_most(f"error of the first plan: {name}", round(aim, 4), abs(case["prediction_errors"][0]))
        wrong = abs(case["plan"]["superbatches"] - case["runs"][0]["superbatches"])
        yield at_most(f"SuperBatches that were planned wrongly: {name}", 0, wrong)


def _error(case: Document) -> float:
    return fmean(map(abs, case["prediction_errors"]))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", type=names_of(MODELS), default=list(MODELS))
    parser.add_argument("--sigmas", type=numbers, default=[1.0, 1.72, 2.5])
    parser.add_argument("--workers", type=numbers, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run, about")
    parser.add_argument("--repeats", type=int, default=3)
    document = measure(parser.parse_args())
    print_document(document, prediction_lines(document), prediction_targets(document))


if __name__ == "__main__":
    main()
