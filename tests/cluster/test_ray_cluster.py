"""Ray itself, on hosts of a network of their own: files as on one machine, whatever becomes of the hosts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from surge_dagster.catalogs.synthetic import build_synthetic_catalog
from tests.cluster.hosts import Host, hosts
from tests.extras import require
from tests.service.lanes import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

# What Ray's autoscaler is asked for.
REQUESTED = """
import ray
from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.experimental.internal_kv import _internal_kv_get
ray.init("auto", logging_level="ERROR")
print((_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or b"none").decode())
"""
MODEL, BIN = "hash://64", Path(sys.executable).parent


@pytest.fixture
def network() -> Iterator[list[Host]]:
    """A head and two hosts of a Ray cluster."""
    require("ray", "ray")
    folder = tempfile.mkdtemp(prefix="ray")  # short, for Unix sockets
    try:
        with hosts(3) as network:
            options = ("--num-cpus", 1, "--temp-dir", folder, "--disable-usage-stats")
            head = network[0]
            head.run(
                BIN / "ray",
                "start",
                "--head",
                "--node-ip-address",
                head.address,
                "--port",
                6379,
                *options,
                "--include-dashboard=false",
            )
            for host in network[1:]:
                join(host, head)
            yield network
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def join(host: Host, head: Host) -> None:
    address = f"{head.address}:6379"
    host.run(
        BIN / "ray",
        "start",
        "--address",
        address,
        "--node-ip-address",
        host.address,
        "--num-cpus",
        1,
        "--disable-usage-stats",
    )


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    build_synthetic_catalog(tmp_path / "catalog", texts=200_000, partitions=150, sigma=1.72, seed=1)
    return tmp_path / "catalog"


def embedding(host: Host, catalog: Path) -> subprocess.Popen[str]:
    command = (BIN / "surge-dagster", "embed", catalog, catalog.parent / "output", "--model", MODEL)
    return host.popen(*command, "--cluster", "auto", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def files(catalog: Path) -> int:
    return len(list((catalog.parent / "output").glob("hash-64*/*.parquet")))


def assert_verified(catalog: Path) -> None:
    command = [BIN / "surge-dagster", "verify", catalog, catalog.parent / "output", "--model", MODEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_run_goes_on_when_a_host_ends_and_when_another_joins(network: list[Host], catalog: Path) -> None:
    head, lost, late = network
    late.kill()
    with embedding(head, catalog) as process:
        until(lambda: files(catalog) or process.poll() is not None)
        lost.kill()
        join(late, head)
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert "150 partitions written" in output
    assert_verified(catalog)
    assert head.run(sys.executable, "-c", REQUESTED).splitlines()[-1] == "[]", "an autoscaler may end all machines"


def test_run_whose_driver_ends_is_continued_by_the_next_and_leaves_no_machine_at_work(
    network: list[Host], catalog: Path
) -> None:
    head = network[0]
    with embedding(head, catalog) as process:
        until(lambda: files(catalog) or process.poll() is not None)
        process.kill()
    done = files(catalog)
    until(lambda: not [pid for host in network for pid in host.pids() if is_machine(pid)])
    with embedding(head, catalog) as process:
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert done > 0 and "150 partitions written" not in output
    assert_verified(catalog)


def is_machine(pid: int) -> bool:
    try:
        return b"ray::Machine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
