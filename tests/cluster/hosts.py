"""Hosts of a network of their own, made of namespaces: what listens on every address stays inside. Needs root."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Host:
    """A network namespace with an address; processes in it reach the other hosts of its network alone."""

    namespace: str
    address: str

    def popen(self, *command: object, env: Mapping[str, str] | None = None, **options: object) -> subprocess.Popen[str]:
        words = ["ip", "netns", "exec", self.namespace, *map(str, command)]
        return subprocess.Popen(words, text=True, env={**os.environ, **(env or {})}, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def run(self, *command: object, env: Mapping[str, str] | None = None) -> str:
        with self.popen(*command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        return output

    def pids(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def kill(self) -> None:
        """End every process of the host, as a power failure does."""
        while pids := self.pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)

    def cut(self) -> None:
        """Take its link down."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts on one bridge, which is in a namespace of its own; all their processes end with them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("hosts are network namespaces: run this as root, with iproute2 installed")
    network = f"surge-{os.getpid()}-{next(_NUMBERS)}"
    made = [Host(f"{network}-{number}", f"10.77.0.{number}") for number in range(1, count + 1)]
    namespaces = [network, *(host.namespace for host in made)]
    try:
        for namespace in namespaces:
            _ip("netns", "add", namespace)
        _ip("-n", network, "link", "add", "bridge", "type", "bridge")
        _ip("-n", network, "link", "set", "bridge", "up")
        for number, host in enumerate(made):
            _ip(
                "-n",
                network,
                "link",
                "add",
                f"port{number}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host.namespace,
            )
            _ip("-n", network, "link", "set", f"port{number}", "master", "bridge", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", link, "up")
        yield made
    finally:
        for host in made:
            host.kill()
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
