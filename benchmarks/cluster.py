"""A run over the machines of a Ray cluster, compared with the sum of their speeds.

    make bench-cluster

The machines are network namespaces on this computer, so it needs root, iproute2 and the extra
`ray`. Their encoders sleep instead of computing, each at its own speed, because all machines share
the cores here. Efficiency is the catalog's texts over what the machines could have encoded from the
moment at which each got its first stretch until the last one ended.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.harness import (
    Document,
    Options,
    Target,
    at_most,
    print_document,
    say,
    start_document,
    temporary_folder,
)
from benchmarks.paced_runs import BACKEND, SECONDS_PER_TEXT
from benchmarks.synthetic import build_synthetic_catalog, draw_texts
from surge_dagster import EncoderPool, EncodingSpec
from surge_dagster.catalogs.demo import write_partition
from surge_dagster.cluster.cluster_run import open_run
from surge_dagster.cluster.machine import MachineWork
from surge_dagster.config.run_setup import RunSetup
from surge_dagster.config.settings import load_settings
from tests.cluster.hosts import ROOT, Host, hosts

_SIGMAS = (1.0, 1.72, 2.5)
_SPREAD = 0.1  # standard deviation of the machines' speeds, over their mean
_SLOW = 0.5  # speed of the last machine, over that mean
_DIMENSION = 64
_GROUP_ROWS = 65_536
_GIANT = 999_999  # the number of a partition that no synthetic catalog has
_RAY = Path(sys.executable).parent / "ray"


def measure_sizes(arguments: argparse.Namespace, folder: Path) -> Document:
    """Measure all machines, with catalogs whose sizes are spread more and more."""
    drawn = np.random.default_rng(0).normal(1.0, _SPREAD, arguments.machines)
    speeds = [*(arguments.speed * drawn[:-1]).tolist(), _SLOW * arguments.speed]
    texts = round(sum(speeds) * arguments.seconds)
    runs = Document()
    with cluster_of(speeds, folder) as network:
        for sigma in _SIGMAS:
            catalog = folder / f"sigma {sigma}"
            build_synthetic_catalog(
                catalog, texts=texts, partitions=arguments.partitions, sigma=sigma, seed=1
            )
            runs[catalog.name] = driven(network[0], catalog, "auto", speeds)
    return runs


def measure_one(arguments: argparse.Namespace, folder: Path) -> Document:
    """Measure one machine without a cluster, and as the only machine of a cluster."""
    catalog = folder / "one"
    speeds = [arguments.speed]
    texts = round(arguments.speed * arguments.seconds)
    build_synthetic_catalog(catalog, texts=texts, partitions=arguments.partitions, seed=1)
    with cluster_of(speeds, folder) as [host]:
        return {
            f"one, cluster {name}": driven(host, catalog, name, speeds) for name in ("none", "auto")
        }


def measure_half(arguments: argparse.Namespace, folder: Path) -> Document:
    """Measure four equal machines, with a catalog in which one partition is half."""
    catalog = folder / "half"
    speeds = [arguments.speed] * 4
    texts = round(sum(speeds) * arguments.seconds / 2)
    build_synthetic_catalog(
        catalog, texts=texts, partitions=arguments.partitions, sigma=1.0, seed=1
    )

    def row_groups() -> Iterator[tuple[pa.Array, pa.Array]]:
        for start in range(0, texts, _GROUP_ROWS):
            rows = np.arange(start, min(start + _GROUP_ROWS, texts), dtype=np.uint64)
            yield (
                pa.array(rows.astype(np.int64)).cast(pa.string()),
                draw_texts(1, _GIANT, rows),
            )

    write_partition(catalog, "giant", "v1", row_groups())
    with cluster_of(speeds, folder) as network:
        return {"half in one partition": driven(network[0], catalog, "auto", speeds)}


@contextmanager
def cluster_of(speeds: Sequence[float], folder: Path) -> Iterator[list[Host]]:
    """Start a Ray cluster of machines with these speeds, which share a folder; the first machine is
    the head."""
    with hosts(len(speeds), folder) as network:
        joins: tuple[object, ...] = (
            "--head",
            "--port",
            6379,
            "--include-dashboard=false",
        )
        for host, speed in zip(network, speeds, strict=True):
            options = (
                "--node-ip-address",
                host.address,
                "--num-cpus",
                1,
                "--disable-usage-stats",
            )
            host.run(_RAY, "start", *joins, *options, env=environment_of(speed))
            joins = ("--address", f"{network[0].address}:6379")
        yield network


def environment_of(speed: float) -> dict[str, str]:
    """Return the environment of the processes of a host whose encoder has this speed."""
    return {SECONDS_PER_TEXT: str(1 / speed), "PYTHONPATH": str(ROOT)}


def driven(host: Host, catalog: Path, cluster: str, speeds: Sequence[float]) -> Document:
    """Return what a run that begins on this host measures."""
    say(f"{catalog.name}: {len(speeds)} machines, cluster {cluster}")
    with temporary_folder(catalog.parent) as output:
        words = (
            sys.executable,
            "-m",
            "benchmarks.cluster",
            "--drive",
            catalog,
            output,
            cluster,
        )
        with host.popen(*words, env=environment_of(speeds[0]), stdout=subprocess.PIPE) as process:
            printed, _ = process.communicate()
    run = json.loads(printed.splitlines()[-1])
    machines = run["machines"]
    ended = max(work["ended"] for work in machines.values())
    possible = 0.0
    for number, work in machines.items():
        possible += speeds[int(number)] * (ended - work["begun"])
    return run | {"efficiency": run["texts"] / possible}


@dataclass(frozen=True)
class PacedSetup(RunSetup):
    """Of runs whose encoder sleeps."""

    def open_pool(self) -> EncoderPool:
        return EncoderPool(EncodingSpec(f"hash://{_DIMENSION}"), backend=BACKEND, devices="cpu")


def drive(catalog: str, output: str, cluster: str) -> Document:
    """Run in this process, which is on a host."""
    settings = load_settings(source=catalog, output=output, cluster=cluster)
    setup = PacedSetup(settings, settings, settings, catalog, output, grace_seconds=20.0)
    partitions = list(setup.open_source())
    with setup.open_pool() as pool:
        if cluster == "none":
            pool.start()
        opened = open_run(setup, partitions, pool, setup.open_store(), say)
        for _ in opened.events():
            pass

    report = opened.run.report
    if report.partitions_written != len(partitions):
        raise RuntimeError(f"Not all partitions were embedded: {report.partitions_failed[:3]}")
    machines = {0: {"begun": 0.0, "ended": report.wall_seconds, "texts": report.texts_encoded}}
    if opened.machines is not None:
        machines = _machines_of(opened.machines)
    texts = sum(partition.rows or 0 for partition in partitions)
    return {"machines": machines, "texts": texts, "wall_seconds": report.wall_seconds}


def _machines_of(works: Mapping[str, MachineWork]) -> dict[int, Document]:
    machines = {}
    for work in works.values():
        if work.seconds:
            number = int(work.facts.host.rpartition(".")[2]) - 1
            machines[number] = {"begun": work.begun, "ended": work.ended, "texts": work.texts}
    return machines


def lines(document: Document) -> Iterator[str]:
    """Yield the table."""
    yield (
        f"{'catalog':24}{'machines':>9}{'texts':>11}{'wall, s':>9}{'efficiency':>11}{'encoded':>14}"
    )
    for scenario in _SCENARIOS:
        for name, run in document.get(scenario, {}).items():
            machines = run["machines"].values()
            encoded = sum(work["texts"] for work in machines)
            yield (
                f"{name:24}{len(machines):>9}{run['texts']:>11,}{run['wall_seconds']:>9.1f}"
                f"{run['efficiency']:>11.3f}{encoded:>14,}"
            )


def targets(document: Document) -> Iterator[Target]:
    """Yield the aims."""
    for name, run in document.get("sizes", {}).items():
        yield Target(f"{name}: efficiency", 0.96, run["efficiency"])
    if "one" in document:
        plain, cluster = (run["efficiency"] for run in document["one"].values())
        yield Target("one machine: with a cluster over without", 0.99, cluster / plain)
    for run in document.get("half", {}).values():
        seconds = 1 / run["efficiency"]
        yield at_most("half in one partition, 4 machines: seconds over W/4", 1.15, seconds)


_SCENARIOS: dict[str, Callable[[argparse.Namespace, Path], Document]] = {
    "one": measure_one,
    "sizes": measure_sizes,
    "half": measure_half,
}


def main() -> None:
    options = Options(__doc__)
    options.add_names("--scenarios", _SCENARIOS)
    options.add_size("--machines", 8, 2)
    options.add_size("--speed", 1500.0, 500.0, "texts per second of a machine")
    options.add_size("--seconds", 150.0, 5.0, "that all machines together need at best")
    options.add_size("--partitions", 400, 20)
    options.add_argument("--drive", nargs=3, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.drive:
        print(json.dumps(drive(*arguments.drive)))
        return
    document = start_document("cluster", arguments, ("ray", "pyarrow", "surge-dagster"))
    with temporary_folder() as folder:
        for name in arguments.scenarios:
            document[name] = _SCENARIOS[name](arguments, folder)
            say("\n".join(lines({name: document[name]})))
    print_document(document, lines, targets)


if __name__ == "__main__":
    main()
