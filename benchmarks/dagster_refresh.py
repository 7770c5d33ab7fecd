"""A refresh of a whole catalog through Dagster with an encoder that takes no time: what the way through Dagster costs.

The job `catalog_refresh` is executed by a process of its own, as Dagster's launcher would have it executed, on an
instance with the settings that this project ships. Every partition has two texts; the files of the source are links to
one file, and are read like any others. Its memory is looked at from outside, whenever another quarter of the files is
there: what is its own alone, and what it shares, which is mostly the slots of SuperBatches. Their size is fixed before
the run begins, and they fill as SuperBatches grow.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run

from benchmarks.paced_backend import BACKEND
from benchmarks.rounds import say
from benchmarks.targets import Target
from surge_dagster.definitions import embedding_catalog
from surge_dagster.in_process import local_instance, origin_of
from surge_dagster.orchestration.names import CatalogNames

Document = dict[str, Any]

ROOT = Path(__file__).parent.parent
_DIMENSION = 384
GROWTH_MB = 40.0
_QUARTERS = 4
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Project:
    """A folder with a catalog, its output and a Dagster instance.

    Attributes:
        refreshed: what the refresh that filled it has measured.
    """

    folder: Path
    refreshed: Document

    @property
    def environment(self) -> dict[str, str]:
        """For every process that works on it."""
        return _environment(self.folder)


@contextmanager
def refreshed_project(partitions: int) -> Iterator[Project]:
    """A project that has just been filled by a refresh."""
    with tempfile.TemporaryDirectory(prefix="surge-refresh-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        say(f"  a catalog of {partitions:,} partitions")
        _write_catalog(folder / "catalog", partitions)
        say("  its refresh")
        command = [sys.executable, "-m", "benchmarks.dagster_refresh", str(partitions)]
        process = subprocess.Popen(command, env=_environment(folder), cwd=folder, stdout=subprocess.PIPE, text=True)
        marks = _watched(process, folder / "output", partitions)
        said = process.stdout.read() if process.stdout else ""
        if process.returncode:
            raise RuntimeError(f"the refresh failed; what it said is above, and its last words were: {said[-2000:]}")
        found: Document = json.loads(said.splitlines()[-1])
        marks += [(found["own_bytes"], found["rss_bytes"])] * (_QUARTERS - len(marks))  # done sooner than looked at
        own, rss = zip(*marks, strict=True)
        yield Project(folder, found | {"own_bytes_at_quarters": own, "rss_bytes_at_quarters": rss})


def refresh_targets(found: Document) -> list[Target]:
    """The aims of this scenario."""
    name = f"growth of its own memory over the last three quarters of {found['partitions']:,} partitions in MB"
    return [Target(name, GROWTH_MB, growth_mb(found), at_least=False)]


def growth_mb(found: Document) -> float:
    """By how much the run's own memory grew over the last three quarters of its partitions."""
    marks = found["own_bytes_at_quarters"]
    return (marks[-1] - marks[0]) / 1e6


def refresh_lines(found: Document) -> list[str]:
    """The scenario for people."""
    own, rss = (
        ", ".join(f"{mark / 1e6:,.0f}" for mark in found[f"{name}_bytes_at_quarters"]) for name in ("own", "rss")
    )
    return [
        "",
        f"refresh of {found['partitions']:,} partitions: {found['seconds']:.1f} s, "
        f"{found['partitions_per_second']:,.0f} partitions/s, {found['cpu_seconds']:.1f} CPU seconds",
        f"its own memory at each quarter in MB: {own}; with what it shares: {rss}",
    ]


def main() -> None:
    """The process of the run."""
    partitions = int(sys.argv[1])
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    job = embedding_catalog().resolve_job_def(CatalogNames().refresh_job)
    with local_instance() as instance:
        begun, cpu = time.perf_counter(), time.process_time()
        run = instance.create_run_for_job(job, run_config=quiet, remote_job_origin=origin_of(job.name))
        execute_run(InMemoryJob(job), run, instance, raise_on_error=True)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    own, rss = _memory_of(psutil.Process())
    print(
        json.dumps(
            {
                "partitions": partitions,
                "seconds": seconds,
                "cpu_seconds": cpu,
                "partitions_per_second": partitions / seconds,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "own_bytes": own,
                "rss_bytes": rss,
            }
        )
    )


def _watched(process: subprocess.Popen[str], output: Path, partitions: int) -> list[tuple[int, int]]:
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
                with suppress(psutil.Error):  # it has just ended
                    marks.append(_memory_of(watched))


def _memory_of(process: psutil.Process) -> tuple[int, int]:
    """What a process holds that no other one sees, and all that it holds, in bytes."""
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
        "SURGE_MODEL": f"hash://{_DIMENSION}",
        "SURGE_BACKEND": BACKEND,
        "SURGE_CHECK_PARITY": "false",
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
