"""What a fleet costs beside encoding, measured on this machine: the parameters of the simulator.

Each figure is the product's own code at work: events on a Postgres server, runs over partitions
with an encoder that takes no time, a driver whose machines answer immediately.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

from benchmarks.dagster import report_in_an_op
from benchmarks.harness import Document, in_own_process, say, seconds_of
from benchmarks.listed_bucket import listing_seconds
from benchmarks.paced_runs import embed, paced_pool, ready_partitions
from surge_dagster.cluster.cluster_run import ClusterRun
from surge_dagster.cluster.machine import MachineFacts, StretchOutcome
from surge_dagster.cluster.machine_work import MachineWork
from surge_dagster.cluster.stretches import Stretch
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Receipt
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.local_store import LocalStore
from tests.dagster.postgres_server import PostgresServer, postgres_server


@dataclass(frozen=True, slots=True)
class FleetCosts:
    """Seconds of everything beside encoding.

    Attributes:
        pool_seconds: of a model's load by a pool.
        stretch_seconds: what a run over a small partition takes with a pool that is started.
        file_seconds: to publish a small file, among many.
        row_seconds: to publish a row, in a large file.
        of_writers: to store a partition's events, by the number of runs that do so on one database.
        of_objects: to list so many files.
        of_machines: of the driver for a stretch, by the number of machines.
    """

    pool_seconds: float
    stretch_seconds: float
    file_seconds: float
    row_seconds: float
    of_writers: Mapping[int, float]
    of_objects: Mapping[int, float]
    of_machines: Mapping[int, float]

    def event_seconds(self, writers: int) -> float:
        return _between(self.of_writers, writers)

    def list_seconds(self, objects: int) -> float:
        return _between({0: 0.0, **self.of_objects}, objects)

    def driver_seconds(self, machines: int) -> float:
        return _between(self.of_machines, machines)


def _between(points: Mapping[int, float], at: int) -> float:
    places = sorted(points)
    return float(np.interp(at, places, [points[place] for place in places]))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of what is measured."""

    writers: Sequence[int]
    events: int
    objects: Sequence[int]
    files: int
    rows: int
    machines: Sequence[int]
    stretches: int


FULL = Sizes((1, 4, 16, 64), 500, (40_000, 400_000), 1_000, 200_000, (8, 64, 1_000), 3_000)
QUICK = Sizes((), 0, (100, 200), 5, 500, (2, 4), 8)


def measure_costs(sizes: Sizes, model: str) -> tuple[FleetCosts, Document]:
    """Measure everything, one at a time; the document has what the simulator does not use.

    Without writers, what Postgres stores is left out.

    Raises:
        NoPostgres: Postgres or its driver is missing.
    """
    with tempfile.TemporaryDirectory(prefix="surge-fleet-") as name:
        folder = Path(name)
        events, extra = {1: 0.001}, Document()
        if sizes.writers:
            with postgres_server() as server:
                for writers in sizes.writers:
                    say(f"  events of {writers} writers")
                    events[writers], cpu = _stored_events(server, writers, sizes.events)
                    extra = {"postgres": server.version, "postgres_cpu_milliseconds": 1_000 * cpu}
        say("  a pool, stretches and files")
        pool = _pool_seconds(model) - _pool_seconds("hash://384")
        stretch, file, row = _published(folder, sizes.files, sizes.rows)
        say("  lists")
        objects = _listed(folder / "listed", sizes.objects)
        extra["bucket_list_seconds"] = listing_seconds(sizes.objects)
        say("  a driver")
        driver = {
            count: _driver_seconds(folder, count, sizes.stretches) for count in sizes.machines
        }
    costs = FleetCosts(max(0.0, pool), stretch, file, row, events, objects, driver)
    return costs, extra


def _stored_events(server: PostgresServer, writers: int, events: int) -> tuple[float, float]:
    """Seconds per partition of all writers together, and of the server's processors."""
    url = server.create_database(f"events_{writers}")
    words = ("--writers", writers, "--events", events, "--url", url)
    postgres = next(each for each in psutil.process_iter() if _listens(each, server.port))
    before = _cpu_seconds(postgres)
    seconds = in_own_process("benchmarks.fleet_costs", *words)["seconds"]
    return seconds / (writers * events), (_cpu_seconds(postgres) - before) / (writers * events)


def _listens(process: psutil.Process, port: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return {"-D", str(port)} <= set(process.cmdline())
    return False


def _cpu_seconds(postgres: psutil.Process) -> float:
    """Of a server, the processes that it has ended, and those that it has."""
    times = postgres.cpu_times()
    seconds = times.user + times.system + times.children_user + times.children_system
    for child in postgres.children():
        with contextlib.suppress(psutil.Error):
            seconds += sum(child.cpu_times()[:2])
    return seconds


def _write_events(arguments: argparse.Namespace, begins: Any) -> None:
    begins.wait()
    report_in_an_op(arguments)


def store_events(writers: int, events: int, url: str) -> Document:
    """The process whose children store events at the same time."""
    forked = multiprocessing.get_context("fork")
    arguments = argparse.Namespace(side="postgres batched", events=events, url=url)
    # creates the tables
    report_in_an_op(argparse.Namespace(side="postgres batched", events=1, url=url))
    begins = forked.Barrier(writers + 1)
    processes = [
        forked.Process(target=_write_events, args=(arguments, begins)) for _ in range(writers)
    ]
    for process in processes:
        process.start()
    begins.wait()
    begun = time.perf_counter()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a writer of events has failed")
    return {"seconds": time.perf_counter() - begun}


def _pool_seconds(model: str) -> float:
    with EncoderPool(EncodingSpec(model), devices="cpu") as pool:
        return seconds_of(pool.start)


def _published(folder: Path, files: int, rows: int) -> tuple[float, float, float]:
    """Seconds of a run over a small partition, of a further small file, and of a row of a large
    one."""
    with paced_pool() as pool:
        numbers = iter(range(1_000_000))

        def seconds(partitions: Iterable[Partition]) -> float:
            store = LocalStore(folder / f"output-{next(numbers)}")
            return seconds_of(lambda: embed(pool, partitions, store))

        small = statistics.median(seconds(ready_partitions(1, 10)) for _ in range(5))
        many = seconds(ready_partitions(files, 10))
        large = seconds(ready_partitions(1, rows))
    return small, max(0.0, many - small) / files, max(0.0, large - small) / rows


def _listed(folder: Path, counts: Sequence[int]) -> dict[int, float]:
    """Seconds to list so many files of a local folder."""
    (folder / "space").mkdir(parents=True)
    store, made, found = LocalStore(folder), 0, dict[int, float]()
    for count in counts:
        for number in range(made, count):
            (folder / "space" / f"category-{number:06}.parquet").touch()
        made = count
        found[count] = min(seconds_of(lambda: OutputState(store, "space")) for _ in range(3))
    return found


@dataclass(frozen=True, slots=True)
class _NullRuns:
    """See `CatalogRuns`; nothing is encoded."""

    output: Path
    refused: tuple[()] = ()

    def open_pool(self) -> EncoderPool:
        return EncoderPool(EncodingSpec("hash://16"), devices="cpu")

    def list_partitions(self) -> list[Partition]:
        return []

    def new_run(
        self,
        partitions: Sequence[Partition],
        pool: EncoderPool,
        *,
        at_once: int = 1,
        **options: Any,
    ) -> EmbeddingRun:
        return EmbeddingRun(partitions, LocalStore(self.output), pool, **options)


class _NullCluster:
    """See `Cluster`; machines answer one after the other, without a pause."""

    def __init__(self, count: int) -> None:
        facts = MachineFacts("host", "", "", "fp32", "cpu", "", 1)
        self._machines = {f"machine-{number}": facts for number in range(count)}

    def machines(self) -> dict[str, MachineFacts]:
        return dict(self._machines)

    def embed(self, machine: str, stretch: Stretch) -> tuple[str, Stretch, float]:
        return machine, stretch, time.perf_counter()

    def wait(
        self, tasks: Sequence[tuple[str, Stretch, float]], seconds: float
    ) -> list[tuple[str, Stretch, float]]:
        return list(tasks[:1])

    def result(self, task: tuple[str, Stretch, float]) -> StretchOutcome:
        receipts = [
            Receipt(key, "encoded", key, 1, 16, 1_000, "", 0, "v1", "", "", "null")
            for key in task[1].keys
        ]
        return StretchOutcome([*receipts], stopped=False)

    def request(self, machines: int) -> None:
        pass

    def stop(self, task: tuple[str, Stretch, float]) -> None:
        pass

    def leave_out(self, machine: str) -> None:
        pass

    def is_starting(self) -> bool:
        return False

    def close(self) -> None:
        pass


def _driver_seconds(folder: Path, machines: int, stretches: int) -> float:
    """Of the driver's processor, for a stretch of one partition."""
    runs = _NullRuns(folder / "driven")
    partitions = ready_partitions(stretches, 1)
    cluster = _NullCluster(machines)
    # Machines so slow that each stretch is a partition, and whose files nobody has written.
    slow = (
        patch("surge_dagster.cluster.stretches._FIRST_SPEED", 1),
        patch.object(MachineWork, "bytes_per_second", None),
    )
    with (
        runs.open_pool() as pool,
        slow[0],
        slow[1],
        patch("surge_dagster.cluster.cluster_run.require_shared"),
    ):
        run = ClusterRun(partitions, runs, pool, lambda: cluster, force=True, grace_seconds=1.0)
        begun = time.process_time()
        count = sum(isinstance(event, Receipt) for event in run.events())
    assert count == stretches
    return (time.process_time() - begun) / stretches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--writers", type=int, required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--url", required=True)
    print(json.dumps(store_events(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
