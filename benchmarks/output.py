"""The path from vectors to files: writing files, and the bound on memory.

    TMPDIR=FOLDER python -m benchmarks.output [--scenarios serialization,tiny,bound] [--quick]

- serialization: a matrix of 384 columns with ids and texts through the engine's file writer, to
  tmpfs and to the disk of the folder for temporary files.
- tiny: a folder with a Parquet file of two texts for each partition, and an encoder that takes no
  time: the path from the source's files to the published ones. Processor seconds are those of the
  run's process, without its worker.
- bound: the ledger stays within its limit for any input, and the process's memory follows the
  ledger. Each case is a run in its own process: one huge partition before, amid and after
  thousands of small ones, texts of 1 MB, a store that stalls, and under a smaller limit Parquet
  files: texts of 1 MB in row groups that fit, the same in one row group that is refused, a few
  together among many short ones, and files that hold gigabytes in some kilobytes, as strings and
  as a dictionary column. Memory is that of the process and its worker above their start, shared
  pages counted once. The ledger counts data, not Python's own objects; hence the allowance of
  300 MB, which files do not get.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import (
    Document,
    Options,
    Target,
    at_most,
    in_own_process,
    in_turns,
    median_ratio,
    print_document,
    say,
    seconds_of,
    start_document,
    temporary_folder,
)
from benchmarks.paced_runs import (
    DIMENSION,
    drawn_partitions,
    drawn_texts,
    embed,
    paced_pool,
)
from surge_dagster import EmbeddingRun, open_source
from surge_dagster.engine.files.facts import FileFacts, desired_version
from surge_dagster.engine.files.parquet import write_file
from surge_dagster.engine.files.rows import invalid_row, schema, table_of
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.store import Upload
from surge_dagster.engine.support.footer_memory import forget_all
from surge_dagster.engine.support.process_memory import MemoryGauge

_MEMORY = Path("/dev/shm")
_ROWS = (10_000, 100_000, 500_000)
_QUICK_ROWS = (1_000,)
_TINY_TEXTS = 2
_TINY_MILLISECONDS = 1.2

_LIMIT_BYTES = 1024**3
_FILES_LIMIT_BYTES = 250_000_000
_ALLOWANCE_BYTES = 300_000_000
_SMALL_TEXTS = 100
_SHORT_BYTES = 47
_MEGABYTE = 1_000_000
_STALLS = "a store that stalls"
_REFUSED = "a row group that is refused"
_CATEGORICAL = "a categorical column"
# The rows of a run at full size, and of a row group.
_FILES = {
    "row groups that fit": (600, 20),
    _REFUSED: (600, 600),
    "long texts among short ones": (40_000, 40_000),
    "rows that share a text": (3_000, 3_000),
    _CATEGORICAL: (500, 500),
}
_DRAWN = ("largest first", "largest in the middle", "largest last", "texts of 1 MB")
_CASES = (*_DRAWN, *_FILES, _STALLS)


def measure_serialization(arguments: argparse.Namespace, disk: Path) -> list[Document]:
    """Return the median seconds of writing a file, by its rows."""
    sizes = _QUICK_ROWS if arguments.quick else _ROWS
    with temporary_folder(_MEMORY) as memory:
        return [_serialize(rows, arguments.rounds, memory, disk) for rows in sizes]


def _serialize(rows: int, rounds: int, memory: Path, disk: Path) -> Document:
    say(f"  {rows:,} rows")
    ids, texts, matrix = drawn_rows(rows)
    write_output(memory / "one.parquet", ids[:10], texts[:10], matrix[:10])  # loads code and codecs

    def write(folder: Path) -> None:
        write_output(folder / "one.parquet", ids, texts, matrix)

    def write_and_flush() -> None:
        write(disk)
        descriptor = os.open(disk / "one.parquet", os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    works: dict[str, Callable[[], object]] = {
        "tmpfs": partial(write, memory),
        "disk": write_and_flush,
        "validation": partial(invalid_row, matrix, normalized=True),
    }
    turns = in_turns({name: partial(seconds_of, work) for name, work in works.items()}, rounds)
    seconds = {f"{name}_seconds": median(values) for name, values in turns.items()}
    return {
        "rows": rows,
        "matrix_bytes": matrix.nbytes,
        "validation_share": median_ratio(turns["validation"], turns["tmpfs"]),
        **seconds,
    }


def drawn_rows(rows: int) -> tuple[pa.Array, pa.LargeStringArray, np.ndarray]:
    """Return the ids, texts and unit vectors of a file."""
    matrix = np.random.default_rng(0).standard_normal((rows, DIMENSION), np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    return pa.array(np.arange(rows)).cast(pa.string()), drawn_texts(rows), matrix


def write_output(
    path: Path,
    ids: pa.Array,
    texts: pa.LargeStringArray,
    matrix: np.ndarray,
    *,
    key: str = "all",
    space: str = "space",
    source_version: str = "v1",
    digest: str = "0" * 32,
) -> None:
    """Write an output file with the engine's writer."""
    count, dimension = matrix.shape
    version = desired_version(digest, space)
    facts = FileFacts(
        key, space, "model", "fp32", source_version, digest, version, count, dimension, 0
    )
    columns = schema(pa.string(), dimension, "float32", include_text=True)
    with pa.OSFile(str(path), "wb") as sink:
        write_file(sink, columns, facts, [table_of(columns, [ids], texts, matrix)])


def measure_tiny(arguments: argparse.Namespace, disk: Path) -> Document:
    """Return the partitions per second, and the processor time of each, of runs from files to files
    on tmpfs and on a disk."""
    partitions = arguments.tiny_partitions
    with paced_pool() as pool, temporary_folder(_MEMORY) as memory:
        for folder in (memory, disk):
            _write_tiny_catalog(folder / "catalog", partitions)

        outputs = count()  # ext4 looks long for an inode where many files were just deleted

        def run(folder: Path) -> tuple[float, float]:
            forget_all()
            output = LocalStore(folder / f"tiny-{next(outputs)}")
            begun = time.process_time()
            report = embed(pool, open_source(folder / "catalog"), output)
            processor_seconds = time.process_time() - begun
            return partitions / report.wall_seconds, 1000 * processor_seconds / partitions

        run(memory)  # warms up
        sides = {"tmpfs": partial(run, memory), "disk": partial(run, disk)}
        turns = in_turns(sides, arguments.rounds)
    return {
        "partitions": partitions,
        "partitions_per_second": {
            name: median(rate for rate, _ in values) for name, values in turns.items()
        },
        "processor_milliseconds": {
            name: median(processor for _, processor in values) for name, values in turns.items()
        },
    }


def _write_tiny_catalog(folder: Path, partitions: int) -> None:
    texts = drawn_texts(partitions * _TINY_TEXTS)
    for number in range(partitions):
        path = folder / f"category={number:06d}" / "0.parquet"
        path.parent.mkdir(parents=True)
        rows = texts.slice(number * _TINY_TEXTS, _TINY_TEXTS)
        ids = [f"{number}-{row}" for row in range(_TINY_TEXTS)]
        pq.write_table(pa.table({"id": ids, "text": rows}), path)


@dataclass(frozen=True, slots=True)
class Case:
    """A case of the bound, at a size.

    Args:
        texts: of the largest partition.
        partitions: small ones.
        folder: of its files, and of a catalog.
    """

    name: str
    texts: int
    partitions: int
    stall_seconds: float
    folder: Path

    def store(self) -> LocalStore:
        if self.name == _STALLS:
            return StallingStore(self.folder, self.stall_seconds)
        return LocalStore(self.folder)

    def source(self) -> Iterable[Partition]:
        if self.name not in _FILES:
            mean_bytes = _MEGABYTE if self.name == "texts of 1 MB" else _SHORT_BYTES
            return drawn_partitions(self.sizes(), mean_bytes)
        catalog = self.folder.with_name("catalog")
        in_own_process(_write_catalog, self, catalog)  # what writing takes is not the run's
        return list(open_source(catalog))

    def sizes(self) -> list[int]:
        """Return the texts of each partition."""
        small = [_SMALL_TEXTS] * self.partitions
        if self.name in _FILES:
            return [self.file_rows()]
        if self.name == "texts of 1 MB":
            return [max(1, self.texts // 10_000)] * 4
        if self.name == _STALLS:
            return small * max(1, self.texts // (_SMALL_TEXTS * self.partitions))
        small.insert(_DRAWN.index(self.name) * self.partitions // 2, self.texts)
        return small

    def file_rows(self) -> int:
        """Return the rows of its one file: a tenth if the run is small."""
        rows = _FILES[self.name][0]
        if self.texts >= 500_000 or self.name == _REFUSED:
            return rows
        return rows // 10


def measure_bound(arguments: argparse.Namespace, disk: Path) -> list[Document]:
    """Return the peaks of every case, in bytes."""
    rows = []
    for name in arguments.cases:
        say(f"  {name}")
        texts = arguments.bound_texts
        case = Case(name, texts, arguments.bound_partitions, arguments.stall_seconds, disk / "out")
        rows.append({"case": name, **in_own_process(run_case, case)})
        for folder in disk.iterdir():
            shutil.rmtree(folder)
    return rows


def run_case(case: Case) -> Document:
    """Run a case in this process."""
    thresholds = Thresholds(b_min=20_000, b_max=100_000)
    limit = _LIMIT_BYTES
    if case.name in _FILES:
        thresholds = Thresholds()
        limit = _FILES_LIMIT_BYTES
    source = case.source()
    with paced_pool() as pool:
        with MemoryGauge() as gauge:
            pass
        run = EmbeddingRun(source, case.store(), pool, thresholds, memory_limit_bytes=limit)
        for _ in run:
            pass
    report = run.report
    if run.failed and case.name != _REFUSED:
        raise RuntimeError(f"Partitions failed in the run: {report.partitions_failed[:3]}")
    sizes = case.sizes()
    return {
        "limit_bytes": limit,
        "partitions": len(sizes),
        "texts": sum(sizes),
        "refused": len(report.partitions_failed),
        "ledger_peak_bytes": report.peak_resident_bytes,
        "above_start_bytes": (report.peak_rss_bytes or 0) - (gauge.peak_bytes or 0),
        "wall_seconds": report.wall_seconds,
    }


class StallingStore(LocalStore):
    """A local store that stalls once, at its hundredth object."""

    def __init__(self, root: Path, seconds: float) -> None:
        super().__init__(root)
        self._seconds = seconds
        self._objects = 0
        self._lock = threading.Lock()

    def create(self, name: str) -> Upload:  # pyright: ignore[reportIncompatibleMethodOverride]
        with self._lock:
            self._objects += 1
            if self._objects == 100:
                time.sleep(self._seconds)
        return super().create(name)


def _write_catalog(case: Case, folder: Path) -> None:
    """Write a catalog of one file whose rows have 1 MB, or share one text of 4 MB."""
    rows = case.file_rows()
    short = [str(row) for row in range(rows // 2)]
    if case.name in ("rows that share a text", _CATEGORICAL):
        codes = pa.array(np.zeros(rows, np.int32))
        column = pa.DictionaryArray.from_arrays(codes, pa.array(["x" * 4 * _MEGABYTE]))
    elif case.name == "long texts among short ones":
        column = pa.array([*short, *_long_texts(20), *short])
    else:
        column = pa.array(list(_long_texts(rows)))
    (folder / "partition=a").mkdir(parents=True)
    pq.write_table(
        pa.table({"id": pa.array(range(len(column))), "text": column}),
        folder / "partition=a" / "part-0.parquet",
        compression="zstd",
        row_group_size=_FILES[case.name][1],
        store_schema=case.name == _CATEGORICAL,  # without it, a dictionary is read as strings
    )


def _long_texts(count: int) -> Iterator[str]:
    random = np.random.default_rng(1)
    for _ in range(count):
        yield random.integers(97, 123, _MEGABYTE, np.uint8).tobytes().decode()


def lines(document: Document) -> Iterator[str]:
    """Yield the tables of the scenarios that were measured."""
    if "serialization" in document:
        yield f"{'serialization, MB/s':20}{'tmpfs':>10}{'disk':>10}{'checks':>10}"
        for size in document["serialization"]:
            megabytes = size["matrix_bytes"] / 1e6
            tmpfs = megabytes / size["tmpfs_seconds"]
            disk = megabytes / size["disk_seconds"]
            share = size["validation_share"]
            yield f"{size['rows']:>15,} rows{tmpfs:>10,.0f}{disk:>10,.0f}{share:>10.1%}"

    if "tiny" in document:
        tiny = document["tiny"]
        yield f"{tiny['partitions']:,} partitions of {_TINY_TEXTS} texts"
        yield f"{'':20}{'per second':>12}{'processor ms of each':>24}"
        for name, rate in tiny["partitions_per_second"].items():
            processor = tiny["processor_milliseconds"][name]
            yield f"{name:20}{rate:>12,.0f}{processor:>24.2f}"

    if "bound" in document:
        yield f"{'memory':28}{'partitions':>12}{'texts':>12}{'limit, ledger, above start MB':>32}"
        for case in document["bound"]:
            sizes = ("limit_bytes", "ledger_peak_bytes", "above_start_bytes")
            peaks = ", ".join(f"{case[size] / 1e6:,.0f}" for size in sizes)
            yield f"{case['case']:28}{case['partitions']:>12,}{case['texts']:>12,}{peaks:>32}"


def targets(document: Document) -> Iterator[Target]:
    """Yield the aims of the scenarios that were measured."""
    for size in document.get("serialization", ()):
        name = f"{size['rows']:,} rows, checks before writing, share"
        yield at_most(name, 0.05, size["validation_share"])

    if "tiny" in document:
        for place, processor in document["tiny"]["processor_milliseconds"].items():
            name = f"processor ms of a partition of two texts, {place}"
            yield at_most(name, _TINY_MILLISECONDS, processor)

    for case in document.get("bound", ()):
        name = case["case"]
        limit = case["limit_bytes"] / 1e6
        peak = case["ledger_peak_bytes"] / 1e6
        yield at_most(f"{name}, maximum of the ledger in MB", limit, peak)
        if name not in _FILES:
            limit += _ALLOWANCE_BYTES / 1e6
        yield at_most(f"{name}, MB above the start", limit, case["above_start_bytes"] / 1e6)


_SCENARIOS: dict[str, Callable[[argparse.Namespace, Path], object]] = {
    "serialization": measure_serialization,
    "tiny": measure_tiny,
    "bound": measure_bound,
}


def main() -> None:
    options = Options(__doc__)
    options.add_names("--scenarios", _SCENARIOS)
    options.add_size("--rounds", 3, 1, "times that the sides take turns")
    options.add_size("--tiny-partitions", 5_000, 100, "of two texts")
    options.add_names("--cases", _CASES, quick=[_STALLS])
    options.add_size("--bound-texts", 500_000, 2_000, "of the largest partition")
    options.add_size("--bound-partitions", 2_000, 20, "small ones next to it")
    options.add_size("--stall-seconds", 30.0, 0.1, "that a store stalls")
    arguments = options.parse_args()

    document = start_document("output", arguments, ("pyarrow", "numpy"))
    for scenario in arguments.scenarios:
        say(scenario)
        with temporary_folder() as disk:
            document[scenario] = _SCENARIOS[scenario](arguments, disk)
    print_document(document, lines, targets)


if __name__ == "__main__":
    main()
