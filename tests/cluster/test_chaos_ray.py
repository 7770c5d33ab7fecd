"""Runs over a Ray cluster whose hosts, links and drivers fail: every file verified, nothing lost,
nothing doubled.

All of them together kill 60 hosts and 15 drivers, and cut 15 links.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from benchmarks.synthetic import build_synthetic_catalog
from tests.cluster.hosts import Host, hosts, parquet_files
from tests.cluster.ray_hosts import MACHINE, RayHosts
from tests.cluster.servers import Bucket
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
