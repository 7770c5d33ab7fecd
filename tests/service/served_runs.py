"""Encoder services for runs: in this process, or in one that a test can kill.

python -m tests.service.served_runs SOCKET
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.remote.pool import RemotePool
from surge_dagster.service.runs import RunListener

SPEC = EncodingSpec("hash://16")
BACKEND = "faults:FaultyBackend"


@contextmanager
def socket_path() -> Iterator[Path]:
    """Short: the path of a Unix socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="surge-") as folder:
        yield Path(folder) / "runs.sock"


@pytest.fixture
def run_socket() -> Iterator[Path]:
    with socket_path() as path:
        yield path


@contextmanager
def served(path: Path) -> Iterator[EncoderPool]:
    """The pool of a service in this process, with the backend of `faults.py`."""
    with EncoderPool(SPEC, devices="cpu", backend=BACKEND, max_respawns=9) as pool:
        pool.start()
        with RunListener(lambda: [pool], path).start():
            yield pool


def remote_pool(path: Path, spec: EncodingSpec = SPEC, **options: Any) -> RemotePool:
    """Of a run, not started."""
    settings: dict[str, Any] = {"devices": "cpu", "backend": BACKEND, "service": str(path)}
    return RemotePool(spec, **settings | options)


@contextmanager
def service_process(path: Path) -> Iterator[int]:
    """The process of a service, which is killed at the end."""
    command = [sys.executable, "-m", "tests.service.served_runs", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


if __name__ == "__main__":
    with served(Path(sys.argv[1])):
        print("ready", flush=True)
        sys.stdin.read()
