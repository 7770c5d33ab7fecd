"""The path from vectors to files: writing files, and the bound on memory.

    python -m benchmarks.output [--scenarios serialization,tiny,bound] [--quick]

- serialization: a matrix of 384 columns with ids and texts through the engine's file writer, to
  tmpfs and to a disk, beside a copy of the same bytes in memory and a bare write of them to the
  same disk.
- tiny: partitions of ten texts that lie ready in memory, with an encoder that takes no time, so
  what counts is the path from the aggregator to the published file. Beside it a loop writes the
  same bytes under the same names.
- bound: the ledger stays within its limit for any input, and the process's memory follows the
  ledger. Each case is a run in a process of its own: one huge partition before, amid and after
  thousands of small ones, texts of 1 MB, a store that stalls, and under a smaller limit Parquet
  files: texts of 1 MB in row groups that fit, the same in one row group that is refused, a few that
  stand together among many short ones, and files that hold gigabytes in some kilobytes, as strings
  and as a column of a dictionary type. Memory is that of the process and its worker beyond what
  they held before the run (shared pages counted once). The ledger counts data, not Python's own
  objects; hence the allowance of 300 MB, which files do not get.

Prints a table and, as the last line of standard output, one JSON document.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import (
    Document,
    Scenarios,
    Target,
    add_quick,
    at_most,
    command_line,
    in_own_process,
    names_of,
    numbers,
    print_scenarios,
    say,
    seconds_of,
    start_document,
)
from benchmarks.paced_runs import DIMENSION, drawn_partitions, embed, paced_pool, ready_partitions
from benchmarks.synthetic import draw_texts
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.formats import new_writer
from surge_dagster.engine.files.rows import FileRows, schema
from surge_dagster.engine.files.validation import invalid_row
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.store import Upload
from surge_dagster.engine.support.process_memory import MemoryGauge
from surge_dagster.engine.support.text_hash import text_hashes
from surge_dagster.engine.tables.opening import open_source

_RATES = ("tmpfs", "disk", "raw_write", "memcpy")
_TINY_TEXTS = 10
_THREADS = 4  # of the publisher on a local disk
_LIMIT, _FILES_LIMIT, _ALLOWANCE = 1024**3, 250_000_000, 300_000_000
_FILES = {  # rows of a whole run, rows of a row group
    "row groups that fit": (600, 20),
    "a row group that is refused": (600, 600),
    "long texts among short ones": (40_000, 40_000),
    "rows that share a text": (3_000, 3_000),
    "a categorical column": (500, 500),
}
CASES = (
    "largest first",
    "largest in the middle",
    "largest last",
    "texts of 1 MB",
    *_FILES,
    "a store that stalls",
)
_SMALL_TEXTS = 100
_MEGABYTE = 1_000_000
_THRESHOLDS = Thresholds(b_min=20_000, b_max=100_000)


def measure(arguments: argparse.Namespace) -> Document:
    """Run the requested scenarios and give the document."""
    document = start_document("output", arguments, ("pyarrow", "numpy"))
    with (
        tempfile.TemporaryDirectory(prefix="surge-bench-", dir=arguments.memory_folder) as memory,
        tempfile.TemporaryDirectory(prefix="surge-bench-", dir=arguments.disk_folder) as disk,
    ):
        folders = Path(memory), Path(disk)
        measures: dict[str, Callable[[], object]] = {
            "serialization": lambda: [
                _serialize(int(rows), arguments.rounds, *folders) for rows in arguments.rows
            ],
            "tiny": lambda: _tiny(arguments.tiny_partitions, arguments.rounds, *folders),
            "bound": lambda: _bound(arguments, folders[1]),
        }
        for scenario in arguments.scenarios:
            say(scenario)
            document[scenario] = measures[scenario]()
    return document


def _serialize(rows: int, rounds: int, memory: Path, disk: Path) -> Document:
    """Median seconds of each way to write so many rows."""
    say(f"  {rows:,} rows")
    in_memory, on_disk = memory / "one.parquet", disk / "one.parquet"
    ids, texts, matrix = drawn_rows(rows)
    copy = np.ones_like(matrix)  # its pages exist before the copy is timed
    write_rows(in_memory, ids[:10], texts[:10], matrix[:10])  # loads code and codecs
    turns: dict[str, list[float]] = {name: [] for name in (*_RATES, "validation")}
    for _ in range(rounds):
        turns["tmpfs"].append(seconds_of(lambda: write_rows(in_memory, ids, texts, matrix)))
        turns["disk"].append(
            seconds_of(lambda: (write_rows(on_disk, ids, texts, matrix), _flush(on_disk)))
        )
        turns["raw_write"].append(seconds_of(lambda: (matrix.tofile(on_disk), _flush(on_disk))))
        turns["memcpy"].append(seconds_of(lambda: np.copyto(copy, matrix)))
        turns["validation"].append(seconds_of(lambda: invalid_row(matrix, normalized=True)))
    shares = (
        checks / whole for checks, whole in zip(turns["validation"], turns["tmpfs"], strict=True)
    )
    seconds = {f"{name}_seconds": median(values) for name, values in turns.items()}
    return {
        "rows": rows,
        "matrix_bytes": matrix.nbytes,
        "validation_share": median(shares),
        **seconds,
    }


def drawn_rows(rows: int) -> tuple[pa.Array, pa.LargeStringArray, np.ndarray]:
    """The ids, texts and unit vectors of a file."""
    matrix = np.random.default_rng(0).standard_normal((rows, DIMENSION), np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    texts = draw_texts(0, 1, np.arange(rows, dtype=np.uint64)).cast(pa.large_string())
    return pa.array(np.arange(rows)).cast(pa.string()), texts, matrix  # pyright: ignore[reportReturnType]


def write_rows(path: Path, ids: pa.Array, texts: pa.LargeStringArray, matrix: np.ndarray) -> None:
    """Write a file of these rows."""
    facts = FileFacts(
        "all", "space", "model", "fp32", "v1", "0" * 32, "0" * 32, len(matrix), DIMENSION, 0
    )
    write_output(path, facts, ids, texts, matrix)


def write_output(
    path: Path, facts: FileFacts, ids: pa.Array, texts: pa.LargeStringArray, matrix: np.ndarray
) -> None:
    """Write an output file with the engine's writer."""
    columns = schema(pa.string(), facts.dimension, "float32", include_text=True)
    with (
        pa.OSFile(str(path), "wb") as sink,
        new_writer(sink, columns, facts) as writer,
    ):
        writer.append_table(
            FileRows([ids], ids.type, texts, text_hashes(texts), matrix).table(columns)
        )
        writer.close()


def serialization_lines(sizes: list[Document]) -> Iterator[str]:
    yield f"{'serialization, MB/s':20}{'tmpfs':>10}{'disk':>10}{'raw disk':>10}{'memcpy':>10}{'checks':>10}"
    for size in sizes:
        rates = [
            f"{size['matrix_bytes'] / 1e6 / size[f'{name}_seconds']:>10,.0f}" for name in _RATES
        ]
        yield f"{size['rows']:>15,} rows{''.join(rates)}{size['validation_share']:>10.1%}"


def serialization_targets(sizes: list[Document]) -> Iterator[Target]:
    for size in sizes:
        yield at_most(
            f"{size['rows']:,} rows, checks before writing, share", 0.05, size["validation_share"]
        )


def _tiny(partitions: int, rounds: int, memory: Path, disk: Path) -> Document:
    """Partitions per second of runs and of bare loops, by turns."""
    source = ready_partitions(partitions, _TINY_TEXTS)
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
            f"loop on disk, {_THREADS} threads": lambda: _loop(files, disk / "loop", _THREADS),
            "loop on disk, 1 thread": lambda: _loop(files, disk / "loop", 1),
        }
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for index in range(rounds):
            say(f"  round {index + 1} of {rounds}")
            for name in list(sides)[:: -1 if index % 2 else 1]:
                rates[name].append(sides[name]())
    return {
        "partitions": partitions,
        "file_bytes": median(map(len, files.values())),
        "rounds": rounds,
        "partitions_per_second": {name: median(values) for name, values in rates.items()},
    }


def _loop(files: dict[str, bytes], folder: Path, threads: int) -> float:
    """Write the files as bytes; gives files per second, with one flush of the folder at the end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    names = list(files)
    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as lanes:
        list(
            lanes.map(
                lambda lane: _write_bytes(files, names[lane::threads], str(folder)), range(threads)
            )
        )
    _flush(folder)
    seconds = time.perf_counter() - begun
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


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def tiny_lines(measured: Document) -> Iterator[str]:
    yield (
        f"{measured['partitions']:,} partitions of {_TINY_TEXTS} texts, files of {measured['file_bytes']:,.0f} bytes, "
        f"median of {measured['rounds']} rounds"
    )
    for name, rate in measured["partitions_per_second"].items():
        yield f"{name:32}{rate:>10,.0f} per second"


def _bound(arguments: argparse.Namespace, disk: Path) -> Document:
    """Peaks of every case, in bytes."""
    sizes = ("--bound-texts", "--bound-partitions", "--stall-seconds", "--disk-folder")
    values = (
        arguments.bound_texts,
        arguments.bound_partitions,
        arguments.stall_seconds,
        disk / "bound",
    )
    words = [word for pair in zip(sizes, values, strict=True) for word in pair]
    rows = []
    for case in arguments.cases:
        say(f"  {case}")
        limit = _FILES_LIMIT if case in _FILES else _LIMIT
        measured = in_own_process("benchmarks.output", "--case", case, *words)
        rows.append({"case": case, "limit_bytes": limit, **measured})
    return {"cases": rows, "allowance_bytes": _ALLOWANCE}


def run_case(arguments: argparse.Namespace) -> Document:
    """The process of one case."""
    case, output = arguments.case, arguments.disk_folder
    store = (
        StallingStore(output, arguments.stall_seconds) if case == CASES[-1] else LocalStore(output)
    )
    catalog = output.with_name("catalog")
    if case in _FILES:
        context = multiprocessing.get_context("spawn")  # what writing takes is not the run's
        writer = context.Process(target=_write_catalog, args=(case, arguments.bound_texts, catalog))
        writer.start()
        writer.join()
        source: Iterable[Partition] = open_source(catalog)
        sizes = [partition.rows or 0 for partition in source]
    else:
        sizes, mean_bytes = _sizes_of(case, arguments.bound_texts, arguments.bound_partitions)
        source = drawn_partitions(sizes, mean_bytes)
    try:
        with paced_pool() as pool:
            with MemoryGauge() as gauge:
                pass
            thresholds, limit = (
                (Thresholds(), _FILES_LIMIT) if case in _FILES else (_THRESHOLDS, _LIMIT)
            )
            run = EmbeddingRun(source, store, pool, thresholds, memory_limit_bytes=limit)
            for _ in run:
                pass
            report = run.report
    finally:
        shutil.rmtree(output, ignore_errors=True)
        shutil.rmtree(catalog, ignore_errors=True)
    if run.failed and case != "a row group that is refused":
        raise RuntimeError(f"partitions failed in the run: {report.partitions_failed[:3]}")
    return {
        "partitions": len(sizes),
        "texts": sum(sizes),
        "refused": len(report.partitions_failed),
        "ledger_peak_bytes": report.peak_resident_bytes,
        "above_start_bytes": report.peak_rss_bytes - gauge.peak_bytes,
        "wall_seconds": report.wall_seconds,
    }


class StallingStore(LocalStore):
    """A local store that stalls once, at its hundredth object."""

    def __init__(self, root: Path, seconds: float) -> None:
        super().__init__(root)
        self._seconds = seconds
        self._objects = 0
        self._moves = threading.Lock()

    def create(self, name: str) -> Upload:  # pyright: ignore[reportIncompatibleMethodOverride]
        with self._moves:
            self._objects += 1
            if self._objects == 100:
                time.sleep(self._seconds)
        return super().create(name)


def _sizes_of(case: str, texts: int, partitions: int) -> tuple[list[int], int]:
    """Texts of each partition of a case, and the bytes of a text."""
    small = [_SMALL_TEXTS] * partitions
    if case == "texts of 1 MB":
        return [max(1, texts // 10_000)] * 4, _MEGABYTE
    if case == "a store that stalls":
        return small * max(1, texts // (_SMALL_TEXTS * partitions)), 47
    place = {
        "largest first": 0,
        "largest in the middle": partitions // 2,
        "largest last": partitions,
    }[case]
    return [*small[:place], texts, *small[place:]], 47


def _write_catalog(case: str, texts: int, folder: Path) -> None:
    """A catalog of one file: its rows have 1 MB, or share one text of 4 MB; a tenth of them where
    there are few."""
    rows, group_rows = _FILES[case]
    rows = rows if texts >= 500_000 or case == "a row group that is refused" else rows // 10
    random = np.random.default_rng(1)

    def long_texts(count: int) -> list[str]:
        return [
            random.integers(97, 123, _MEGABYTE, np.uint8).tobytes().decode() for _ in range(count)
        ]

    if case in ("rows that share a text", "a categorical column"):
        column = pa.DictionaryArray.from_arrays(
            pa.array(np.zeros(rows, np.int32)), pa.array(["x" * 4 * _MEGABYTE])
        )
    elif case == "long texts among short ones":
        column = pa.array(
            [*map(str, range(rows // 2)), *long_texts(20), *map(str, range(rows // 2))]
        )
    else:
        column = pa.array(long_texts(rows))
    (folder / "partition=a").mkdir(parents=True)
    pq.write_table(
        pa.table({"id": pa.array(range(len(column))), "text": column}),
        folder / "partition=a" / "part-0.parquet",
        compression="zstd",
        row_group_size=group_rows,
        store_schema=case == "a categorical column",  # without it, a dictionary comes as strings
    )


def bound_lines(measured: Document) -> Iterator[str]:
    counts = f"{'memory':28}{'partitions':>12}{'texts':>12}"
    yield f"{counts}{'limit MB':>10}{'ledger MB':>12}{'above start MB':>16}{'seconds':>10}"
    for case in measured["cases"]:
        yield (
            f"{case['case']:28}{case['partitions']:>12,}{case['texts']:>12,}{case['limit_bytes'] / 1e6:>10,.0f}"
            f"{case['ledger_peak_bytes'] / 1e6:>12,.0f}{case['above_start_bytes'] / 1e6:>16,.0f}"
            f"{case['wall_seconds']:>10,.1f}"
        )


def bound_targets(measured: Document) -> Iterator[Target]:
    for case in measured["cases"]:
        limit = case["limit_bytes"] / 1e6
        above = limit + (0 if case["case"] in _FILES else measured["allowance_bytes"] / 1e6)
        yield at_most(
            f"{case['case']}, maximum of the ledger in MB", limit, case["ledger_peak_bytes"] / 1e6
        )
        yield at_most(f"{case['case']}, MB above the start", above, case["above_start_bytes"] / 1e6)


SCENARIOS: Scenarios = {
    "serialization": (serialization_lines, serialization_targets),
    "tiny": (tiny_lines, lambda measured: ()),
    "bound": (bound_lines, bound_targets),
}


def main() -> None:
    parser = command_line(__doc__)
    add, quick = parser.add_argument, add_quick(parser)
    sizes = [1_000] if quick else [10_000, 100_000, 500_000]
    add(
        "--scenarios",
        type=names_of(SCENARIOS),
        default=list(SCENARIOS),
        help=f"of {','.join(SCENARIOS)}",
    )
    add("--rounds", type=int, default=1 if quick else 3, help="times that the sides take turns (3)")
    add("--rows", type=numbers, default=sizes, help="of the serialization (10000,100000,500000)")
    add(
        "--tiny-partitions",
        type=int,
        default=100 if quick else 20_000,
        help="of ten texts (20,000)",
    )
    add(
        "--cases",
        type=names_of(CASES),
        default=list(CASES[-1:] if quick else CASES),
        help=f"of {', '.join(CASES)}",
    )
    add(
        "--bound-texts",
        type=int,
        default=2_000 if quick else 500_000,
        help="of the largest partition (500,000)",
    )
    add(
        "--bound-partitions",
        type=int,
        default=20 if quick else 2_000,
        help="small ones beside it (2,000)",
    )
    add(
        "--stall-seconds",
        type=float,
        default=0.1 if quick else 30.0,
        help="that a store stalls (30)",
    )
    add("--memory-folder", type=Path, default=Path("/dev/shm"), help="on a tmpfs (/dev/shm)")
    add("--disk-folder", type=Path, help="on the disk to measure (the folder for temporary files)")
    add("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(run_case(arguments)))
    else:
        print_scenarios(measure(arguments), SCENARIOS)


if __name__ == "__main__":
    main()
