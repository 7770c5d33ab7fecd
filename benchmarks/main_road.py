"""The main road: what a new user gets from the default path, on the demo's catalog.

    python -m benchmarks.main_road [--quick] [--texts 3000] [--runs 10]

Three measurements, on a cache that the first run finds empty:

- forced runs: the command `embed --force` with the default settings, again and again. Are they
  alike, is the first file early, and does the prediction hold?
- SuperBatches of one run, through the library on the CPU: do their encode seconds equal those of
  the worker?
- runs of the library that get SIGTERM or SIGKILL when their worker has computed a share of the
  texts: how many of these vectors are lost?

The exit code is 1 if a target is missed that does not depend on the speed of the machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import pyarrow.parquet as pq

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
from benchmarks.paced_runs import embed
from surge_dagster import EncoderPool, EncodingSpec, open_source, open_store
from surge_dagster.catalogs.demo import build_demo_catalog
from surge_dagster.engine.run.report import Event, SuperBatchReport

_LEARNED_RUNS = 2  # before predictions are accurate
_SIGNALS = ("SIGTERM", "SIGKILL")
_STOP_AT_SHARES = (0.3, 0.7)
_POLL_SECONDS = 0.02
_REPORT_FIELDS = (
    "slow_superbatches",
    "superbatches",
    "b_min",
    "wall_seconds",
    "time_to_first_output_seconds",
    "predicted_wall_seconds",
    "texts_per_second",
)


def main() -> int:
    options = Options(__doc__)
    options.add_size("--texts", 3_000, 600)
    options.add_size("--runs", 10, 3)
    arguments = options.parse_args()

    document = start_document("main_road", arguments, ["openvino", "torch"])
    with temporary_folder() as folder:
        os.environ["SURGE_CACHE_DIR"] = f"{folder}/cache"
        catalog = folder / "catalog"
        build_demo_catalog(catalog, limit=arguments.texts)
        numbers = range(1, arguments.runs + 1)
        document["runs"] = [forced_run(catalog, folder / "out", number) for number in numbers]
        document["superbatches"] = timed_superbatches(catalog, folder / "timed")
        document["stopped"] = []
        for name, share in product(_SIGNALS, _STOP_AT_SHARES):
            stopped = stopped_run(catalog, folder / f"{name}-{share}", name, share)
            document["stopped"].append(stopped)

    print_document(document, lines, targets)
    return int(not all(aim.met for aim in machine_independent_targets(document)))


def forced_run(catalog: Path, output: Path, number: int) -> Document:
    """Return what the command reports of one run."""
    say(f"run {number}")
    command = [
        sys.executable,
        "-m",
        "surge_dagster",
        "embed",
        catalog,
        output,
        "--force",
        "--json",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(ended.stdout.splitlines()[-1])
    return {name: report[name] for name in _REPORT_FIELDS}


def timed_superbatches(catalog: Path, output: Path) -> list[Document]:
    """Return, of each SuperBatch of a run, its encode seconds and those in which its worker
    computed."""
    measured: list[Document] = []

    def note(event: Event) -> None:
        if isinstance(event, SuperBatchReport):
            measured.append(
                {
                    "index": event.index,
                    "texts": event.costs.texts_computed,
                    "encode_seconds": event.costs.encode_seconds,
                    "busy_seconds": event.costs.forward_seconds,
                }
            )

    with EncoderPool(EncodingSpec(), devices="cpu") as pool:
        embed(pool, open_source(catalog), open_store(output), seen=note, learns=True)
    return sorted(measured, key=lambda superbatch: superbatch["index"])


def stopped_run(catalog: Path, output: Path, signal_name: str, share: float) -> Document:
    """Send a signal when a run's worker has computed this share of the texts, and count the vectors
    that are lost."""
    say(f"{signal_name} after {share:.0%}")
    texts = _rows_in(catalog.rglob("*.parquet"))
    command = [sys.executable, "-m", "benchmarks.stopped_run", catalog, output]
    portions = output.with_suffix(".portions")
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"COUNTED_PORTIONS": str(portions), "PYTHONPATH": root}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None
        running.stdout.readline()
        while _texts_in(portions) < share * texts:
            if running.poll() is not None:
                raise RuntimeError(f"The run ended before {signal_name}: {running.returncode}.")
            time.sleep(_POLL_SECONDS)
        computed = _texts_in(portions)
        running.send_signal(getattr(signal, signal_name))
        running.stdout.read()

    published = _rows_in(output.glob("*/*.parquet"))
    return {
        "signal": signal_name,
        "share": share,
        "texts": texts,
        "computed": computed,
        "published": published,
        "lost": max(0, computed - published),
    }


def _rows_in(files: Iterable[Path]) -> int:
    return sum(pq.read_metadata(path).num_rows for path in files)


def _texts_in(portions: Path) -> int:
    if not portions.exists():
        return 0
    return sum(map(int, portions.read_text().split()))


def targets(document: Document) -> Iterator[Target]:
    """Yield all aims."""
    yield from machine_independent_targets(document)
    yield from idle_machine_targets(document)


def machine_independent_targets(document: Document) -> Iterator[Target]:
    """Yield what holds on any machine that encodes a SuperBatch within half of the grace time."""
    counts = _values(document["runs"], "superbatches")
    yield at_most("spread of the runs' counts of SuperBatches", 4, max(counts) - min(counts))

    encode_seconds = sum(_values(document["superbatches"], "encode_seconds"))
    busy_seconds = sum(_values(document["superbatches"], "busy_seconds"))
    yield at_most("encode seconds over those of the worker", 1.2, encode_seconds / busy_seconds)

    yield at_most("computed texts that a run loses by SIGTERM", 0, _most_lost(document, "SIGTERM"))


def idle_machine_targets(document: Document) -> Iterator[Target]:
    """Yield what holds on a machine that does nothing else."""
    runs = document["runs"]
    first_file = max(run["time_to_first_output_seconds"] / run["wall_seconds"] for run in runs)
    yield at_most("first file, share of the run's wall time", 0.15, first_file)

    errors = []
    for run in runs[_LEARNED_RUNS:]:
        errors.append(abs(run["predicted_wall_seconds"] / run["wall_seconds"] - 1))
    worst = max(errors, default=None)
    yield at_most("prediction error from the third run on", 0.1, worst, note="too few runs")

    slow = sum(_values(runs, "slow_superbatches"))
    yield at_most("SuperBatches that were reported as slow", 0, slow)

    largest = sum(sorted(_values(document["superbatches"], "texts"))[-2:])
    lost = _most_lost(document, "SIGKILL")
    yield at_most("computed texts lost by SIGKILL: two SuperBatches", largest, lost)


def _values(rows: list[Document], name: str) -> list[float]:
    return [row[name] for row in rows]


def _most_lost(document: Document, signal_name: str) -> int:
    return max(each["lost"] for each in document["stopped"] if each["signal"] == signal_name)


def lines(document: Document) -> Iterator[str]:
    """Yield the three tables."""
    yield (
        f"{'run':>4}{'B_min':>8}{'SuperBatches':>14}{'first file':>12}{'wall':>9}"
        f"{'predicted':>11}{'texts/s':>9}"
    )
    for number, run in enumerate(document["runs"], 1):
        yield (
            f"{number:>4}{run['b_min']:>8,}{run['superbatches']:>14}"
            f"{run['time_to_first_output_seconds']:>10.2f} s{run['wall_seconds']:>7.2f} s"
            f"{run['predicted_wall_seconds']:>9.2f} s{run['texts_per_second']:>9,.0f}"
        )

    yield ""
    yield f"{'SuperBatch':>10}{'texts':>9}{'encode':>10}{'worker':>10}"
    for each in document["superbatches"]:
        seconds = f"{each['encode_seconds']:>8.2f} s{each['busy_seconds']:>8.2f} s"
        yield f"{each['index']:>10}{each['texts']:>9,}{seconds}"

    yield ""
    yield f"{'signal':>10}{'at':>6}{'of texts':>10}{'computed':>10}{'published':>11}{'lost':>7}"
    for each in document["stopped"]:
        yield (
            f"{each['signal']:>10}{each['share']:>6.0%}{each['texts']:>10,}"
            f"{each['computed']:>10,}{each['published']:>11,}{each['lost']:>7,}"
        )


if __name__ == "__main__":
    sys.exit(main())
