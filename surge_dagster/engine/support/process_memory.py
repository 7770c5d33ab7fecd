"""Memory of this process: how much it may use, and how much it and its children use."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pyarrow as pa

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_LAST_SAMPLE_SECONDS = 2.0


def memory_bytes(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> int:
    """Return the machine's memory, or the lowest limit among this process's cgroups (version 2),
    whichever is less."""
    return min([psutil.virtual_memory().total, *_limits(membership, mount)])


def _limits(membership: Path, mount: Path) -> Iterator[int]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers:  # of version 1
            continue
        # Every parent group limits this one too. In a container the path may be the host's; then
        # only the folder of the mount itself is visible.
        inner = Path(group.lstrip("/"))
        for folder in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                yield int((mount / folder / "memory.max").read_text())


class MemoryGauge:
    """Samples the memory of this process and its children.

    It adds up their PSS, in which shared pages are divided among the processes that map them.
    Before each sample the allocators return free memory to the system: every publishing thread has
    its own heap, and the heaps would keep the largest piece that each thread ever wrote.
    """

    def __init__(self, interval_seconds: float = 0.5) -> None:
        self.peak_bytes = 0
        self._interval = interval_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="surge-memory-gauge", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(_LAST_SAMPLE_SECONDS)

    def _watch(self) -> None:
        self._sample()
        while not self._stop.wait(self._interval):
            pa.default_memory_pool().release_unused()
            with contextlib.suppress(OSError, AttributeError):  # only glibc has this function
                ctypes.CDLL(None).malloc_trim(0)
            self._sample()
        self._sample()

    def _sample(self) -> None:
        own = psutil.Process()
        processes = [own, *own.children(recursive=True)]
        self.peak_bytes = max(self.peak_bytes, sum(map(_pss_bytes, processes)))


def _pss_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.Error:  # a process may end at any moment
        return 0
