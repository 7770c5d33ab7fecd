"""`surge-dagster serve` as a process that tests end, and start again at the same address."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import psutil

from surge_dagster.service.spaces import QUERY_NICENESS
from tests.waiting import until


class ServiceProcess:
    """A service of an output, which is ready when this has been made; `options` are those of
    `Popen`."""

    def __init__(
        self, output: Path, *arguments: str, host: str = "127.0.0.1", **options: Any
    ) -> None:
        port = free_port(host)
        self.address = f"{host}:{port}"
        self._log = output.parent / f"{port}.log"
        where = ("--host", host, "--port", str(port))
        self._command = [
            sys.executable,
            "-m",
            "surge_dagster",
            "serve",
            str(output),
            *where,
            *arguments,
        ]
        self._options = options
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stderr=log, **self._options)
        self.main = psutil.Process(self._process.pid)
        until(lambda: self._process.poll() is not None or self.status("/readyz") == 200)
        assert self._process.poll() is None, self._log.read_text()

    def status(self, path: str) -> int | None:
        """Of the answer to GET over a connection of its own; None where nobody answers."""
        connection = HTTPConnection(self.address, timeout=60)
        with contextlib.closing(connection), contextlib.suppress(ConnectionError, HTTPException):
            connection.request("GET", path)
            return connection.getresponse().status
        return None

    def worker(self, side: str) -> psutil.Process:
        """The one that encodes queries or documents, which are told apart by their niceness; waits
        for it."""
        found = list[psutil.Process]()

        def look() -> bool:
            for worker in self.main.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    is_of_side = (worker.nice() > self.main.nice() + QUERY_NICENESS) == (
                        side == "document"
                    )
                    found.extend(
                        [worker] if is_of_side and worker.status() != psutil.STATUS_ZOMBIE else []
                    )
            return bool(found)

        until(look)
        return found[0]

    def kill(self, *, with_workers: bool = True) -> None:
        """Send SIGKILL to the service; its workers get it too, or end because they notice."""
        workers = self.main.children()
        for process in (self.main, *(workers if with_workers else ())):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        assert not psutil.wait_procs(workers, timeout=60)[1]

    def end(self, number: signal.Signals) -> None:
        """Send SIGKILL, or another signal that it ends in order at."""
        if number == signal.SIGKILL:
            self.kill()
        else:
            self._process.send_signal(number)
            assert self._process.wait(60) == 0


@contextmanager
def service_process(output: Path, *arguments: str, **options: Any) -> Iterator[ServiceProcess]:
    service = ServiceProcess(output, *arguments, **options)
    try:
        yield service
    finally:
        if service.main.is_running():
            service.kill()


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as free:
        return free.getsockname()[1]
