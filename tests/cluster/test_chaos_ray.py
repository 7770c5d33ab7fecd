"""Runs over a Ray cluster whose hosts, links and drivers fail: every file verified, nothing lost,
nothing doubled.

All of them together kill 60 hosts and 15 drivers, cut 15 links, and restart the database of
Dagster's runs 10 times.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import dagster as dg
import pytest

from benchmarks.synthetic import build_synthetic_catalog
from tests.cluster.hosts import ROOT, Host, hosts, parquet_files
from tests.cluster.ray_hosts import MACHINE, MODEL, RayHosts
from tests.cluster.servers import Bucket, Database, socket_folder
from tests.dagster.conftest import NAMES
from tests.extras import require
from tests.service.lanes import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

PARTITIONS = 200
FAULTS = ["host"] * 12 + ["moment"] * 2 + ["link"] + ["driver"] * 3


@contextmanager
def ray_hosts(count: int, root: Path) -> Iterator[RayHosts]:
    require("ray", "ray")
    with hosts(count, root) as made:
        cluster = RayHosts(made)
        cluster.start()
        yield cluster


@contextmanager
def ray_hosts_and_bucket(count: int, root: Path) -> Iterator[tuple[RayHosts, Bucket]]:
    require("ray", "ray")
    with hosts(count + 1, root) as made:
        bucket = Bucket(made[-1])
        bucket.start()
        cluster = RayHosts(made[:-1], bucket.url, bucket.env)
        cluster.start()
        yield cluster, bucket


@dataclass
class Production:
    """A catalog that changes and is embedded again and again, by one driver after the other.

    Attributes:
        ended: drivers that were not killed.
    """

    cluster: RayHosts
    bucket: Bucket | None
    root: Path
    texts: int
    version: int = 0
    ended: int = 0
    _driver: subprocess.Popen[str] | None = None

    @property
    def catalog(self) -> Path:
        return self.root / "catalog"

    @property
    def log(self) -> Path:
        return self.root / "log"

    def change(self) -> None:
        """All texts are others from now on."""
        self.version += 1
        build_synthetic_catalog(
            self.catalog, texts=self.texts, partitions=PARTITIONS, seed=self.version
        )

    def begin(self) -> subprocess.Popen[str]:
        return self.cluster.embedding(self.catalog, self.log)

    def drive(self) -> None:
        """Keep a driver at work: a killed one is followed by the next, one that has ended by one
        for newer texts."""
        if self._driver is not None and (code := self._driver.poll()) is not None:
            self._driver = None
            if code >= 0:
                assert code == 0, self.log.read_text()
                self.ended += 1
                self.change()
        if self._driver is None:
            self._driver = self.begin()

    def kill_driver(self) -> None:
        assert self._driver is not None
        self._driver.kill()
        self._driver.wait()

    def published(self) -> set[tuple[str, object]]:
        """Each file, with what tells its versions apart."""
        if self.bucket is not None:
            return {item for item in self.bucket.objects().items() if item[0].endswith(".parquet")}
        return set[tuple[str, object]](parquet_files(self.root / "output"))

    def until_more_is_published(self, files: int = 10) -> None:
        before = self.published()
        self.until(lambda: len(self.published() - before) >= files)

    def until(self, holds: Callable[[], object]) -> None:
        """Wait for a state, and keep Ray and a driver at work."""

        def held() -> object:
            self.cluster.supervise()
            self.drive()
            return holds()

        until(held, 180)

    def victim(self, rng: random.Random) -> Host:
        """A host that is at work."""
        at_work = list[Host]()

        def found() -> bool:
            at_work[:] = [host for host in self.cluster.hosts[1:] if host.runs(MACHINE)]
            return len(at_work) >= len(self.cluster.hosts) // 2

        self.until(found)
        return rng.choice(at_work)

    def end(self) -> None:
        """A last run, without faults, over all that is left; all is verified."""
        until(lambda: len(self.cluster.supervise()) == len(self.cluster.hosts))
        if self._driver is not None:
            self._driver.wait(300)
        assert self.begin().wait(300) == 0, self.log.read_text()
        assert len(self.published()) == PARTITIONS, "one file each, and nothing staged is left"
        self.cluster.verify(self.catalog)


@dataclass
class NightlyRuns(Production):
    """Whose drivers are runs of Dagster; one that fails is followed by the next.

    Attributes:
        env: of the runs, beside the cluster's.
        failed: how many did.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    failed: int = 0

    def begin(self) -> subprocess.Popen[str]:
        settings = {
            "source": self.catalog,
            "output": self.root / "output",
            "model": MODEL,
            "cluster": "auto",
        }
        given = {f"SURGE_{name.upper()}": str(value) for name, value in settings.items()}
        command = (sys.executable, "-m", "tests.dagster.requested_run", NAMES.refresh_job)
        with self.log.open("a") as log:
            run = self.cluster.head.popen(
                *command, env={**self.env, **given}, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        assert run.stdin is not None
        with run.stdin:
            run.stdin.write(json.dumps({"run_config": {}, "tags": {}}))
        return run

    def drive(self) -> None:
        if self._driver is not None and self._driver.poll() == 1:
            self._driver, self.failed = None, self.failed + 1
        super().drive()


def is_dead(cluster: RayHosts, host: Host) -> bool:
    return host.address not in cluster.alive()


@pytest.mark.parametrize(
    ("seed", "storage"), [(1, "folder"), (2, "bucket"), (3, "folder"), (4, "bucket"), (5, "folder")]
)
def test_partitions_survive_killed_hosts_cut_links_and_killed_drivers(
    tmp_path: Path, seed: int, storage: str
) -> None:
    rng = random.Random(seed)
    faults = rng.sample(FAULTS, len(FAULTS))
    opened = ray_hosts_and_bucket if storage == "bucket" else ray_hosts
    with opened(5, tmp_path) as made:
        cluster, bucket = made if isinstance(made, tuple) else (made, None)
        production = Production(
            cluster, bucket, tmp_path, texts=800_000 if bucket is None else 200_000
        )
        production.change()
        for fault in faults:
            production.until_more_is_published()
            victim = production.victim(rng)
            if fault == "driver":
                production.kill_driver()
            elif fault == "host":
                victim.kill()
                victim.boot()
            else:
                victim.cut()
                production.until_more_is_published()
                if fault == "link":
                    production.until(partial(is_dead, cluster, victim))
                victim.mend()
        production.end()


@pytest.mark.parametrize("restarts", [10])
def test_runs_of_dagster_over_a_cluster_survive_restarts_of_their_database(
    tmp_path: Path, restarts: int
) -> None:
    require("ray", "ray")
    require("postgres", "psycopg2", "dagster_postgres")
    with socket_folder() as sockets, hosts(4, tmp_path, sockets) as made:
        database = Database(made[-1], sockets)
        database.start()
        cluster = RayHosts(made[:-1])
        cluster.start()
        env = {"DAGSTER_HOME": str(database.home(tmp_path / "hosts")), "PYTHONPATH": str(ROOT)}
        production = NightlyRuns(cluster, None, tmp_path, texts=800_000, env=env)
        production.change()
        for _ in range(restarts):
            production.until_more_is_published()
            database.restart()
        production.end()
        assert production.failed <= restarts // 3, "a restart costs an attempt"
        keys = {
            path.name.removeprefix("partition=") for path in production.catalog.glob("partition=*")
        }
        with dg.DagsterInstance.from_config(
            str(database.home(tmp_path / "test", of_test=True))
        ) as instance:
            assert instance.get_materialized_partitions(NAMES.embeddings) == keys
            assert len(keys) == PARTITIONS
