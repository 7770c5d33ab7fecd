"""`surge-dagster serve` as a process that tests end, and start again at the same address."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import psutil

from tests.service.lanes import until


class ServiceProcess:
    """A service of an output, which is ready when this has been made.

    Args:
        prepare: called in the process before it begins.

    Attributes:
        log: what all its processes have said so far.
    """

    def __init__(
        self, output: Path, *arguments: str, host: str = "127.0.0.1", prepare: Callable[[], Any] | None = None
    ) -> None:
        self.address = f"{host}:{free_port(host)}"
        self.url = f"http://{self.address}"
        self.run_socket = output.parent / f"{self.address}.runs"
        self.log = output.parent / f"{self.address}.log"
        where = ("--host", host, "--port", self.address.partition(":")[2], "--run-socket", str(self.run_socket))
        self._command = [sys.executable, "-m", "surge_dagster", "serve", str(output), *where, *arguments]
        self._prepare = prepare
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            # A session of its own: nothing but the service itself can end its workers.
            self._process = subprocess.Popen(
                self._command, stderr=log, stdout=log, start_new_session=True, preexec_fn=self._prepare
            )
        self.main = psutil.Process(self._process.pid)
        until(lambda: self._has_ended() or self.status("/readyz") == 200)
        assert not self._has_ended(), self.log.read_text()

    def _has_ended(self) -> bool:
        return self._process.poll() is not None

    def status(self, path: str) -> int | None:
        """Of the answer to GET; None where nobody answers."""
        connection = HTTPConnection(self.address, timeout=60)
        with contextlib.closing(connection), contextlib.suppress(ConnectionError, HTTPException):
            connection.request("GET", path)
            return connection.getresponse().status
        return None

    def worker(self, side: str) -> psutil.Process:
        """The worker that encodes queries or documents, which are told apart by their niceness; waits for it."""
        found = list[psutil.Process]()

        def look() -> bool:
            found.clear()
            for worker in self.main.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    is_bulk = worker.nice() > self.main.nice()
                    is_ended = worker.status() == psutil.STATUS_ZOMBIE
                    found.extend([worker] if is_bulk == (side == "document") and not is_ended else [])
            return bool(found)

        until(look)
        return found[0]

    def kill(self, *, with_workers: bool) -> None:
        """SIGKILL; without its workers, which notice it, the service is killed alone."""
        workers = self.main.children()
        for process in (self.main, *(workers if with_workers else ())):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(workers, timeout=60)

    def end(self) -> int:
        """SIGTERM; waits for the exit status."""
        self.main.send_signal(signal.SIGTERM)
        return self._process.wait(60)


@contextmanager
def service_process(output: Path, *arguments: str, **options: Any) -> Iterator[ServiceProcess]:
    """The service is killed at the end, if it still runs."""
    service = ServiceProcess(output, *arguments, **options)
    try:
        yield service
    finally:
        if service.main.is_running():
            service.kill(with_workers=True)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as free:
        return free.getsockname()[1]
