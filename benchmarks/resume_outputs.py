"""The outputs that are decided, and how: what the scenarios of `resume.py` share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from surge_dagster.engine.files.embedding_file import EmbeddingFileWriter, FileFacts, desired_version
from surge_dagster.engine.output.freshness import OutputState, file_name
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store

SPACE = "bench-000000000000"
_DIMENSION = 384


@dataclass(frozen=True, slots=True)
class Decided:
    """One process's decisions.

    Attributes:
        list_seconds: of the listing alone; contained in `seconds`.
        cpu_seconds: of the process while it decided. Far less than `seconds`: others were using the machine.
    """

    fresh: int
    stale: int
    missing: int
    list_seconds: float
    seconds: float
    cpu_seconds: float


def write_outputs(folder: Path, outputs: int, seed: int) -> None:
    """Write small output files, of one to eight rows, that are complete and valid."""
    random = np.random.default_rng(seed)
    rows = random.integers(1, 9, outputs)
    matrix = random.standard_normal((8, _DIMENSION)).astype(np.float32)
    ids = pa.array([f"id-{row}" for row in range(8)])
    texts = pa.array([f"a short text, number {row} of this partition" for row in range(8)], pa.large_string())
    (folder / SPACE).mkdir(parents=True)
    for index, count in enumerate(rows.tolist()):
        key, digest = partition_key(index), f"{index:032x}"
        facts = FileFacts(
            *(key, SPACE, "bench", "fp32", f"v{index}", digest),
            *(desired_version(digest, SPACE), count, _DIMENSION, 0),
        )
        with (
            pa.OSFile(str(folder / file_name(SPACE, key)), "wb") as sink,
            EmbeddingFileWriter(sink, ids.type, _DIMENSION, "float32", include_text=True) as writer,
        ):
            writer.append(ids[:count], texts[:count], matrix[:count])  # pyright: ignore[reportArgumentType]
            writer.close(facts)


def partition_key(index: int) -> str:
    """The key of an output."""
    return f"category {index:05d}"


def partitions_of(outputs: int) -> list[Partition]:
    """The source of the outputs; every tenth partition of it has changed."""
    return [
        Partition(partition_key(index), f"v{index}" if index % 10 else "moved", lambda: iter(()), lambda: None)
        for index in range(outputs)
    ]


def decide_in(store: Store, partitions: list[Partition]) -> Decided:
    """List an output and decide for each of these partitions, as a run does."""
    cpu, begun = time.process_time(), time.perf_counter()
    state = OutputState(store, SPACE)
    listed = time.perf_counter()
    found = [state.status(partition) for partition in state.looked_at(partitions)]
    ended = time.perf_counter()
    counts = {name: found.count(name) for name in ("fresh", "stale", "missing")}
    return Decided(**counts, list_seconds=listed - begun, seconds=ended - begun, cpu_seconds=time.process_time() - cpu)
