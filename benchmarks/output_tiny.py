"""Tens of thousands of partitions of ten texts: does their number show in a run's time?

Two answers. On tmpfs, partitions per second from the aggregator to the published file, with an encoder that takes no
time. On a disk, the same beside a bare loop that writes the same bytes under the same names: temp file, write, fsync,
rename, by one thread and by as many as the publisher has; the faster of the two loops counts.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.output_runs import embed, paced_pool, ready_partitions
from benchmarks.rounds import say
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.store.local_store import LocalStore

DIMENSION = 384
TEXTS = 10
THREADS = 8  # the publisher's own number with one worker


def tiny_document(partitions: int, rounds: int, memory: Path, disk: Path) -> dict[str, Any]:
    """Partitions per second of both folders' runs and of the loops; ratios are within a round."""
    source = ready_partitions(partitions, TEXTS)
    with paced_pool(DIMENSION) as pool:
        run_on_disk = _runs(pool, source, disk / "tiny")
        run_in_memory = _runs(pool, source, memory / "tiny")
        run_in_memory()
        files = _files(memory / "tiny")
        sides: dict[str, Callable[[], float]] = {
            "run on tmpfs": run_in_memory,
            "run on disk": run_on_disk,
            f"loop on disk, {THREADS} threads": lambda: _loop(files, disk / "loop", THREADS),
            "loop on disk, 1 thread": lambda: _loop(files, disk / "loop", 1),
            f"loop on tmpfs, {THREADS} threads": lambda: _loop(files, memory / "loop", THREADS),
        }
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for index in range(rounds):
            say(f"  round {index + 1} of {rounds}")
            order = list(sides)
            for name in order if index % 2 == 0 else reversed(order):
                rates[name].append(sides[name]())
    for folder in (memory, disk):
        shutil.rmtree(folder / "tiny", ignore_errors=True)
    on_disk = [found for name, found in rates.items() if name.startswith("loop on disk")]
    loops = [max(pair) for pair in zip(*on_disk, strict=True)]
    return {
        "partitions": partitions,
        "texts_per_partition": TEXTS,
        "file_bytes": statistics.median(map(len, files.values())),
        "rounds": rounds,
        "partitions_per_second": {name: statistics.median(found) for name, found in rates.items()},
        "ratio_to_loop": _median_ratio(rates["run on disk"], loops),
        "ratio_to_loop_of_one_thread": _median_ratio(rates["run on disk"], rates["loop on disk, 1 thread"]),
    }


def _median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _runs(pool: EncoderPool, source: list[Any], output: Path) -> Callable[[], float]:
    def run() -> float:
        shutil.rmtree(output, ignore_errors=True)
        report = embed(pool, source, LocalStore(output), publish_threads=THREADS)
        return report.partitions_written / report.wall_seconds

    return run


def _files(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(output.glob("*/*.parquet"))}


def _loop(files: dict[str, bytes], folder: Path, threads: int) -> float:
    """Files per second; the folder is flushed once, at the end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    names = list(files)
    begun = perf_counter()
    with ThreadPoolExecutor(threads) as lanes:
        list(lanes.map(lambda lane: _write(files, names[lane::threads], str(folder)), range(threads)))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    seconds = perf_counter() - begun
    os.close(descriptor)
    shutil.rmtree(folder)
    return len(files) / seconds


def _write(files: dict[str, bytes], names: list[str], folder: str) -> None:
    for name in names:
        temp = f"{folder}/.{name}"
        descriptor = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        os.write(descriptor, files[name])
        os.fsync(descriptor)
        os.close(descriptor)
        os.rename(temp, f"{folder}/{name}")  # noqa: PTH104
