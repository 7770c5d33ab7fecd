"""How long a run takes to find out that there is nothing to do.

    python -m benchmarks.resume [--outputs 40000] [--rounds 5] [--quick]

Writes small output files into a temporary folder and lets fresh processes list them and decide for each partition
whether it is fresh, by the facts in the file's footer. Exits with 1 when a decision was wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.harness import Document, Target, at_most, print_document, say, start_document
from surge_dagster.engine.files.facts import FileFacts, desired_version
from surge_dagster.engine.files.formats import file_name, new_writer
from surge_dagster.engine.files.rows import schema
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import open_store
from surge_dagster.engine.support.text_hash import text_hashes

TARGET_OUTPUTS, TARGET_SECONDS = 40_000, 5.0
_SECONDS = ("seconds", "cpu_seconds", "list_seconds")
SPACE = "bench-000000000000"
_DIMENSION = 384


@dataclass(frozen=True, slots=True)
class Decided:
    """The decisions of one process; `list_seconds` is the part of `seconds` spent in listing."""

    fresh: int
    stale: int
    missing: int
    list_seconds: float
    seconds: float
    cpu_seconds: float


def measure(arguments: argparse.Namespace) -> Document:
    """Write outputs, decide in fresh processes, and give the document."""
    document = start_document("resume", arguments, ("pyarrow",))
    found = []
    with tempfile.TemporaryDirectory(prefix="surge-bench-") as folder:
        say(f"writing {arguments.outputs:,} outputs")
        write_outputs(Path(folder), arguments.outputs, arguments.seed)
        for index in range(arguments.rounds):
            say(f"  round {index + 1} of {arguments.rounds}")
            found.append(_decide_in_fresh_process(folder, arguments.outputs))
    medians = {name: statistics.median(one[name] for one in found) for name in _SECONDS}
    decided = {name: found[0][name] for name in ("fresh", "stale", "missing")}
    return document | medians | {"outputs": arguments.outputs, "decided": decided, "rounds": found}


def targets(document: Document) -> list[Target]:
    """The aim beside what was measured."""
    seconds = document["seconds"] if document["outputs"] == TARGET_OUTPUTS else None
    name = f"seconds to decide {TARGET_OUTPUTS:,} outputs by their footers"
    return [at_most(name, TARGET_SECONDS, seconds, note=f"{document['outputs']:,} outputs")]


def decided_wrongly(document: Document) -> bool:
    """Whether the processes counted an output as what it is not; every tenth one is stale."""
    stale = -(-document["outputs"] // 10)
    return document["decided"] != {"fresh": document["outputs"] - stale, "stale": stale, "missing": 0}


def lines(document: Document) -> Iterator[str]:
    """The table."""
    seconds = [one["seconds"] for one in document["rounds"]]
    yield f"{document['outputs']:,} outputs on local disk, a fresh process each"
    yield f"{'seconds':>9}{'rounds':>16}{'CPU seconds':>13}{'listing':>9}"
    spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
    yield (f"{document['seconds']:>9.2f}{spread:>16}{document['cpu_seconds']:>13.2f}{document['list_seconds']:>9.2f}")


def write_outputs(folder: Path, outputs: int, seed: int) -> None:
    """Write valid output files of one to eight rows."""
    random = np.random.default_rng(seed)
    rows = random.integers(1, 9, outputs)
    matrix = random.standard_normal((8, _DIMENSION)).astype(np.float32)
    ids = pa.array([f"id-{row}" for row in range(8)])
    texts = pa.array([f"a short text, number {row} of this partition" for row in range(8)], pa.large_string())
    columns = schema(ids.type, _DIMENSION, "float32", include_text=True)
    (folder / SPACE).mkdir(parents=True)
    for index, count in enumerate(rows.tolist()):
        key, digest = _key(index), f"{index:032x}"
        version = desired_version(digest, SPACE)
        facts = FileFacts(key, SPACE, "bench", "fp32", f"v{index}", digest, version, count, _DIMENSION, 0)
        with (
            pa.OSFile(str(folder / file_name(SPACE, key)), "wb") as sink,
            new_writer("parquet", sink, columns, facts) as writer,
        ):
            writer.append(ids[:count], texts[:count], text_hashes(texts[:count]), matrix[:count])  # pyright: ignore[reportArgumentType]
            writer.close()


def decide(folder: str, outputs: int) -> Decided:
    """List an output and decide for each partition, as a run does; every tenth source has changed."""
    store = open_store(folder)
    partitions = [
        Partition(_key(index), f"v{index}" if index % 10 else "moved", lambda: iter(()), lambda: None)
        for index in range(outputs)
    ]
    cpu, begun = time.process_time(), time.perf_counter()
    state = OutputState(store, SPACE)
    listed = time.perf_counter()
    found = [state.freshness(partition).status for partition in state.looked_at(partitions)]
    ended = time.perf_counter()
    counts = {name: found.count(name) for name in ("fresh", "stale", "missing")}
    return Decided(**counts, list_seconds=listed - begun, seconds=ended - begun, cpu_seconds=time.process_time() - cpu)


def _decide_in_fresh_process(folder: str, outputs: int) -> Document:
    command = [sys.executable, "-m", "benchmarks.resume", "--outputs", str(outputs), "--decide", folder]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _key(index: int) -> str:
    return f"category {index:05d}"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    quick = parser.parse_known_args(words)[0].quick
    add("--outputs", type=int, default=200 if quick else TARGET_OUTPUTS, help=f"files to decide ({TARGET_OUTPUTS:,})")
    add("--rounds", type=int, default=1 if quick else 5, help="fresh processes (5)")
    add("--seed", type=int, default=0, help="of the files' sizes")
    add("--decide", metavar="FOLDER", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    """Parse, measure, print."""
    arguments = parse()
    if arguments.decide:
        print(json.dumps(asdict(decide(arguments.decide, arguments.outputs))))
        return
    document = measure(arguments)
    print_document(document, lines(document), targets(document))
    sys.exit(1 if decided_wrongly(document) else 0)


if __name__ == "__main__":
    main()
