"""Pools whose workers run the backend of `faults.py`, and checks that nothing of them is left
behind."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.encoder import worker_process
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from tests.waiting import until

SPEC = EncodingSpec("hash://16")


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Checks after each test that no process and no descriptor outlives its pool."""
    gc.collect()
    gc.freeze()  # the other collections look at what came later: torch alone is a second of each
    before = open_descriptors()
    yield
    assert _children() == []

    def are_closed() -> bool:
        gc.collect()
        return open_descriptors() <= before

    until(are_closed)  # a machine of a cluster may end its stretch after the run has


def faulty_pool(
    devices: str = "cpu,cpu", backend: str = "FaultyBackend", **options: Any
) -> EncoderPool:
    """A started pool with a backend of `faults.py`."""
    pool = EncoderPool(SPEC, devices=devices, backend=f"faults:{backend}", **options)
    pool.start()
    return pool


def harmless(count: int) -> list[str]:
    return [f"harmless {row}" for row in range(count)]


def with_harm(*harm: str) -> list[str]:
    texts = harmless(4_000)
    for place, text in enumerate(harm):
        texts[700 * (place + 1)] = text
    return texts


@contextlib.contextmanager
def beyond_signals(*pids: int) -> Iterator[None]:
    """Stops processes that no signal of the pool ends, like processes that hang in the kernel."""
    send = subprocess.Popen.send_signal

    def withhold(process: subprocess.Popen, number: int) -> None:
        if process.pid not in pids:
            send(process, number)

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess.Popen, "send_signal", withhold)
            patch.setattr(worker_process, "_KILLED_SECONDS", 0.2)
            yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_for_end(list(pids))


def wait_for_end(pids: list[int]) -> None:
    """Returns when all processes have ended; fails when one of them outlives half a minute."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(descriptor):
            ended = select.select([descriptor], [], [], 30)[0]
        assert ended, f"worker {pid} outlived its parent"


def _children() -> list[int]:
    """Worker processes of this process that serve a faulty backend's pool: all but those of shared
    fixtures."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                environment = entry.joinpath("environ").read_bytes()
            except (OSError, ValueError):
                continue
            if parent == os.getpid() and str(Path(__file__).parent).encode() in environment:
                found.append(int(entry.name))
    return found


def open_descriptors() -> set[tuple[str, str]]:
    """Open descriptors of this process, by number and what they point to."""
    found = set()
    for name in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists the folder
            found.add((name.name, str(name.readlink())))
    return found
