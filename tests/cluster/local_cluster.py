"""A cluster whose machines are threads of the tests, each with a pool of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surge_dagster.cluster.cluster_run import ClusterRun
from surge_dagster.cluster.machine import (
    Machine,
    MachineFacts,
    MachineLost,
    Stretch,
    StretchOutcome,
)
from surge_dagster.cluster.stretches import StretchSizes
from surge_dagster.config.catalog_settings import CatalogSettings
from surge_dagster.config.run_setup import RunSetup
from surge_dagster.config.settings import EncoderSettings, FileSettings
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.output.freshness import Freshness
from surge_dagster.engine.plan.dividing import Piece
from surge_dagster.engine.support.waiting import in_background
from tests.small_catalogs import assert_embedded, numbered_rows

CATALOG = {f"p{number:02}": numbered_rows(f"p{number:02}", 5 + 7 * number) for number in range(12)}
ONE_PARTITION = StretchSizes(seconds=0, least_seconds=0)  # in each stretch
RANGES = StretchSizes(seconds=1, first_bytes_per_second=12_000)  # of a large partition
MODEL = "hash://16"
Task = tuple[str, int, Future[StretchOutcome]]


def setup_in(
    root: Path, kind: type[RunSetup] = RunSetup, *, divides: bool = True, **options: Any
) -> RunSetup:
    """Of runs over `root`/catalog into `root`/output.

    Args:
        divides: whether partitions are divided into ranges.
    """
    return kind(
        CatalogSettings(missing_text="refuse" if divides else "skip"),  # pyright: ignore[reportCallIssue]
        EncoderSettings(model=MODEL, devices="cpu", b_min=50, b_max=100),  # pyright: ignore[reportCallIssue]
        FileSettings(),
        source=str(root / "catalog"),
        output=str(root / "output"),
        grace_seconds=20.0,
        **options,
    )


@dataclass(eq=False)
class LocalCluster:
    """See `Cluster`.

    Args:
        names: of the machines that are there at first.
        before: called with a machine and its keys before it embeds them; if it raises
            `MachineLost`, the machine is lost with all stretches that it has.
    """

    setup: RunSetup
    names: list[str]
    before: Callable[[str, Sequence[str]], object] = lambda machine, keys: None
    given: list[tuple[str, Stretch]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    requested: list[int] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    token: str = ""
    _machines: dict[str, Machine] = field(default_factory=dict)
    _begun: list[Future[StretchOutcome]] = field(default_factory=list)

    def connect(self, token: str) -> LocalCluster:
        self.token = token
        return self

    def machines(self) -> dict[str, MachineFacts]:
        names = list(self.names)  # other threads change them
        for name in names:
            if name not in self._machines:
                self._machines[name] = Machine(self.setup, self.token)
        return {name: self._machines[name].facts() for name in names}

    def given_to(self, machine: str) -> list[Piece]:
        """The pieces that a machine was given, in their order."""
        return [stretch.piece for name, stretch in self.given if name == machine]

    def request(self, machines: int) -> None:
        self.requested.append(machines)

    def embed(self, machine: str, stretch: Stretch, freshness: Mapping[str, Freshness]) -> Task:
        number = len(self.given)
        self.given.append((machine, stretch))

        def work() -> StretchOutcome:
            self.before(machine, stretch.piece.keys)
            return self._machines[machine].embed(number, stretch.piece, freshness)

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

    def close(self) -> None:
        for machine in self._machines.values():
            machine._pool.close()
        self.closed.set()
        wait(self._begun)  # also those of lost machines


def cluster_run(
    cluster: LocalCluster, pool: EncoderPool, sizes: StretchSizes = ONE_PARTITION
) -> ClusterRun:
    source = cluster.setup.open_source()
    return ClusterRun(cluster.setup, source, pool, cluster.connect, sizes=sizes)


def embed_all(cluster: LocalCluster, pool: EncoderPool) -> list[Any]:
    """The events of a whole run."""
    return list(cluster_run(cluster, pool).events())


def assert_all_embedded(setup: RunSetup, pool: EncoderPool) -> None:
    for key, rows in CATALOG.items():
        assert_embedded(Path(setup.output), pool.space.name, key, rows)
