"""A cluster whose machines are threads of the tests, each with a pool of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surge_dagster.cluster.cluster_run import ClusterRun, MachineLost
from surge_dagster.cluster.machine import CatalogRuns, Machine, MachineFacts, StretchOutcome
from surge_dagster.cluster.stretches import Stretch
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.waiting import in_background
from surge_dagster.engine.tables.opening import open_source
from tests.engine.runs import make_run
from tests.small_catalogs import Rows, assert_embedded, numbered_rows, partition_of

SPEC = EncodingSpec("hash://16")
CATALOG = {f"p{number:02}": numbered_rows(f"p{number:02}", 5 + 7 * number) for number in range(12)}
Task = tuple[str, int, Future[StretchOutcome]]


@dataclass(frozen=True)
class SmallRuns:
    """See `CatalogRuns`."""

    catalog: Mapping[str, Rows]
    output: Path
    refused: tuple[()] = ()

    def open_pool(self) -> EncoderPool:
        return EncoderPool(SPEC, devices="cpu")

    def list_partitions(self) -> list[Partition]:
        return [partition_of(key, rows) for key, rows in self.catalog.items()]

    def new_run(
        self,
        partitions: Sequence[Partition],
        pool: EncoderPool,
        *,
        at_once: int = 1,
        **options: Any,
    ) -> EmbeddingRun:
        return make_run(pool, partitions, self.output, **options)


@dataclass(frozen=True)
class FolderRuns(SmallRuns):
    """Over a catalog on disk, in `output`/catalog."""

    def list_partitions(self) -> list[Partition]:
        return list(open_source(self.output / "catalog"))

    def new_run(
        self,
        partitions: Sequence[Partition],
        pool: EncoderPool,
        *,
        at_once: int = 1,
        **options: Any,
    ) -> EmbeddingRun:
        return make_run(pool, partitions, self.output / "output", **options)


@dataclass(eq=False)
class LocalCluster:
    """See `Cluster`.

    Args:
        names: of the machines that are there at first.
        before: called with a machine and its keys before it embeds them; if it raises
            `MachineLost`, the machine is lost with all stretches that it has.
    """

    runs: CatalogRuns
    names: list[str]
    before: Callable[[str, Sequence[str]], None] = lambda machine, keys: None
    given: list[tuple[str, Stretch]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    requested: list[int] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    _machines: dict[str, Machine] = field(default_factory=dict)
    _begun: list[Future[StretchOutcome]] = field(default_factory=list)

    def machines(self) -> dict[str, MachineFacts]:
        names = list(self.names)  # other threads change them
        for name in names:
            if name not in self._machines:
                self._machines[name] = Machine(self.runs)
        return {name: self._machines[name].facts() for name in names}

    def request(self, machines: int) -> None:
        self.requested.append(machines)

    def embed(self, machine: str, stretch: Stretch) -> Task:
        number = len(self.given)
        self.given.append((machine, stretch))

        def work() -> StretchOutcome:
            self.before(machine, stretch.keys)
            return self._machines[machine].embed(
                number, stretch.keys, stretch.ranges, again=stretch.is_again
            )

        self._begun.append(in_background(work, "test-machine"))
        return machine, number, self._begun[-1]

    def wait(self, tasks: Sequence[Task], seconds: float) -> list[Task]:
        done, _ = wait([future for *_, future in tasks], seconds, FIRST_COMPLETED)
        return [task for task in tasks if task[-1] in done]

    def result(self, task: Task) -> StretchOutcome:
        machine, _, future = task
        if machine not in self.names:
            raise MachineLost(f"{machine} was lost with another stretch")
        try:
            return future.result()
        except MachineLost:
            self.names.remove(machine)
            raise

    def stop(self, task: Task) -> None:
        machine, number, _ = task
        self.stopped.append(machine)
        self._machines[machine].stop(number)

    def leave_out(self, machine: str) -> None:
        self.names.remove(machine)

    def is_starting(self) -> bool:
        return False

    def close(self) -> None:
        for machine in self._machines.values():
            machine._pool.close()
        self.closed.set()
        wait(self._begun)  # also those of lost machines


def cluster_run(
    cluster: LocalCluster, pool: EncoderPool, *, force: bool = False
) -> ClusterRun[Task]:
    runs = cluster.runs
    return ClusterRun(
        runs.list_partitions(), runs, pool, lambda: cluster, force=force, grace_seconds=20.0
    )


def assert_all_embedded(runs: SmallRuns, pool: EncoderPool) -> None:
    for key, rows in CATALOG.items():
        assert_embedded(runs.output, pool.space.name, key, rows)
