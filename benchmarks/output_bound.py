"""The unconditional bound: whatever comes, the account stays within its limit, and the memory follows the account.

Each case is a run in a process of its own, with a fixed memory limit: one huge partition before, amid and after
thousands of small ones, texts of 1 MB, and a store that stands still for half a minute. Two figures count: the most
that the ledger ever held, and the most memory of the process and its worker beyond what they held before the run
(shared pages counted once). The ledger counts data, not Python's own objects, hence 300 MB of allowance.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.output_runs import drawn_partitions, embed, paced_pool
from benchmarks.rounds import say
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.store import Upload
from surge_dagster.engine.support.process_memory import MemoryGauge
from surge_dagster.engine.thresholds import Thresholds

DIMENSION = 384
LIMIT = 1024 * 1024 * 1024
ALLOWANCE = 300_000_000
CASES = ("largest first", "largest in the middle", "largest last", "texts of 1 MB", "a store that stalls")
_SMALL_TEXTS = 100
_MEGABYTE = 1_000_000
_THRESHOLDS = Thresholds(b_min=20_000, b_max=100_000, b_max_bytes=64_000_000)


class StallingStore(LocalStore):
    """A local store in which nothing moves for some time, once, from its hundredth object on."""

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


def bound_document(cases: list[str], texts: int, partitions: int, stall_seconds: float, disk: Path) -> dict[str, Any]:
    """Every case's peaks in bytes."""
    rows = []
    for case in cases:
        say(f"  {case}")
        arguments = [case, str(texts), str(partitions), str(stall_seconds), str(disk / "bound")]
        command = [sys.executable, "-m", "benchmarks.output_bound", *arguments]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append({"case": case, **json.loads(ran.stdout.splitlines()[-1])})
    return {
        "cases": rows,
        "limit_bytes": LIMIT,
        "allowance_bytes": ALLOWANCE,
        "largest_texts": texts,
        "small_partitions": partitions,
        "stall_seconds": stall_seconds,
    }


def main() -> None:
    """One case's process."""
    case, texts, partitions, stall_seconds, output = sys.argv[1], *map(float, sys.argv[2:5]), Path(sys.argv[5])
    sizes, mean_bytes = sizes_of(case, int(texts), int(partitions))
    store = StallingStore(output, stall_seconds) if case == "a store that stalls" else LocalStore(output)
    try:
        with paced_pool(DIMENSION) as pool:
            with MemoryGauge() as gauge:
                pass
            report = embed(pool, drawn_partitions(sizes, mean_bytes), store, _THRESHOLDS, memory_limit=LIMIT)
    finally:
        shutil.rmtree(output, ignore_errors=True)
    print(
        json.dumps(
            {
                "partitions": len(sizes),
                "texts": sum(sizes),
                "ledger_peak_bytes": report.peak_resident_bytes,
                "start_bytes": gauge.peak_bytes,
                "above_start_bytes": report.peak_rss_bytes - gauge.peak_bytes,
                "wall_seconds": report.wall_seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
