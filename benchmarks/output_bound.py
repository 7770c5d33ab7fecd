"""The bound on memory: the ledger stays within its limit for any input, and the process's memory follows the ledger.

Each case is a run in its own process with a fixed memory limit: one huge partition before, amid and after thousands of
small ones, texts of 1 MB, a store that stalls for half a minute, and Parquet files under a smaller limit: texts of 1 MB
in row groups that fit, the same in one row group that is refused, a few that stand together among many short ones, and
files that hold gigabytes in some kilobytes, as strings and as a column of a dictionary type. A case reports the maximum
of the ledger, and the maximum of the memory of the process and its worker beyond what they held before the run (shared
pages counted once), beside its limit.
The ledger counts data, not Python's own objects; hence the allowance of 300 MB, which files do not get.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Document, Target, at_most, say
from benchmarks.paced_runs import drawn_partitions, paced_pool
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources import open_source
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.store import Upload
from surge_dagster.engine.support.process_memory import MemoryGauge

LIMIT = 1024 * 1024 * 1024
FILES_LIMIT = 250_000_000
ALLOWANCE = 300_000_000
FILES = {  # rows of a whole run, rows of a row group
    "row groups that fit": (600, 20),
    "a row group that is refused": (600, 600),
    "long texts among short ones": (40_000, 40_000),
    "rows that share a text": (3_000, 3_000),
    "a categorical column": (500, 500),
}
CASES = ("largest first", "largest in the middle", "largest last", "texts of 1 MB", *FILES, "a store that stalls")
_SMALL_TEXTS = 100
_MEGABYTE = 1_000_000
_THRESHOLDS = Thresholds(b_min=20_000, b_max=100_000)


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


def sizes_of(case: str, texts: int, partitions: int) -> tuple[list[int], int]:
    """Texts of each partition of a case, and the bytes of a text."""
    small = [_SMALL_TEXTS] * partitions
    if case == "texts of 1 MB":
        return [max(1, texts // 10_000)] * 4, _MEGABYTE
    if case == "a store that stalls":
        return small * max(1, texts // (_SMALL_TEXTS * partitions)), 47
    place = {"largest first": 0, "largest in the middle": partitions // 2, "largest last": partitions}[case]
    return [*small[:place], texts, *small[place:]], 47


def write_file(case: str, texts: int, folder: Path) -> None:
    """A catalog of one file: its rows have 1 MB, or share one text of 4 MB; a tenth of them where there are few."""
    rows, group_rows = FILES[case]
    rows = rows if texts >= 500_000 or case == "a row group that is refused" else rows // 10
    random = np.random.default_rng(1)
    if case in ("rows that share a text", "a categorical column"):
        column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * 4 * _MEGABYTE]))
    elif case == "long texts among short ones":
        long = [random.integers(97, 123, _MEGABYTE, np.uint8).tobytes().decode() for _ in range(20)]
        column = pa.array([*map(str, range(rows // 2)), *long, *map(str, range(rows // 2))])
    else:
        column = pa.array([random.integers(97, 123, _MEGABYTE, np.uint8).tobytes().decode() for _ in range(rows)])
    (folder / "partition=a").mkdir(parents=True)
    table = pa.table({"id": pa.array(range(len(column))), "text": column})
    pq.write_table(
        table,
        folder / "partition=a" / "part-0.parquet",
        compression="zstd",
        row_group_size=group_rows,
        store_schema=case == "a categorical column",  # without it, a dictionary comes as strings
    )


def bound_document(cases: list[str], texts: int, partitions: int, stall_seconds: float, disk: Path) -> Document:
    """Peaks of every case, in bytes."""
    rows = []
    for case in cases:
        say(f"  {case}")
        arguments = [case, str(texts), str(partitions), str(stall_seconds), str(disk / "bound")]
        command = [sys.executable, "-m", "benchmarks.output_bound", *arguments]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        limit = FILES_LIMIT if case in FILES else LIMIT
        rows.append({"case": case, "limit_bytes": limit, **json.loads(ran.stdout.splitlines()[-1])})
    return {
        "cases": rows,
        "allowance_bytes": ALLOWANCE,
        "largest_texts": texts,
        "small_partitions": partitions,
        "stall_seconds": stall_seconds,
    }


def bound_lines(found: Document) -> Iterator[str]:
    """The table."""
    yield ""
    yield "memory"
    counts = f"{'':28}{'partitions':>12}{'texts':>12}"
    yield f"{counts}{'limit MB':>10}{'ledger MB':>12}{'above start MB':>16}{'seconds':>10}"
    for case in found["cases"]:
        yield (
            f"{case['case']:28}{case['partitions']:>12,}{case['texts']:>12,}{case['limit_bytes'] / 1e6:>10,.0f}"
            f"{case['ledger_peak_bytes'] / 1e6:>12,.0f}{case['above_start_bytes'] / 1e6:>16,.0f}"
            f"{case['wall_seconds']:>10,.1f}"
        )


def bound_targets(found: Document) -> Iterator[Target]:
    """The aims of the scenario."""
    for case in found["cases"]:
        limit = case["limit_bytes"] / 1e6
        above = limit + (0 if case["case"] in FILES else found["allowance_bytes"] / 1e6)
        yield at_most(f"{case['case']}, maximum of the ledger in MB", limit, case["ledger_peak_bytes"] / 1e6)
        yield at_most(f"{case['case']}, MB above the start", above, case["above_start_bytes"] / 1e6)


def main() -> None:
    """The process of one case."""
    case, texts, partitions, stall_seconds, output = sys.argv[1], *map(float, sys.argv[2:5]), Path(sys.argv[5])
    store = StallingStore(output, stall_seconds) if case == "a store that stalls" else LocalStore(output)
    catalog = output.with_name("catalog")
    if case in FILES:
        context = multiprocessing.get_context("spawn")  # what writing takes is not the run's
        writer = context.Process(target=write_file, args=(case, int(texts), catalog))
        writer.start()
        writer.join()
        source: Iterable[Partition] = open_source(catalog)
        sizes = [partition.rows or 0 for partition in source]
    else:
        sizes, mean_bytes = sizes_of(case, int(texts), int(partitions))
        source = drawn_partitions(sizes, mean_bytes)
    try:
        with paced_pool() as pool:
            with MemoryGauge() as gauge:
                pass
            thresholds, limit = (Thresholds(), FILES_LIMIT) if case in FILES else (_THRESHOLDS, LIMIT)
            run = EmbeddingRun(source, store, pool, thresholds, memory_limit=limit)
            for _ in run:
                pass
            report = run.report
    finally:
        shutil.rmtree(output, ignore_errors=True)
        shutil.rmtree(catalog, ignore_errors=True)
    if run.failed and case != "a row group that is refused":
        raise RuntimeError(f"partitions failed in the run: {report.partitions_failed[:3]}")
    measured = {
        "partitions": len(sizes),
        "texts": sum(sizes),
        "refused": len(report.partitions_failed),
        "ledger_peak_bytes": report.peak_resident_bytes,
        "above_start_bytes": report.peak_rss_bytes - gauge.peak_bytes,
        "wall_seconds": report.wall_seconds,
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
