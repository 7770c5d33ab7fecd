"""How long a run takes to find out that there is nothing to do: every output decided by its footer.

    python -m benchmarks.resume [--outputs 40000] [--objects 2000] [--rounds 5] [--quick]

Writes that many small output files into a temporary folder, then lets fresh processes list them and decide for each
partition whether it is fresh; nothing is remembered from one process to the next. Beside it stands the same with
pyarrow reading every footer in full. Then a bucket, served by a test server on this machine: the requests that a
process makes cold, without anything kept on disk, and warm, after another one. Prints a table and, as the last line of
standard output, one JSON document; docs/benchmarks.md says what the figures mean. The exit code is 1 when an output was
decided wrongly, and for nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.resume_bucket import measure_bucket
from benchmarks.resume_outputs import SPACE, Decided, decide_in, partition_key, partitions_of, write_outputs
from benchmarks.rounds import say
from benchmarks.targets import Target
from surge_dagster.engine.files.embedding_file import read_facts
from surge_dagster.engine.model.fingerprint import usable_cores
from surge_dagster.engine.output.freshness import file_name
from surge_dagster.engine.store import open_store

TARGET_OUTPUTS, TARGET_SECONDS = 40_000, 5.0
SIDES = ("footer's end", "whole footer")


def decide(folder: Path, outputs: int) -> Decided:
    """List the folder and decide for each partition, as a run does."""
    partitions = partitions_of(outputs)
    return decide_in(open_store(folder), partitions)


def decide_by_whole_footers(folder: Path, outputs: int) -> Decided:
    """The same with pyarrow reading every footer: what the engine's own way is compared with."""
    store = open_store(folder)
    cpu, begun = time.process_time(), time.perf_counter()
    names = {stored.name for stored in store.list(SPACE)}
    listed = time.perf_counter()
    counts = {"fresh": 0, "stale": 0, "missing": 0}
    for index in range(outputs):
        name = file_name(SPACE, partition_key(index))
        wanted = f"v{index}" if index % 10 else "moved"
        if name not in names:
            counts["missing"] += 1
        else:
            with store.open(name) as source:
                is_fresh = read_facts(pq.read_metadata(source)).source_version == wanted
            counts["fresh" if is_fresh else "stale"] += 1
    seconds = time.perf_counter() - begun
    return Decided(**counts, list_seconds=listed - begun, seconds=seconds, cpu_seconds=time.process_time() - cpu)


def measure(outputs: int, objects: int, rounds: int, seed: int) -> dict[str, Any]:
    """Write, decide in fresh processes, and give the document."""
    scratch = Path(tempfile.mkdtemp(prefix="surge-bench-"))
    samples: dict[str, list[Decided]] = {side: [] for side in SIDES}
    try:
        say(f"writing {outputs:,} outputs")
        write_outputs(scratch / "out", outputs, seed)
        for index in range(rounds):
            say(f"  round {index + 1} of {rounds}")
            for side in SIDES[:: -1 if index % 2 else 1]:  # neither always follows the other
                samples[side].append(_in_a_fresh_process(side, scratch / "out", outputs))
        write_outputs(scratch / "objects", objects, seed)
        bucket = measure_bucket(scratch / "objects", objects, rounds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    document: dict[str, Any] = {
        "benchmark": "resume",
        "machine": {"processor": _processor(), "cores": usable_cores(), "load": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "pyarrow": version("pyarrow")},
        "settings": {"outputs": outputs, "rounds": rounds, "seed": seed},
        "rows": [_row(side, found, outputs) for side, found in samples.items()],
        "bucket": bucket,
    }
    ours, theirs = ([one.seconds for one in samples[side]] for side in SIDES)
    document["speedup"] = statistics.median(slow / fast for fast, slow in zip(ours, theirs, strict=True))
    return document | {"targets": [aim.as_dict() for aim in targets(document)]}


def targets(document: dict[str, Any]) -> list[Target]:
    """The aim beside what was measured."""
    row, bucket = document["rows"][0], document["bucket"]
    asked = document["settings"]["outputs"] == TARGET_OUTPUTS
    name = f"seconds to decide {TARGET_OUTPUTS:,} outputs by their footers"
    note = f"{document['settings']['outputs']:,} outputs"
    objects = f"{bucket['objects']:,} objects"
    return [
        Target(name, TARGET_SECONDS, row["seconds"] if asked else None, at_least=False, note=note),
        Target("reads per object of a bucket, cold", 1.0, bucket["cold"]["reads"] / bucket["objects"], False, objects),
        Target("reads of objects of a bucket, warm", 0.0, bucket["warm"]["reads"], at_least=False, note=objects),
    ]


def decided_wrongly(document: dict[str, Any]) -> bool:
    """Whether any output counted as what it is not."""
    bucket = document["bucket"]
    found = [(row["decided"], document["settings"]["outputs"]) for row in document["rows"]]
    found += [(bucket[side]["decided"], bucket["objects"]) for side in ("cold", "warm")]
    return any(
        decided != {"fresh": outputs - -(-outputs // 10), "stale": -(-outputs // 10), "missing": 0}
        for decided, outputs in found
    )


def lines(document: dict[str, Any]) -> Iterator[str]:
    """The document for people."""
    machine, chosen = document["machine"], document["settings"]
    yield f"{machine['processor']}, {machine['cores']} cores, load {machine['load']:.1f}"
    yield f"{chosen['outputs']:,} outputs on local disk, a fresh process each, median of {chosen['rounds']} rounds"
    yield f"{'':24}{'seconds':>9}{'rounds':>16}{'CPU seconds':>13}{'listing':>9}{'µs each':>9}"
    for row in document["rows"]:
        spread = f"{min(row['all_seconds']):.2f}-{max(row['all_seconds']):.2f}"
        yield (
            f"{row['side']:24}{row['seconds']:>9.2f}{spread:>16}{row['cpu_seconds']:>13.2f}"
            f"{row['list_seconds']:>9.2f}{row['microseconds_each']:>9.1f}"
        )
    yield f"the footer's end alone is {document['speedup']:.2f} times as fast"
    bucket = document["bucket"]
    yield f"{bucket['objects']:,} objects in a bucket on this machine, a fresh process each"
    yield f"{'':24}{'seconds':>9}{'CPU seconds':>13}{'listings':>10}{'reads':>8}"
    for side in ("cold", "warm"):
        row = bucket[side]
        yield f"{side:24}{row['seconds']:>9.2f}{row['cpu_seconds']:>13.2f}{row['listings']:>10}{row['reads']:>8,}"
    for aim in targets(document):
        measured = "-" if aim.measured is None else f"{aim.measured:,.2f}"
        verdict = {True: "met", False: "missed", None: f"not measured here: {aim.note}"}[aim.met]
        yield f"{aim.name:58}{f'<= {aim.target:,g}':>12}{measured:>12}  {verdict}"


def _row(side: str, found: list[Decided], outputs: int) -> dict[str, Any]:
    seconds = statistics.median(one.seconds for one in found)
    return {
        "side": side,
        "seconds": seconds,
        "all_seconds": [one.seconds for one in found],
        "cpu_seconds": statistics.median(one.cpu_seconds for one in found),
        "list_seconds": statistics.median(one.list_seconds for one in found),
        "microseconds_each": seconds / outputs * 1e6,
        "decided": {name: getattr(found[0], name) for name in ("fresh", "stale", "missing")},
    }


def _processor() -> str:
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in facts if line.startswith("model name")), "unknown")


def _in_a_fresh_process(side: str, folder: Path, outputs: int) -> Decided:
    command = [sys.executable, "-m", "benchmarks.resume", "--outputs", str(outputs), "--decide", side, str(folder)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Decided(**json.loads(found.stdout))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--outputs", type=int, help=f"files to decide ({TARGET_OUTPUTS:,})")
    add("--objects", type=int, help="objects in the bucket (2,000)")
    add("--rounds", type=int, help="fresh processes per side (5)")
    add("--seed", type=int, default=0, help="of the files' sizes")
    add("--quick", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    add("--decide", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    arguments.outputs = arguments.outputs or (200 if arguments.quick else TARGET_OUTPUTS)
    arguments.objects = arguments.objects or (50 if arguments.quick else 2000)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 5)
    return arguments


def main() -> None:
    """Parse, measure, print."""
    arguments = parse()
    if arguments.decide:
        side, folder = arguments.decide
        work = decide if side == SIDES[0] else decide_by_whole_footers
        print(json.dumps(asdict(work(Path(folder), arguments.outputs))))
        return
    document = measure(arguments.outputs, arguments.objects, arguments.rounds, arguments.seed)
    print("\n".join(lines(document)))
    print(json.dumps(document))
    sys.exit(1 if decided_wrongly(document) else 0)


if __name__ == "__main__":
    main()
