"""A refresh of a whole catalog through Dagster with an encoder that takes no time.

A process of its own executes the job `catalog_refresh` on an instance with the settings that this project ships. Every
partition has two texts; the files of the source are links to one file. Its memory is read from outside whenever
another quarter of the files exists: what no other process sees, and all that it holds, which includes the slots of
SuperBatches. The other scenarios (ticks of the sensor, pages of the UI) look at the instance that the refresh has
filled.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Document, Target, at_most, say
from benchmarks.paced_runs import DIMENSION
from surge_dagster.definitions import embedding_catalog
from surge_dagster.orchestration.names import CatalogNames

ROOT = Path(__file__).parent.parent
GROWTH_MB = 40.0
_QUARTERS = 4
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Project:
    """A folder with a catalog, its output and a Dagster instance; `refreshed` is what the refresh measured."""

    folder: Path
    refreshed: Document

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process that works on the project."""
        return _environment(self.folder)


@contextmanager
def refreshed_project(partitions: int) -> Iterator[Project]:
    """A project that a refresh has just filled."""
    with tempfile.TemporaryDirectory(prefix="surge-refresh-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        say(f"  a catalog of {partitions:,} partitions")
        _write_catalog(folder / "catalog", partitions)
        (folder / "home").mkdir()
        shutil.copy(ROOT / "surge_dagster" / "dagster.yaml", folder / "home")
        say("  its refresh")
        command = [sys.executable, "-m", "benchmarks.dagster_refresh", str(partitions)]
        process = subprocess.Popen(command, env=_environment(folder), cwd=folder, stdout=subprocess.PIPE, text=True)
        marks = _watch(process, folder / "output", partitions)
        printed = process.stdout.read() if process.stdout else ""
        if process.returncode:
            raise RuntimeError(f"the refresh failed with exit code {process.returncode}: {printed[-2000:]}")
        found: Document = json.loads(printed.splitlines()[-1])
        last = (found["own_bytes"], found["rss_bytes"])
        own, rss = zip(*(marks + [last] * (_QUARTERS - len(marks))), strict=True)
        yield Project(folder, found | {"own_bytes_at_quarters": own, "rss_bytes_at_quarters": rss})


def refresh_targets(found: Document) -> Iterator[Target]:
    """The aims of the scenario."""
    name = f"growth of own memory, last three quarters of {found['partitions']:,}, MB"
    yield at_most(name, GROWTH_MB, growth_mb(found))


def growth_mb(found: Document) -> float:
    """By how many MB the run's own memory grew over the last three quarters of its partitions."""
    marks = found["own_bytes_at_quarters"]
    return (marks[-1] - marks[0]) / 1e6


def refresh_lines(found: Document) -> Iterator[str]:
    """The table."""
    own, rss = (
        ", ".join(f"{mark / 1e6:,.0f}" for mark in found[f"{name}_bytes_at_quarters"]) for name in ("own", "rss")
    )
    yield ""
    yield (
        f"refresh of {found['partitions']:,} partitions: {found['seconds']:.1f} s, "
        f"{found['partitions_per_second']:,.0f} partitions/s, {found['cpu_seconds']:.1f} CPU seconds"
    )
    yield f"its own memory at each quarter in MB: {own}; with what it shares: {rss}"


def main() -> None:
    """The process of the run."""
    partitions = int(sys.argv[1])
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    job = embedding_catalog().resolve_job_def(CatalogNames().refresh_job)
    with dg.DagsterInstance.get() as instance:
        begun, cpu = time.perf_counter(), time.process_time()
        job.execute_in_process(run_config=quiet, instance=instance)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    own, rss = _memory_of(psutil.Process())
    measured = {
        "partitions": partitions,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "partitions_per_second": partitions / seconds,
        "own_bytes": own,
        "rss_bytes": rss,
    }
    print(json.dumps(measured))


def _watch(process: subprocess.Popen[str], output: Path, partitions: int) -> list[tuple[int, int]]:
    """Wait for the run's process to end; gives its memory when each quarter of the partitions was published."""
    marks: list[tuple[int, int]] = []
    watched = psutil.Process(process.pid)
    while True:
        try:
            process.wait(_LOOK_SECONDS)
            return marks
        except subprocess.TimeoutExpired:
            published = sum(1 for _ in output.glob("*/*.parquet"))
            if len(marks) < _QUARTERS and published * _QUARTERS >= partitions * (len(marks) + 1):
                with suppress(psutil.Error):  # the process has just ended
                    marks.append(_memory_of(watched))


def _memory_of(process: psutil.Process) -> tuple[int, int]:
    """Bytes of a process that no other process sees, and all of its bytes."""
    memory = process.memory_info()
    return memory.rss - memory.shared, memory.rss


def _environment(folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SURGE_", "DAGSTER_"))}
    return inherited | {
        "DAGSTER_HOME": str(folder / "home"),
        "DAGSTER_EMIT_PARTITION_SUBSET_IN_PLANNED_EVENTS": "true",
        "PYTHONPATH": str(ROOT),
        "SURGE_CACHE_DIR": str(folder / "cache"),
        "SURGE_SOURCE": str(folder / "catalog"),
        "SURGE_OUTPUT": str(folder / "output"),
        "SURGE_MODEL": f"hash://{DIMENSION}",
    }


def _write_catalog(catalog: Path, partitions: int) -> None:
    first = catalog / "file.parquet"
    catalog.mkdir()
    rows = pa.table({"id": ["id-0", "id-1"], "text": ["a short text", "another one"]})
    pq.write_table(rows.replace_schema_metadata({b"surge.source_version": b"v1"}), first)
    for index in range(partitions):
        folder = catalog / f"partition=category%20{index:05d}"
        folder.mkdir()
        (folder / "part-0.parquet").hardlink_to(first)
    first.unlink()


if __name__ == "__main__":
    main()
