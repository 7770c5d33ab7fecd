"""Prediction beside outcome: plan a run, run it, and compare the wall times.

    python -m benchmarks.prediction [--models minilm,bge-base,e5-large,simulated] [--sigmas 1.0,1.72,2.5]
        [--workers 1,2] [--seconds 60] [--repeats 2]

For each model shape, number of workers and spread of the partition sizes: calibrate on the catalog, plan it, and embed
it a few times. Prints a table and, as the last line of standard output, one JSON document. `simulated` is an encoder
that sleeps for a fixed time per text; everything else of its run is real. The spread of the repeated runs stands beside
the error: no prediction can be closer than that.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.harness import Document, Target, at_most, names_of, print_document, say, start_document
from benchmarks.paced_runs import embed, paced_pool
from benchmarks.shapes import SHAPES, write_model
from surge_dagster.catalogs.synthetic import build_synthetic_catalog
from surge_dagster.engine.calibrating import known_costs
from surge_dagster.engine.calibration_run import calibrate, estimate_bytes
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.planner import plan
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.sources import open_source
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.thresholds import Thresholds

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
    """One catalog, planned and then embedded `repeats` times."""
    texts = max(100, round(seconds * pool.costs.workers / pool.costs.text_seconds(_TOKENS)))
    source, output = folder / f"catalog-{sigma}", folder / "output"
    build_synthetic_catalog(source, texts=texts, partitions=max(4, round(texts / _MEAN_SIZE)), sigma=sigma, seed=1)
    partitions = list(open_source(str(source)))
    calibrate(partitions, str(output), StorageOptions(), pool)
    store = open_store(output / f"{sigma}-0")
    bounds = EmbeddingRun(partitions, store, pool).bounds
    sizes, (text_bytes, beside_bytes) = [partition.rows or 0 for partition in partitions], estimate_bytes(partitions)
    planned = plan(sizes, text_bytes, known_costs(pool, store), bounds, beside_bytes=beside_bytes)
    pinned = Thresholds(bounds.b_min, bounds.b_max, bounds.b_min_bytes, bounds.b_max_bytes, 0, bounds.first_b_min)
    reports = [embed(pool, partitions, open_store(output / f"{sigma}-{number}"), pinned) for number in range(repeats)]
    walls = [report.wall_seconds for report in reports]
    mean = sum(walls) / len(walls)
    return {
        "texts": texts,
        "partitions": len(partitions),
        "plan": planned.as_dict(),
        "runs": [report.as_dict() for report in reports],
        "predicted_wall_seconds": planned.forecast.wall_seconds,
        "wall_seconds": mean,
        "prediction_error": planned.forecast.wall_seconds / mean - 1,
        "spread": (max(walls) - min(walls)) / mean,
    }


def prediction_lines(document: Document) -> list[str]:
    """The table of the cases."""
    lines = [
        f"{'model':12}{'workers':>8}{'sigma':>7}{'texts':>10}{'alpha':>8}{'planned s':>11}{'measured s':>12}"
        f"{'error':>8}{'spread':>8}{'flushes':>9}"
    ]
    for case in document["cases"]:
        made, done = case["plan"]["superbatches"], case["runs"][0]["superbatches"]
        lines.append(
            f"{case['model']:12}{case['workers']:8}{case['sigma']:7.2f}{case['texts']:10,}"
            f"{case['plan']['alpha']:8.3f}{case['predicted_wall_seconds']:11.1f}{case['wall_seconds']:12.1f}"
            f"{case['prediction_error']:8.1%}{case['spread']:8.1%}{made:5} /{done:3}"
        )
    return lines


def prediction_targets(document: Document) -> Iterable[Target]:
    """The aims: 2 %, or the spread of the runs where that is more, and the planned number of SuperBatches."""
    for case in document["cases"]:
        name = f"{case['model']}, {case['workers']} workers, sigma {case['sigma']:g}"
        aim = max(_LARGEST_ERROR, case["spread"])
        yield at_most(f"error of the predicted wall time: {name}", round(aim, 4), abs(case["prediction_error"]))
        wrong = abs(case["plan"]["superbatches"] - case["runs"][0]["superbatches"])
        yield at_most(f"SuperBatches that were planned wrongly: {name}", 0, wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names_of(MODELS), default=list(MODELS))
    parser.add_argument("--sigmas", type=_numbers, default=[1.0, 1.72, 2.5])
    parser.add_argument("--workers", type=_numbers, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run, about")
    parser.add_argument("--repeats", type=int, default=2)
    document = measure(parser.parse_args())
    print_document(document, prediction_lines(document), list(prediction_targets(document)))


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
