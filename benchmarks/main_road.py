"""The main road: forced runs over the demo's catalog, as a new user starts them, and runs that a signal stops.

    python -m benchmarks.main_road [--quick] [--texts 3000] [--runs 10]

Each run is the command `embed --force` with the default settings, on a cache that the first run finds empty. Prints a
table of the runs, the aims and, as the last line, one JSON document. The exit code is 1 if an aim is missed that does
not depend on the speed of the machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.harness import (
    Document,
    Target,
    add_quick,
    at_most,
    command_line,
    print_document,
    say,
    start_document,
)
from surge_dagster.catalogs.demo import build_demo_catalog
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.plan.calibrating import learning
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import SuperBatchReport
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.opening import open_source

_SLOW_LINE = "times as long as usual"
_LEARNED_RUNS = 2  # a prediction is an aim from the run after these on
_SIGNAL_SHARES = {"SIGTERM": (0.3, 0.7), "SIGKILL": (0.3, 0.7)}
_OF_RUN = (
    "superbatches",
    "b_min",
    "wall_seconds",
    "time_to_first_output_seconds",
    "predicted_wall_seconds",
    "texts_per_second",
)


def main() -> int:
    parser = command_line(__doc__)
    is_quick = add_quick(parser)
    parser.add_argument("--texts", type=int, default=600 if is_quick else 3_000)
    parser.add_argument("--runs", type=int, default=3 if is_quick else 10)
    arguments = parser.parse_args()

    document = start_document("main_road", arguments, ["openvino", "torch"])
    with tempfile.TemporaryDirectory(prefix="surge-main-road-") as folder:
        os.environ["SURGE_CACHE_DIR"] = f"{folder}/cache"
        catalog = Path(folder) / "catalog"
        build_demo_catalog(catalog, limit=arguments.texts)
        document["runs"] = [forced_run(catalog, Path(folder) / "out", number) for number in range(arguments.runs)]
        document["superbatches"] = timed_superbatches(catalog, Path(folder) / "timed")
        document["stopped"] = [
            stopped_run(catalog, Path(folder) / f"{name}-{share}", name, share)
            for name, shares in _SIGNAL_SHARES.items()
            for share in shares
        ]

    promises = list(promises_of(document))
    print_document(document, table_of(document), [*promises, *timings_of(document)])
    missed = [aim.name for aim in promises if not aim.met]
    return 1 if missed else 0


def forced_run(catalog: Path, output: Path, number: int) -> Document:
    """Return what the command reports of one run, and how many of its calls it called slow."""
    say(f"run {number}")
    command = [sys.executable, "-m", "surge_dagster", "embed", str(catalog), str(output), "--force", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(ended.stdout.splitlines()[-1])
    return {name: report[name] for name in _OF_RUN} | {"slow_lines": ended.stderr.count(_SLOW_LINE)}


def timed_superbatches(catalog: Path, output: Path) -> list[Document]:
    """Return, of each SuperBatch of a run, its encode seconds and those in which its worker computed."""
    store = open_store(output)
    with EncoderPool(EncodingSpec(), devices="cpu") as pool:
        run = EmbeddingRun(open_source(str(catalog)), store, pool, force=True)
        reports = [event for event in learning(run, pool, store) if isinstance(event, SuperBatchReport)]
    return [
        {
            "texts": report.costs.texts_computed,
            "encode_seconds": report.costs.encode_seconds,
            "busy_seconds": report.costs.forward_seconds,
        }
        for report in sorted(reports, key=lambda report: report.index)
    ]


def stopped_run(catalog: Path, output: Path, signal_name: str, share: float) -> Document:
    """Send a signal to a run that has encoded this share of its texts, and count the texts that it loses."""
    say(f"{signal_name} after {share:.0%}")
    texts = sum(pq.read_metadata(path).num_rows for path in catalog.rglob("*.parquet"))
    command = [sys.executable, "-m", "benchmarks.stopped_run", str(catalog), str(output)]
    encoded = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            encoded = int(line.split()[0])
            if encoded >= share * texts:
                running.send_signal(getattr(signal, signal_name))
                break
        running.stdout.read()
    published = sum(pq.read_metadata(path).num_rows for path in output.glob("*/*.parquet"))
    return {
        "signal": signal_name,
        "texts": texts,
        "encoded": encoded,
        "published": published,
        "lost": max(0, encoded - published),
    }


def promises_of(document: Document) -> Iterator[Target]:
    """What holds on any machine, however busy it is."""
    counts = [run["superbatches"] for run in document["runs"]]
    yield at_most("SuperBatches of the runs, most less fewest", 4, max(counts) - min(counts))

    superbatches = document["superbatches"]
    too_short = [each for each in superbatches if each["encode_seconds"] < each["busy_seconds"]]
    yield at_most("SuperBatches whose encode seconds are less than their worker's", 0, len(too_short))

    yield at_most("encoded texts that a run loses by SIGTERM", 0, _most_lost(document, "SIGTERM"))


def timings_of(document: Document) -> Iterator[Target]:
    """What holds on a machine that does nothing else."""
    runs = document["runs"]
    first_file = max(run["time_to_first_output_seconds"] / run["wall_seconds"] for run in runs)
    yield at_most("first file, share of the run, at most", 0.15, first_file)

    superbatches = document["superbatches"]
    encode_seconds = sum(each["encode_seconds"] for each in superbatches)
    busy_seconds = sum(each["busy_seconds"] for each in superbatches)
    yield at_most("encode seconds over those of the worker", 1.05, encode_seconds / busy_seconds)

    errors = [_error_of(run) for run in runs[_LEARNED_RUNS:]]
    worst = max((abs(error) for error in errors), default=None)
    yield at_most("prediction error from the third run on", 0.1, worst, note="fewer than three runs")

    yield at_most("calls that were called slow", 0, sum(run["slow_lines"] for run in runs))

    largest = sorted(each["texts"] for each in superbatches)[-2:]
    yield at_most("encoded texts lost by SIGKILL: two SuperBatches", sum(largest), _most_lost(document, "SIGKILL"))


def table_of(document: Document) -> Iterator[str]:
    yield f"{'run':>4}{'B_min':>8}{'SuperBatches':>14}{'first file':>12}{'wall':>9}{'predicted':>11}{'texts/s':>9}"
    for number, run in enumerate(document["runs"], 1):
        yield (
            f"{number:>4}{run['b_min']:>8,}{run['superbatches']:>14}{run['time_to_first_output_seconds']:>10.2f} s"
            f"{run['wall_seconds']:>7.2f} s{run['predicted_wall_seconds']:>9.2f} s{run['texts_per_second']:>9,.0f}"
        )

    yield ""
    yield f"{'SuperBatch':>10}{'texts':>9}{'encode':>10}{'worker':>10}"
    for number, each in enumerate(document["superbatches"]):
        yield (f"{number:>10}{each['texts']:>9,}{each['encode_seconds']:>8.2f} s{each['busy_seconds']:>8.2f} s")

    yield ""
    yield f"{'signal':>10}{'of texts':>10}{'encoded':>9}{'published':>11}{'lost':>7}"
    for each in document["stopped"]:
        yield (
            f"{each['signal']:>10}{each['texts']:>10,}{each['encoded']:>9,}{each['published']:>11,}{each['lost']:>7,}"
        )


def _most_lost(document: Document, signal_name: str) -> int:
    return max(each["lost"] for each in document["stopped"] if each["signal"] == signal_name)


def _error_of(run: dict[str, Any]) -> float:
    return run["predicted_wall_seconds"] / run["wall_seconds"] - 1


if __name__ == "__main__":
    sys.exit(main())
