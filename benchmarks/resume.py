"""How long a run takes to find out that there is nothing to do.

    python -m benchmarks.resume [--outputs 40000] [--rounds 5] [--quick]

Writes small output files into a temporary folder and lets fresh processes list them and decide for
each partition whether it is fresh, by the facts in the file's footer. Exits with 1 when a decision
was wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.harness import (
    Document,
    Target,
    add_quick,
    at_most,
    command_line,
    in_own_process,
    print_document,
    say,
    start_document,
)
from benchmarks.output import write_output
from surge_dagster.engine.files.facts import FileFacts, desired_version
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import open_store

TARGET_OUTPUTS, TARGET_SECONDS = 40_000, 5.0
_SECONDS = ("seconds", "cpu_seconds", "list_seconds")
SPACE = "bench-000000000000"
_DIMENSION = 384


def measure(arguments: argparse.Namespace) -> Document:
    """Write outputs, decide in fresh processes, and give the document."""
    document = start_document("resume", arguments, ("pyarrow",))
    rounds: list[Document] = []
    with tempfile.TemporaryDirectory(prefix="surge-bench-") as folder:
        say(f"writing {arguments.outputs:,} outputs")
        write_outputs(Path(folder), arguments.outputs, arguments.seed)
        for index in range(arguments.rounds):
            say(f"  round {index + 1} of {arguments.rounds}")
            rounds.append(
                in_own_process(
                    "benchmarks.resume", "--outputs", arguments.outputs, "--decide", folder
                )
            )
    medians = {name: statistics.median(decided[name] for decided in rounds) for name in _SECONDS}
    decided = {name: rounds[0][name] for name in ("fresh", "stale", "missing")}
    return document | medians | {"outputs": arguments.outputs, "decided": decided, "rounds": rounds}


def targets(document: Document) -> list[Target]:
    seconds = document["seconds"] if document["outputs"] == TARGET_OUTPUTS else None
    name = f"seconds to decide {TARGET_OUTPUTS:,} outputs by their footers"
    return [at_most(name, TARGET_SECONDS, seconds, note=f"{document['outputs']:,} outputs")]


def decided_wrongly(document: Document) -> bool:
    """Whether the processes counted an output as what it is not; every tenth one is stale."""
    stale = -(-document["outputs"] // 10)
    return document["decided"] != {
        "fresh": document["outputs"] - stale,
        "stale": stale,
        "missing": 0,
    }


def lines(document: Document) -> Iterator[str]:
    seconds = [decided["seconds"] for decided in document["rounds"]]
    yield f"{document['outputs']:,} outputs on local disk, a fresh process each"
    yield f"{'seconds':>9}{'rounds':>16}{'CPU seconds':>13}{'listing':>9}"
    spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
    yield (
        f"{document['seconds']:>9.2f}{spread:>16}{document['cpu_seconds']:>13.2f}{document['list_seconds']:>9.2f}"
    )


def write_outputs(folder: Path, outputs: int, seed: int) -> None:
    """Write valid output files of one to eight rows."""
    random = np.random.default_rng(seed)
    rows = random.integers(1, 9, outputs)
    matrix = random.standard_normal((8, _DIMENSION)).astype(np.float32)
    ids = pa.array([f"id-{row}" for row in range(8)])
    texts = pa.array(
        [f"a short text, number {row} of this partition" for row in range(8)], pa.large_string()
    )
    (folder / SPACE).mkdir(parents=True)
    for index, count in enumerate(rows.tolist()):
        key, digest = _key(index), f"{index:032x}"
        version = desired_version(digest, SPACE)
        facts = FileFacts(
            key, SPACE, "bench", "fp32", f"v{index}", digest, version, count, _DIMENSION, 0
        )
        write_output(
            folder / file_name(SPACE, key), facts, ids[:count], texts[:count], matrix[:count]
        )  # pyright: ignore[reportArgumentType]


def decide(folder: str, outputs: int) -> Document:
    """List an output and decide for each partition, as a run does; every tenth source has changed.

    `list_seconds` is the part of `seconds` spent in listing.
    """
    store = open_store(folder)
    partitions = [
        Partition(
            _key(index), f"v{index}" if index % 10 else "moved", lambda: iter(()), lambda: None
        )
        for index in range(outputs)
    ]
    cpu, begun = time.process_time(), time.perf_counter()
    state = OutputState(store, SPACE)
    listed = time.perf_counter()
    statuses = [state.freshness(partition).status for partition in state.looked_at(partitions)]
    seconds = {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - cpu,
        "list_seconds": listed - begun,
    }
    return {status: statuses.count(status) for status in ("fresh", "stale", "missing")} | seconds


def _key(index: int) -> str:
    return f"category {index:05d}"


def main() -> None:
    parser = command_line(__doc__)
    add, quick = parser.add_argument, add_quick(parser)
    add(
        "--outputs",
        type=int,
        default=200 if quick else TARGET_OUTPUTS,
        help=f"files to decide ({TARGET_OUTPUTS:,})",
    )
    add("--rounds", type=int, default=1 if quick else 5, help="fresh processes (5)")
    add("--seed", type=int, default=0, help="of the files' sizes")
    add("--decide", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.decide:
        print(json.dumps(decide(arguments.decide, arguments.outputs)))
        return
    document = measure(arguments)
    print_document(document, lines(document), targets(document))
    sys.exit(1 if decided_wrongly(document) else 0)


if __name__ == "__main__":
    main()
