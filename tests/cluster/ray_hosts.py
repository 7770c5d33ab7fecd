"""A Ray cluster on hosts of a network of their own, and runs over it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.hosts import Host
from tests.service.lanes import until

MODEL, BIN = "hash://64", Path(sys.executable).parent
_ALIVE = """
import ray
ray.init("auto")
print("alive", *[node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]])
"""
RAYLET, MACHINE = "raylet/raylet", "ray::Machine"
_JOIN_AT_ONCE = 8  # of hosts that share the cores here
_RAY = (BIN / "ray", "start", "--num-cpus", 1, "--disable-usage-stats")


@dataclass
class RayHosts:
    """The hosts of a cluster, the first of which is its head; Ray is started again where it has
    ended.

    Args:
        output: None for a folder beside the catalog.
        env: of all processes, beside the test's own.
        options: of each `ray start`.
    """

    hosts: Sequence[Host]
    output: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[object] = ()
    _joining: dict[Host, subprocess.Popen[str]] = field(default_factory=dict)

    @property
    def head(self) -> Host:
        return self.hosts[0]

    def start(self, *options: object) -> None:
        address = ("--node-ip-address", self.head.address, "--port", 6379)
        self.head.run(
            *_RAY,
            "--head",
            *address,
            "--include-dashboard=false",
            *self.options,
            *options,
            env=self.env,
        )
        until(lambda: len(self.supervise()) == len(self.hosts), 60 + 10 * len(self.hosts))

    def join(self, host: Host, *options: object, env: Mapping[str, str] | None = None) -> None:
        """Begin to start Ray on a host, with the Ray that it belongs to."""
        address = ("--address", f"{self.head.address}:6379", "--node-ip-address", host.address)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._joining[host] = host.popen(
            *_RAY, *address, *self.options, *options, env={**self.env, **(env or {})}, **quiet
        )

    def supervise(self) -> list[Host]:
        """Start Ray where it does not run, as a supervisor of each host does; gives the hosts where
        it runs."""
        for host in self.hosts[1:]:
            at_once = sum(map(self._is_joining, self.hosts))
            if at_once < _JOIN_AT_ONCE and not self._is_joining(host) and not host.runs(RAYLET):
                self.join(host)
        return [
            host
            for host in self.hosts
            if host is self.head or (host.runs(RAYLET) and not self._is_joining(host))
        ]

    def _is_joining(self, host: Host) -> bool:
        return host in self._joining and self._joining[host].poll() is None

    def alive(self) -> set[str]:
        """The addresses of the hosts that Ray does not take for dead."""
        said = self.head.run(sys.executable, "-c", _ALIVE, env=self.env).splitlines()
        return set(next(line for line in said if line.startswith("alive")).split()[1:])

    def embedding(self, catalog: Path, log: Path, *options: object) -> subprocess.Popen[str]:
        """A driver on the head; what it says is appended to a file."""
        command = (
            BIN / "surge-dagster",
            "embed",
            catalog,
            self.output or catalog.parent / "output",
            "--model",
            MODEL,
        )
        with log.open("a") as file:
            return self.head.popen(
                *command,
                "--cluster",
                "auto",
                "--json",
                *options,
                env=self.env,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def verify(self, catalog: Path) -> None:
        """Every partition has one file with its rows, in order, each with its own vector."""
        command = (
            BIN / "surge-dagster",
            "verify",
            catalog,
            self.output or catalog.parent / "output",
            "--model",
            MODEL,
        )
        self.head.run(*command, "--reencode", "all", env=self.env)
