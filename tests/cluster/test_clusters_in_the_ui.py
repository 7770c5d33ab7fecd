"""Through Dagster's pages: a run over a Ray cluster, and a host that is killed in it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from surge_dagster.catalogs.folder import write_partition
from tests.cluster.hosts import Host, hosts
from tests.cluster.ray_hosts import RayHosts
from tests.dagster.camera import camera_on
from tests.dagster.dev_server import CHILD_PATH, dev_server, eventually
from tests.extras import require
from tests.service.lanes import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

LARGE = 20
SMALL = 40
OF_LARGE = 4_000
OF_SMALL = 500
_NEWNET = 0x40000000  # CLONE_NEWNET of sched.h; Python has `os.setns` from 3.12 on


@contextmanager
def in_network_of(host: Host) -> Iterator[None]:
    """Let this thread, and the processes that it starts, be in the network of a host."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(namespace: int) -> None:
        assert libc.setns(namespace, _NEWNET) == 0, os.strerror(ctypes.get_errno())

    paths = "/proc/thread-self/ns/net", f"/run/netns/{host.namespace}"
    own, other = (os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths)
    try:
        enter(other)
        yield
    finally:
        enter(own)
        os.close(own)
        os.close(other)


def build_catalog(catalog: Path, gates: Path) -> None:
    """A hundred thousand texts; an encoder waits at each small partition until its gate is open."""
    catalog.mkdir()
    for number in range(LARGE + SMALL):
        rows = OF_LARGE if number < LARGE else OF_SMALL
        first = f"a text of {number}" if number < LARGE else f"wait for {gates / str(number)}"
        texts = [first, *(f"text {row} of partition {number}" for row in range(1, rows))]
        ids = pa.array([f"{number}-{row}" for row in range(rows)])
        write_partition(catalog, f"p{number:02}", "v1", [(ids, pa.array(texts))])


def test_page_of_a_run_names_the_host_that_was_lost(
    tmp_path: Path,
) -> None:
    require("ray", "ray")
    gates = tmp_path / "gates"
    gates.mkdir()
    build_catalog(tmp_path / "catalog", gates)
    with hosts(5, tmp_path) as made, in_network_of(made[0]):
        cluster = RayHosts(made, env={"PYTHONPATH": CHILD_PATH, "GATED_BACKEND": "1"})
        cluster.start("--num-cpus", 0)  # the head encodes nothing
        address = f"ray://{cluster.head.address}:10001"
        joins = (sys.executable, "-c", "import sys, ray; ray.init(sys.argv[1])", address)
        until(lambda: subprocess.run(joins, check=False, capture_output=True).returncode == 0, 200)
        with (
            dev_server(tmp_path, cluster=address, model="hash://64") as server,
            camera_on(server, tmp_path / "pictures") as camera,
        ):
            run = server.launch("catalog_refresh")
            eventually(
                "the first green partitions",
                lambda: server.partitions()["materialized"],
                seconds=120,
            )
            green = server.partitions()["materialized"]
            assert len(green) < LARGE + SMALL
            camera.take(
                "before", "/assets/embeddings?view=partitions", f"{LARGE + SMALL} partitions"
            )
            names = eventually("a host that waits at a gate", lambda: waiting(gates), seconds=120)
            lost = next(host for host in made if host.name == names[0])
            lost.kill()
            told = f"the machine {lost.address} was lost"
            eventually(
                "a line about the lost host", lambda: said(server.logged(run), told), seconds=120
            )
            for number in range(LARGE, LARGE + SMALL):
                (gates / str(number)).touch()
            assert server.finished(run) == "SUCCESS"
            for line in said(server.logged(run), told):
                assert line.endswith("done again")
            # the page has no more lines than fit
            camera.take("run", f"/runs/{run}?logs=lost", told)
            camera.take(
                "after", "/assets/embeddings?view=partitions", f"{LARGE + SMALL} partitions"
            )
            camera.take("machines", "/assets/superbatches?view=overview", "machines")
            assert len(server.partitions()["materialized"]) == LARGE + SMALL
        cluster.verify(tmp_path / "catalog")


def waiting(gates: Path) -> list[str]:
    """Names of hosts."""
    return [name for path in gates.glob("*.reached") if (name := path.read_text())]


def said(lines: list[str], told: str) -> list[str]:
    return [line for line in lines if told in line]
