"""Hosts of a network of their own, made of namespaces: what listens on every address stays inside.

A host has an address, a host name, a process 1, and a /tmp, a cache and a /dev/shm of its own. They
are in memory, and are gone when the host is killed. Other folders are those of the machine, as a
shared file system is; the ones that lie in /tmp are named.

This needs root, the Debian package iproute2, and kernel namespaces, as in `sudo make soak
ARGS=tests/cluster`. Tests are skipped without. A container needs the capability SYS_ADMIN, and
NET_ADMIN.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parent.parent.parent
_NUMBERS = itertools.count(1)
# `$@` are the folders that keep their place in /tmp. Process 1 leaves dead children to the kernel.
_BOOT = """
set -e
hostname "$0"
mount -t tmpfs -o "size=2g,mode=1777" tmpfs /mnt
mkdir /mnt/cache
for folder; do mkdir -p "/mnt/${folder#/tmp/}"; mount --rbind "$folder" "/mnt/${folder#/tmp/}"; done
mount --rbind /mnt /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
echo up
trap '' CHLD
exec sleep infinity
"""


@dataclass(eq=False)
class Host:
    """A machine of a network; its processes reach the other hosts of this network alone.

    Args:
        number: in its network; its link is this port of the bridge.
        shared: folders that it shares with all hosts and with the test.
    """

    network: str
    number: int
    shared: tuple[Path, ...] = ()
    # process 1, as the test sees it
    _first: subprocess.Popen[str] | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return f"host-{self.number}"

    @property
    def namespace(self) -> str:
        return f"{self.network}-{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"

    def boot(self) -> None:
        """Start it, with an empty disk."""
        kept = [path for path in self.shared if path.is_relative_to("/tmp")]
        self._first = self._spawn(
            *("setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{self.namespace}"),
            *("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("sh", "-c", _BOOT, self.name, *kept),
            env={},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._first.stdout is not None
        answer = self._first.stdout.readline()
        assert answer == "up\n", answer + self._first.stdout.read()

    def popen(
        self, *command: object, env: Mapping[str, str] | None = None, **options: object
    ) -> subprocess.Popen[str]:
        """A process of the host, which ends with the one that is returned."""
        given = {
            "TMPDIR": "/tmp",
            "SURGE_CACHE_DIR": "/tmp/cache",
            "XDG_CACHE_HOME": "/tmp/cache",
            "HOME": "/tmp",
        }
        return self._spawn(
            *("nsenter", "--target", self._first_pid(), "--mount", "--uts", "--pid", "--net"),
            *("setpriv", "--pdeathsig", "KILL", *command),
            env={**given, **(env or {})},
            **options,
        )

    def run(self, *command: object, env: Mapping[str, str] | None = None) -> str:
        with self.popen(
            *command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        return output

    def pids(self) -> list[int]:
        """Of all its processes, as the test sees them."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in listed.stdout.split()]

    def runs(self, what: str) -> bool:
        """Whether one of its processes has these words in its command line."""
        for pid in self.pids():
            with suppress(OSError):  # it has ended
                if what.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return True
        return False

    def kill(self) -> None:
        """End its process 1, and so all others; `boot` starts it again."""
        if self._first is not None:
            os.kill(self._first_pid(), signal.SIGKILL)
            self._first.communicate()
            self._first = None
            until(lambda: not self.pids())

    def cut(self) -> None:
        """Take its link down, at the bridge: nothing that is sent arrives, and nobody is told."""
        _ip("-n", self.network, "link", "set", f"port{self.number}", "down")

    def mend(self) -> None:
        _ip("-n", self.network, "link", "set", f"port{self.number}", "up")

    def _spawn(
        self, *words: object, env: Mapping[str, str], **options: object
    ) -> subprocess.Popen[str]:
        command = list(map(str, words))
        return subprocess.Popen(command, text=True, env={**os.environ, **env}, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def _first_pid(self) -> int:
        """Of process 1: the child of `unshare`."""
        assert self._first is not None, f"{self.name} is not running"
        children = (
            Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()
        )
        return int(children[0])


@contextmanager
def hosts(count: int, *shared: Path) -> Iterator[list[Host]]:
    """So many running hosts on one bridge, which is in a namespace of its own; all their processes
    end with them.

    Args:
        shared: folders that all share; the package and its interpreter are among them.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare", "setpriv"))):
        pytest.skip(
            "hosts are made of namespaces: run this as root, with iproute2 and util-linux installed"
        )
    network = f"surge-{os.getpid()}-{next(_NUMBERS)}"
    kept = {path.resolve() for path in (ROOT, Path(sys.prefix), *shared)}
    outer = tuple(path for path in kept if kept.isdisjoint(path.parents))
    made = [Host(network, number, outer) for number in range(1, count + 1)]
    with ExitStack() as stack:
        for namespace in (network, *(host.namespace for host in made)):
            _ip("netns", "add", namespace)
            stack.callback(
                subprocess.run, ["ip", "netns", "del", namespace], check=False, capture_output=True
            )
        _ip("-n", network, "link", "add", "bridge", "type", "bridge")
        _ip("-n", network, "link", "set", "bridge", "up")
        for host in made:
            port = f"port{host.number}"
            veth = ("type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("-n", network, "link", "add", port, *veth)
            _ip("-n", network, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", link, "up")
            stack.callback(host.kill)
            host.boot()
        yield made


def parquet_files(folder: Path) -> set[tuple[str, int]]:
    """Those of a folder that hosts share, by name, with the times of their publication; some may
    vanish meanwhile."""
    found = set[tuple[str, int]]()
    for parent, _, names in os.walk(folder):
        for name in fnmatch.filter(names, "*.parquet"):
            with suppress(FileNotFoundError):
                found.add((name, Path(parent, name).stat().st_mtime_ns))
    return found


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
