"""The Ray clusters of deploy/ on hosts of a network of their own, started by the scripts
themselves."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.synthetic import build_synthetic_catalog
from tests.cluster.hosts import Host, hosts
from tests.extras import require
from tests.pages import DEPLOY, deployed
from tests.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent
MODEL = "hash://64"
_NUMBERS = itertools.count()
LISTED = (
    "import ray; ray.init('auto', log_to_driver=False); print('nodes:', sum(n['Alive'] for n in "
    "ray.nodes()))"
)


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    require("ray", "ray")
    with hosts(4, tmp_path_factory.getbasetemp()) as network:
        for host in network:  # of its routes Ray takes a host's address
            subprocess.run(
                ["ip", "-n", host.namespace, "route", "add", "default", "dev", "eth0"], check=True
            )
        yield network


@pytest.fixture
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c")
    build_synthetic_catalog(folder / "catalog", texts=20_000, partitions=40, sigma=1.72, seed=1)
    return folder / "catalog"


@pytest.fixture
def environment(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Of every host; `tools` is a folder for stand-ins."""
    tools = tmp_path_factory.mktemp("t")
    monkeypatch.setenv(
        "PATH", f"{tools}:{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    )
    return {"RAY_TMPDIR": str(tools), "SURGE_MODEL": MODEL, "tools": str(tools)}


def stand_in(environment: dict[str, str], name: str, *lines: str) -> None:
    path = Path(environment["tools"]) / name
    path.write_text("\n".join(["#!/bin/bash", *lines]))
    path.chmod(0o755)


def start(host: Host, *command: object, env: dict[str, str]) -> tuple[subprocess.Popen[str], Path]:
    """A process, and the file with its output: what Ray leaves behind would hold a pipe open."""
    log = Path(env["tools"]) / f"{next(_NUMBERS)}.log"
    with log.open("w") as opened:
        return host.popen(*command, env=env, stdout=opened, stderr=subprocess.STDOUT), log


def ended(started: tuple[subprocess.Popen[str], Path]) -> str:
    """The output; the process must succeed."""
    process, log = started
    assert process.wait(timeout=400) == 0, log.read_text()
    return log.read_text()


def assert_verified(catalog: Path, output: Path) -> None:
    command = [BIN / "surge-dagster", "verify", catalog, output, "--model", MODEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(output.glob("hash-64*/*.parquet"))) == 40


def test_slurm_job_embeds_on_all_its_nodes_and_lets_no_other_user_in(
    network: list[Host], catalog: Path, environment: dict[str, str]
) -> None:
    tools = Path(environment["tools"])
    stand_in(environment, "scontrol", *(f"echo {host.address}" for host in network))
    stand_in(
        environment,
        "srun",
        f'env | grep ^RAY_ > "{tools}/job"',
        "while [[ $1 == --* ]]; do shift; done",
        f"""printf '%s\\0' "$@" > "{tools}/new" && mv "{tools}/new" "{tools}/task" """,
        "sleep infinity",
    )
    output = catalog.parent / "output"
    nodes = {"SLURM_JOB_NODELIST": "node[1-4]"}
    job = start(
        network[0],
        "bash",
        DEPLOY / "slurm" / "embed.sbatch",
        catalog,
        output,
        env=environment | nodes,
    )
    until((tools / "task").exists)
    *task, _ = (tools / "task").read_text().split("\0")
    of_job = dict(line.split("=", 1) for line in (tools / "job").read_text().splitlines())
    for number, host in enumerate(network):
        start(host, *task, env=environment | of_job | {"SLURM_PROCID": str(number)})
    assert "40 partitions written" in ended(job)
    assert_verified(catalog, output)

    until(
        lambda: (
            "nodes: 4" in ended(start(network[1], "python", "-c", LISTED, env=environment | of_job))
        )
    )
    stranger = environment | of_job | {"RAY_AUTH_TOKEN": "0" * 64}
    process, log = start(network[1], "python", "-c", LISTED, env=stranger)
    assert process.wait(timeout=400) != 0
    assert "nodes: " not in log.read_text()


def test_skypilot_task_embeds_on_all_its_nodes_and_ends_on_each(
    network: list[Host], catalog: Path, environment: dict[str, str]
) -> None:
    output = catalog.parent / "output"
    addresses = "\n".join(host.address for host in network)
    task = environment | {
        "SKYPILOT_NODE_IPS": addresses,
        "SOURCE": str(catalog),
        "OUTPUT": str(output),
    }
    run = deployed("skypilot/embed.yaml")["run"]
    nodes = [
        start(host, "bash", "-c", run, env=task | {"SKYPILOT_NODE_RANK": str(rank)})
        for rank, host in enumerate(network)
    ]
    told = [ended(node) for node in nodes]
    assert "40 partitions written" in told[0]
    assert not any("written" in each for each in told[1:])
    assert_verified(catalog, output)
    address = {"RAY_ADDRESS": f"{network[0].address}:6379"}
    assert "nodes: 4" in ended(start(network[0], "python", "-c", LISTED, env=environment | address))


def test_job_on_kubernetes_and_a_driver_outside_embed_on_the_workers_alone(
    network: list[Host], catalog: Path, environment: dict[str, str]
) -> None:
    """With Ray as KubeRay starts it in pods: by `rayStartParams` and the limit of GPUs."""
    head, *workers, outside = network
    spec = deployed("ray/cluster.yaml")["spec"]
    of_head, of_worker = (
        [word for name, value in group["rayStartParams"].items() for word in (f"--{name}", value)]
        for group in (spec["headGroupSpec"], spec["workerGroupSpecs"][0])
    )
    common = ("--disable-usage-stats", "--include-dashboard=false")
    ended(start(head, "ray", "start", "--head", "--port", 6379, *of_head, *common, env=environment))
    address = environment | {"RAY_ADDRESS": f"{head.address}:6379"}
    for worker in workers:
        join = (
            "ray",
            "start",
            "--address",
            address["RAY_ADDRESS"],
            "--num-gpus",
            1,
            *of_worker,
            common[0],
        )
        ended(start(worker, *join, env=environment))

    output = catalog.parent / "of-job"
    entrypoint = deployed("ray/job.yaml")["spec"]["entrypoint"]
    entrypoint = entrypoint.replace("s3://shop/products", str(catalog)).replace(
        "s3://shop/embeddings", str(output)
    )
    assert "40 partitions written" in ended(start(head, "sh", "-c", entrypoint, env=address))
    assert_verified(catalog, output)

    output = catalog.parent / "of-driver"
    driver = ("surge-dagster", "embed", catalog, output, "--cluster", f"ray://{head.address}:10001")
    assert "40 partitions written" in ended(start(outside, *driver, env=environment))
    assert_verified(catalog, output)
