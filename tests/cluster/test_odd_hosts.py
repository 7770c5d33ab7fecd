"""Hosts of a Ray cluster that fail in odd ways: nothing wrong is written, and the run says in a
line what happened."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.synthetic import build_synthetic_catalog
from tests.cluster.hosts import hosts
from tests.cluster.ray_hosts import MACHINE, RayHosts
from tests.cluster.servers import Bucket
from tests.extras import require
from tests.service.lanes import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

HOST_BYTES = 330 << 20  # of one at work: Ray, an actor and its encoder
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    build_synthetic_catalog(tmp_path / "catalog", texts=200_000, partitions=100, seed=1)
    return tmp_path / "catalog"


@contextmanager
def ray_hosts(count: int, catalog: Path, *options: object) -> Iterator[RayHosts]:
    require("ray", "ray")
    with hosts(count, catalog.parent) as made:
        cluster = RayHosts(made, options=options)
        cluster.start()
        yield cluster


def published(catalog: Path) -> int:
    return len(list((catalog.parent / "output").glob("hash-64*/*.parquet")))


def embed(cluster: RayHosts, catalog: Path, seconds: float = 400) -> str:
    """What a run says that succeeds, within so many seconds of a machine that other work keeps
    busy."""
    log = catalog.parent / "last"
    assert cluster.embedding(catalog, log).wait(seconds) == 0, log.read_text()
    return log.read_text()


def test_half_of_the_hosts_go_on_where_all_were_killed(catalog: Path) -> None:
    with ray_hosts(5, catalog) as cluster:
        driver = cluster.embedding(catalog, catalog.parent / "log")
        until(lambda: published(catalog) >= 10)
        for host in cluster.hosts:
            host.kill()
        assert driver.wait(60) < 0
        done = published(catalog)
        assert 0 < done < 100
        half = RayHosts(cluster.hosts[:2])
        for host in half.hosts:
            host.boot()
        half.start()
        log = embed(half, catalog)
        assert f"{100 - done} partitions written, {done} fresh, 0 failed" in log
        half.verify(catalog)


def test_partition_whose_source_is_replaced_while_its_ranges_are_in_work_is_of_one_source(
    tmp_path: Path,
) -> None:
    catalog, log = tmp_path / "catalog", tmp_path / "log"
    build_synthetic_catalog(catalog, texts=2_000_000, partitions=2, sigma=3, seed=1)
    build_synthetic_catalog(tmp_path / "newer", texts=2_000_000, partitions=2, sigma=3, seed=2)
    with ray_hosts(4, catalog) as cluster:
        driver = cluster.embedding(catalog, log)
        staged = tmp_path / "output" / ".staging"
        until(lambda: driver.poll() is not None or list(staged.rglob("*.parquet")))
        assert driver.poll() is None, log.read_text()
        for newer in (tmp_path / "newer").rglob("*.parquet"):
            newer.replace(catalog / newer.relative_to(tmp_path / "newer"))
        assert driver.wait(400) == 1
        told = [
            line
            for line in log.read_text().splitlines()
            if "refused: " in line and "'category-0001'" in line
        ]
        assert len(told) == 1
        embed(cluster, catalog)
        cluster.verify(catalog)
        assert not list(staged.rglob("*.parquet"))


def test_machine_whose_process_is_killed_starts_again_and_goes_on(tmp_path: Path) -> None:
    catalog, log = tmp_path / "catalog", tmp_path / "log"
    build_synthetic_catalog(catalog, texts=700_000, partitions=150, seed=1)
    with ray_hosts(2, catalog) as cluster:
        driver = cluster.embedding(catalog, log)
        until(lambda: published(catalog) >= 10)
        killed = cluster.hosts[1]
        for pid in killed.pids():
            if MACHINE in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        until(lambda: driver.poll() is not None or killed.runs(MACHINE))
        assert driver.wait(400) == 0, log.read_text()
        assert "150 partitions written" in log.read_text() and "done again" in log.read_text()
        cluster.verify(catalog)


def test_bucket_that_ignores_conditions_of_writes_is_refused_at_the_start(catalog: Path) -> None:
    require("ray", "ray")
    with hosts(4, catalog.parent) as made:
        bucket = Bucket(made[-1], ("ignoring-conditions",))
        bucket.start()
        cluster = RayHosts(made[:-1], bucket.url, bucket.env)
        cluster.start()
        log = catalog.parent / "log"
        assert cluster.embedding(catalog, log).wait(200) == 2
        told, as_json = log.read_text().splitlines()
        assert (
            "ignores conditions of writes" in told
            and told in f"error: {json.loads(as_json)['error']}"
        )
        assert bucket.objects() == {}


def test_host_with_a_full_disk_harms_nothing(catalog: Path) -> None:
    with ray_hosts(3, catalog) as cluster:
        full = cluster.hosts[-1]
        full.kill()
        full.boot("64m")
        until(lambda: len(cluster.supervise()) == 3)
        full.fill_disk()
        log = embed(cluster, catalog)
        assert "100 partitions written" in log
        cluster.verify(catalog)


def test_host_whose_clock_is_a_day_ahead_harms_nothing(catalog: Path) -> None:
    if not FAKETIME.exists():
        pytest.skip("not installed: the Debian package faketime")
    fake = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+1d", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    with ray_hosts(3, catalog) as cluster:
        ahead = cluster.hosts[-1]
        assert "tomorrow" in ahead.run(
            "sh",
            "-c",
            'test "$(date -d tomorrow +%F)" = "$(env LD_PRELOAD= date -d "2 days" +%F)" && echo tomorrow',
            env=fake,
        )
        ahead.kill()
        ahead.boot()
        cluster.join(ahead, env=fake)
        until(lambda: len(cluster.supervise()) == 3)
        assert ahead.address in cluster.alive()
        log = embed(cluster, catalog)
        assert "does not start" not in log and "100 partitions written" in log
        cluster.verify(catalog)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [8, 64])
def test_many_machines_that_start_in_one_second_make_one_space(catalog: Path, count: int) -> None:
    """Ray is started on all hosts first; the run starts its actors together, as soon as it finds
    them."""
    if psutil.virtual_memory().available < count * HOST_BYTES:
        pytest.skip(f"{count} hosts need {count * HOST_BYTES >> 30} GiB of memory")
    with ray_hosts(count, catalog, "--include-log-monitor=false") as cluster:
        log = embed(cluster, catalog, 1_200)
        assert (
            "100 partitions written" in log
            and "is not used" not in log
            and "does not start" not in log
        )
        cluster.verify(catalog)
        assert len(list((catalog.parent / "output").glob("hash-64*"))) == 1
