"""A Ray cluster on hosts of a network of their own, and runs over it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.hosts import ROOT, Host, hosts
from tests.engine.store.object_server import BUCKET
from tests.extras import require
from tests.waiting import until

MODEL = "hash://64"
BIN = Path(sys.executable).parent
_ALIVE = """
import ray
ray.init("auto")
print("alive", *[node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]])
"""
RAYLET = "raylet/raylet"
MACHINE = "ray::Machine"
_JOIN_AT_ONCE = 8  # of hosts that share the cores here
_RAY = (BIN / "ray", "start", "--num-cpus", 1, "--disable-usage-stats")


_PORT = 9000


@dataclass(frozen=True)
class Bucket:
    """An empty bucket on a host."""

    host: Host
    url = f"s3://{BUCKET}/out"

    @property
    def endpoint(self) -> str:
        return f"http://{self.host.address}:{_PORT}"

    @property
    def env(self) -> dict[str, str]:
        """Of a process that uses it."""
        options = {
            "endpoint": self.endpoint,
            "access_key_id": "anybody",
            "secret_access_key": "anything",
        }
        return {"SURGE_STORAGE_OPTIONS": json.dumps(options)}

    def objects(self) -> dict[str, str]:
        """Etag by key."""
        code = (
            "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
        )
        listing = self.host.run(sys.executable, "-c", code, f"{self.endpoint}/{BUCKET}")
        return dict(re.findall(r"<Key>([^<]*)</Key>.*?<ETag>([^<]*)</ETag>", listing))

    def start(self) -> None:
        command = (sys.executable, "-m", "tests.engine.store.object_server")
        server = self.host.popen(
            *(*command, self.host.address, _PORT),
            env={"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert server.stdout is not None
        assert server.stdout.readline() == f"{self.endpoint}\n"


@dataclass
class RayHosts:
    """The hosts of a cluster, the first of which is its head; Ray is started again where it has
    ended.

    Args:
        output: None for a folder beside the catalog.
        env: of all processes, beside the test's own.
    """

    hosts: Sequence[Host]
    output: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    bucket: Bucket | None = None
    _joining: dict[Host, subprocess.Popen[str]] = field(default_factory=dict)

    @property
    def head(self) -> Host:
        return self.hosts[0]

    def start(self, *options: object) -> None:
        address = ("--node-ip-address", self.head.address, "--port", 6379)
        of_head = ("--head", *address, "--include-dashboard=false", *options)
        self.head.run(*_RAY, *of_head, env=self.env)
        until(lambda: len(self.supervise()) == len(self.hosts), 60 + 10 * len(self.hosts))

    def join(self, host: Host) -> None:
        """Begin to start Ray on a host, with the Ray that it belongs to."""
        address = ("--address", f"{self.head.address}:6379", "--node-ip-address", host.address)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._joining[host] = host.popen(*_RAY, *address, env=self.env, **quiet)

    def supervise(self) -> list[Host]:
        """Start Ray where it does not run; return the hosts where it runs."""
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

    def embedding(self, catalog: Path, log: Path) -> subprocess.Popen[str]:
        """A driver on the head; what it prints is appended to a file."""
        with log.open("a") as file:
            return self.head.popen(
                *self._command("embed", catalog, "--cluster", "auto", "--json"),
                env=self.env,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def verify(self, catalog: Path) -> None:
        """Every partition has one file with its rows, in order, each with its own vector."""
        self.head.run(*self._command("verify", catalog, "--reencode", "all"), env=self.env)

    def _command(self, verb: str, catalog: Path, *options: object) -> tuple[object, ...]:
        output = self.output or catalog.parent / "output"
        return (BIN / "surge-dagster", verb, catalog, output, "--model", MODEL, *options)


@contextmanager
def ray_hosts(count: int, root: Path, *, with_bucket: bool = False) -> Iterator[RayHosts]:
    """A running cluster; its output may be a bucket on a further host."""
    require("ray", "ray")
    with hosts(count + with_bucket, root) as made:
        cluster = RayHosts(made[:count])
        if with_bucket:
            bucket = Bucket(made[-1])
            bucket.start()
            cluster = RayHosts(made[:count], bucket.url, bucket.env, bucket)
        cluster.start()
        yield cluster
