"""Table 8: the paper's naive way to make an Arrow table of a matrix, beside this engine's file writer.

The naive way makes a Python list of floats of every row (listing 1). Both end with a Parquet file in main memory.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.evaluation.metering import Meter
from benchmarks.harness import say
from benchmarks.output_files import one_file, write_one


@dataclass(frozen=True, slots=True)
class Serialized:
    """Seconds, and megabytes beside the matrix, for a file of so many rows."""

    rows: int
    naive_seconds: float
    seconds: float
    naive_mb: float
    mb: float


def serialization(sizes: Sequence[int]) -> Iterator[Serialized]:
    """Both ways, each in a process of its own."""
    for rows in sizes:
        say(f"  {rows:,} rows")
        (naive_seconds, naive_mb), (seconds, mb) = (_in_own_process(rows, naive) for naive in (True, False))
        yield Serialized(rows, naive_seconds, seconds, naive_mb, mb)


def _in_own_process(rows: int, naive: bool) -> tuple[float, float]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(_measured, rows, naive).result()


def _measured(rows: int, naive: bool) -> tuple[float, float]:
    ids, texts, matrix = one_file(rows)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "one.parquet"
        write_one(path, ids[:10], texts[:10], matrix[:10])  # loads code and codecs
        with Meter() as meter:
            begun = time.perf_counter()
            if naive:
                lists = [row.tolist() for row in matrix]
                pq.write_table(pa.table({"id": ids, "text": texts, "embedding": lists}), path)
            else:
                write_one(path, ids, texts, matrix)
            seconds = time.perf_counter() - begun
        return seconds, meter.grown_bytes / 1e6
