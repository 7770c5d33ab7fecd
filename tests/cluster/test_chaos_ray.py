"""Runs over a Ray cluster whose hosts, links and drivers fail: every file verified, nothing lost,
nothing doubled.

All of them together kill 60 hosts and 15 drivers, and cut 15 links.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from benchmarks.synthetic import build_synthetic_catalog
from tests.cluster.hosts import Host, parquet_files
from tests.cluster.ray_hosts import MACHINE, RayHosts, ray_hosts
from tests.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

PARTITIONS = 200
FAULTS = ["host"] * 12 + ["moment"] * 2 + ["link"] + ["driver"] * 3


@dataclass
class Production:
    """A catalog that changes and is embedded again and again, by one driver after the other."""

    cluster: RayHosts
    root: Path
    version: int = 0
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
        texts = 200_000 if self.cluster.bucket else 800_000
        build_synthetic_catalog(self.catalog, texts=texts, partitions=PARTITIONS, seed=self.version)

    def begin(self) -> subprocess.Popen[str]:
        return self.cluster.embedding(self.catalog, self.log)

    def drive(self) -> None:
        """Keep a driver at work; one that has ended is followed by one for newer texts."""
        code = None if self._driver is None else self._driver.poll()
        if code is not None and code >= 0:
            assert code == 0, self.log.read_text()
            self.change()
        if self._driver is None or code is not None:
            self._driver = self.begin()

    def kill_driver(self) -> None:
        assert self._driver is not None
        self._driver.kill()
        self._driver.wait()

    def published(self) -> set[tuple[str, object]]:
        """Each file, with what tells its versions apart."""
        if self.cluster.bucket is not None:
            objects = self.cluster.bucket.objects().items()
            return {(name, etag) for name, etag in objects if name.endswith(".parquet")}
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
    with ray_hosts(5, tmp_path, with_bucket=storage == "bucket") as cluster:
        production = Production(cluster, tmp_path)
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
