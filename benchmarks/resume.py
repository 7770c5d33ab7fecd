"""How long a run takes to find out that there is nothing to do.

    python -m benchmarks.resume [--outputs 40000] [--rounds 5] [--quick]

Writes small output files into a temporary folder and lets fresh processes list them and decide for
each partition whether it is fresh, by the facts in the file's footer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness import (
    Document,
    Options,
    Target,
    at_most,
    in_own_process,
    print_document,
    say,
    start_document,
    temporary_folder,
)
from benchmarks.output import write_output
from surge_dagster import open_store
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.sources.partition import Partition

_TARGET_OUTPUTS = 40_000
_TARGET_SECONDS = 5.0
_STALE_STRIDE = 10
_SPACE = "bench-000000000000"
_DIMENSION = 384


def write_outputs(folder: Path, outputs: int) -> None:
    """Write valid output files of one to eight rows."""
    random = np.random.default_rng(0)
    rows = random.integers(1, 9, outputs)
    matrix = random.standard_normal((8, _DIMENSION)).astype(np.float32)
    ids = pa.array([f"id-{row}" for row in range(8)])
    drawn = [f"a short text, number {row} of this partition" for row in range(8)]
    texts: Any = pa.array(drawn, pa.large_string())
    (folder / _SPACE).mkdir()
    for index, count in enumerate(rows.tolist()):
        key = _key(index)
        write_output(
            folder / file_name(_SPACE, key),
            ids[:count],
            texts[:count],
            matrix[:count],
            key=key,
            space=_SPACE,
            source_version=f"v{index}",
            digest=f"{index:032x}",
        )


def decide(folder: Path, outputs: int) -> Document:
    """List an output and decide for each partition, as a run does; every tenth source has
    changed."""
    store = open_store(folder)
    partitions = []
    for index in range(outputs):
        version = f"v{index}" if index % _STALE_STRIDE else "moved"
        partitions.append(Partition(_key(index), version, lambda: iter(()), lambda: None))

    begun = time.perf_counter()
    state = OutputState(store, _SPACE)
    statuses = [state.freshness(partition).status for partition in state.looked_at(partitions)]
    seconds = time.perf_counter() - begun
    stale = statuses.count("stale")
    if stale != -(-outputs // _STALE_STRIDE) or statuses.count("fresh") != outputs - stale:
        raise RuntimeError(f"{stale} of {outputs} outputs were found to be stale")
    return {"seconds": seconds, "stale": stale}


def _key(index: int) -> str:
    return f"category {index:05d}"


def lines(document: Document) -> Iterator[str]:
    """Yield the table."""
    yield f"{document['outputs']:,} outputs on local disk, a fresh process each"
    seconds = [decided["seconds"] for decided in document["rounds"]]
    yield f"{median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f}"


def targets(document: Document) -> Iterator[Target]:
    """Yield the aim, which is for 40,000 outputs."""
    outputs = document["outputs"]
    seconds = None
    if outputs == _TARGET_OUTPUTS:
        seconds = median(decided["seconds"] for decided in document["rounds"])
    name = f"seconds to decide {_TARGET_OUTPUTS:,} outputs by their footers"
    yield at_most(name, _TARGET_SECONDS, seconds, note=f"{outputs:,} outputs")


def main() -> None:
    options = Options(__doc__)
    options.add_size("--outputs", _TARGET_OUTPUTS, 200, "files to decide")
    options.add_size("--rounds", 5, 1, "fresh processes")
    arguments = options.parse_args()
    outputs = arguments.outputs
    document = start_document("resume", arguments, ["pyarrow"])
    with temporary_folder() as folder:
        say(f"writing {outputs:,} outputs")
        write_outputs(folder, outputs)
        rounds = [in_own_process(decide, folder, outputs) for _ in range(arguments.rounds)]
    document |= {"outputs": outputs, "rounds": rounds}
    print_document(document, lines, targets)


if __name__ == "__main__":
    main()
