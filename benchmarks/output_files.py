"""Writing files: one of many rows, and tens of thousands of ten rows each.

*serialization* writes a matrix of 384 columns with ids and texts through the engine's file writer, to tmpfs and to a
disk, beside a copy of the same bytes in memory and a bare write of them to the same disk. *tiny* embeds partitions of
ten texts that lie ready in memory with an encoder that takes no time, so what counts is the path from the aggregator
to the published file. Beside it a loop writes the same bytes under the same names (temp file, write, fsync, rename).
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa

from benchmarks.harness import Document, Target, at_most, say
from benchmarks.paced_runs import DIMENSION, embed, paced_pool, ready_partitions
from surge_dagster.catalogs.synthetic import draw_texts
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.formats import new_writer
from surge_dagster.engine.files.rows import schema
from surge_dagster.engine.files.validation import invalid_row
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.support.text_hash import text_hashes

TEXTS = 10
THREADS = 4  # of the publisher on a local disk
_RATES = ("tmpfs", "disk", "raw_write", "memcpy")


def serialization_document(sizes: list[int], rounds: int, memory: Path, disk: Path) -> list[Document]:
    """Median seconds for each number of rows."""
    return [_serialize(rows, rounds, memory / "one.parquet", disk / "one.parquet") for rows in sizes]


def serialization_lines(sizes: list[Document]) -> Iterator[str]:
    """The table."""
    yield ""
    yield f"{'serialization, MB/s':20}{'tmpfs':>10}{'disk':>10}{'raw disk':>10}{'memcpy':>10}{'checks':>10}"
    for size in sizes:
        rates = [f"{size['matrix_bytes'] / 1e6 / size[f'{name}_seconds']:>10,.0f}" for name in _RATES]
        yield f"{size['rows']:>15,} rows{''.join(rates)}{size['validation_share']:>10.1%}"


def serialization_targets(sizes: list[Document]) -> Iterator[Target]:
    """The aims of the scenario."""
    for size in sizes:
        yield at_most(f"{size['rows']:,} rows, checks before writing, share", 0.05, size["validation_share"])


def tiny_document(partitions: int, rounds: int, memory: Path, disk: Path) -> Document:
    """Partitions per second of runs and of bare loops, by turns."""
    source = ready_partitions(partitions, TEXTS)
    with paced_pool() as pool:

        def run(folder: Path) -> float:
            shutil.rmtree(folder, ignore_errors=True)
            report = embed(pool, source, LocalStore(folder))
            return report.partitions_written / report.wall_seconds

        run(memory / "tiny")  # warms up, and leaves the files for the loops
        files = {path.name: path.read_bytes() for path in (memory / "tiny").glob("*/*.parquet")}
        sides: dict[str, Callable[[], float]] = {
            "run on tmpfs": lambda: run(memory / "tiny"),
            "run on disk": lambda: run(disk / "tiny"),
            f"loop on disk, {THREADS} threads": lambda: _loop(files, disk / "loop", THREADS),
            "loop on disk, 1 thread": lambda: _loop(files, disk / "loop", 1),
        }
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for index in range(rounds):
            say(f"  round {index + 1} of {rounds}")
            for name in list(sides)[:: -1 if index % 2 else 1]:
                rates[name].append(sides[name]())
    return {
        "partitions": partitions,
        "texts_per_partition": TEXTS,
        "file_bytes": statistics.median(map(len, files.values())),
        "rounds": rounds,
        "partitions_per_second": {name: statistics.median(found) for name, found in rates.items()},
    }


def tiny_lines(found: Document) -> Iterator[str]:
    """The table."""
    yield ""
    yield (
        f"{found['partitions']:,} partitions of {found['texts_per_partition']} texts, files of "
        f"{found['file_bytes']:,.0f} bytes, median of {found['rounds']} rounds"
    )
    for name, rate in found["partitions_per_second"].items():
        yield f"{name:32}{rate:>10,.0f} per second"


def _serialize(rows: int, rounds: int, in_memory: Path, on_disk: Path) -> Document:
    say(f"  {rows:,} rows")
    ids, texts, matrix = one_file(rows)
    copy = np.ones_like(matrix)  # its pages exist before the copy is timed
    write_one(in_memory, ids[:10], texts[:10], matrix[:10])  # loads code and codecs
    turns: dict[str, list[float]] = {name: [] for name in (*_RATES, "validation")}
    for _ in range(rounds):
        turns["tmpfs"].append(_seconds(lambda: write_one(in_memory, ids, texts, matrix)))
        turns["disk"].append(_seconds(lambda: (write_one(on_disk, ids, texts, matrix), _flush(on_disk))))
        turns["raw_write"].append(_seconds(lambda: (matrix.tofile(on_disk), _flush(on_disk))))
        turns["memcpy"].append(_seconds(lambda: np.copyto(copy, matrix)))
        turns["validation"].append(_seconds(lambda: invalid_row(matrix, normalized=True)))
    in_memory.unlink()
    on_disk.unlink()
    shares = (checks / whole for checks, whole in zip(turns["validation"], turns["tmpfs"], strict=True))
    return {
        "rows": rows,
        "matrix_bytes": matrix.nbytes,
        "rounds": rounds,
        "validation_share": statistics.median(shares),
        **{f"{name}_seconds": statistics.median(found) for name, found in turns.items()},
    }


def one_file(rows: int) -> tuple[pa.Array, pa.LargeStringArray, np.ndarray]:
    """The ids, texts and unit vectors of a file."""
    matrix = np.random.default_rng(0).standard_normal((rows, DIMENSION), np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    texts = draw_texts(0, 1, np.arange(rows, dtype=np.uint64)).cast(pa.large_string())
    return pa.array(np.arange(rows)).cast(pa.string()), texts, matrix  # pyright: ignore[reportReturnType]


def write_one(path: Path, ids: pa.Array, texts: pa.Array, matrix: np.ndarray) -> None:
    """Write a file of these rows through the engine's writer."""
    facts = FileFacts("all", "space", "model", "fp32", "v1", "0" * 32, "0" * 32, len(matrix), DIMENSION, 0)
    columns = schema(pa.string(), DIMENSION, "float32", include_text=True)
    with (
        pa.OSFile(str(path), "wb") as sink,
        new_writer("parquet", sink, columns, facts) as writer,
    ):
        writer.append(ids, texts, text_hashes(texts), matrix)
        writer.close()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _seconds(work: Callable[[], object]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun


def _loop(files: dict[str, bytes], folder: Path, threads: int) -> float:
    """Write the files as bytes; gives files per second, with one flush of the folder at the end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    names = list(files)
    begun = perf_counter()
    with ThreadPoolExecutor(threads) as lanes:
        list(lanes.map(lambda lane: _write_bytes(files, names[lane::threads], str(folder)), range(threads)))
    _flush(folder)
    seconds = perf_counter() - begun
    shutil.rmtree(folder)
    return len(files) / seconds


def _write_bytes(files: dict[str, bytes], names: list[str], folder: str) -> None:
    for name in names:
        temp = f"{folder}/.{name}"
        descriptor = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        os.write(descriptor, files[name])
        os.fsync(descriptor)
        os.close(descriptor)
        os.rename(temp, f"{folder}/{name}")  # noqa: PTH104
