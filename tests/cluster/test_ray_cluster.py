"""Ray itself, on hosts of a network of their own: files as on one machine, whatever becomes of the
hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.synthetic import build_synthetic_catalog
from tests.cluster.ray_hosts import BIN, MACHINE, MODEL, RayHosts, ray_hosts
from tests.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

# What Ray's autoscaler is asked for.
REQUESTED = """
import ray
from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.experimental.internal_kv import _internal_kv_get
ray.init("auto", logging_level="ERROR")
print((_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or b"none").decode())
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayHosts]:
    """A head and two hosts of a Ray cluster."""
    with ray_hosts(3, tmp_path) as cluster:
        yield cluster


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    build_synthetic_catalog(tmp_path / "catalog", texts=200_000, partitions=150, sigma=1.72, seed=1)
    return tmp_path / "catalog"


def files(catalog: Path) -> int:
    return len(list((catalog.parent / "output").glob("hash-64*/*.parquet")))


@contextmanager
def whole_run(cluster: RayHosts, catalog: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a driver on the head, whose run must end well."""
    log = catalog.parent / "log"
    with cluster.embedding(catalog, log) as process:
        yield process
    assert process.returncode == 0, log.read_text()
    assert "150 partitions written" in log.read_text()
    cluster.verify(catalog)


def test_run_goes_on_when_a_host_ends_and_when_another_joins(
    cluster: RayHosts, catalog: Path
) -> None:
    _, lost, late = cluster.hosts
    late.kill()
    late.boot()
    with whole_run(cluster, catalog) as process:
        until(lambda: files(catalog) or process.poll() is not None)
        lost.kill()
        cluster.join(late)
    asked = cluster.head.run(sys.executable, "-c", REQUESTED).splitlines()[-1]
    assert asked == "[]", "an autoscaler may end all machines"


def test_machine_whose_process_is_killed_starts_again_and_goes_on(
    cluster: RayHosts, catalog: Path
) -> None:
    killed = cluster.hosts[1]
    with whole_run(cluster, catalog) as process:
        until(lambda: files(catalog) >= 10 or process.poll() is not None)
        for pid in killed.pids():
            if MACHINE in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        until(lambda: process.poll() is not None or killed.runs(MACHINE))


def test_run_whose_head_ends_says_so_in_a_line(
    cluster: RayHosts, catalog: Path, tmp_path: Path
) -> None:
    head, driver, _ = cluster.hosts
    command = (BIN / "surge-dagster", "embed", catalog, tmp_path / "output", "--model", MODEL)
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        driver.popen(
            *command,
            "--cluster",
            f"ray://{head.address}:10001",
            "--json",
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        until(lambda: files(catalog) or process.poll() is not None)
        head.kill()
    said = log.read_text()
    assert process.returncode == 1 and "the Ray cluster does not answer any more: " in said, said
    assert "Traceback" not in said, said
