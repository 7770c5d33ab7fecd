"""Memory of this process: how much it may use, and how much it and its children use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_LAST_SAMPLE_SECONDS = 2.0
_NOTICED_GROWTH = 1.01
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_bytes(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> int:
    """Return the machine's memory, or the lowest limit among this process's cgroups (version 2),
    whichever is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    return min([machine, *_limits(membership, mount)])


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
    """Measures the most memory that this process and its descendants take together.

    It adds up their PSS, in which shared pages are divided among the processes that map them. The
    kernel takes 6 ms per gigabyte to compute it, so it is read only if more memory is resident
    than ever before. There shared pages count once, in the process that maps most of them.

    Before each sample the allocators return free memory to the system: every publishing thread has
    its own heap, and the heaps would keep the largest piece that each thread ever wrote.

    Attributes:
        peak_bytes: None if the system does not report it, as on macOS.
    """

    def __init__(self, interval_seconds: float = 0.5) -> None:
        self.peak_bytes: int | None = None
        self._most_resident_bytes = 0.0
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
            self._sample()
        self._sample()

    def _sample(self) -> None:
        pa.default_memory_pool().release_unused()
        with contextlib.suppress(OSError, AttributeError):  # only glibc has this function
            ctypes.CDLL(None).malloc_trim(0)
        processes = list(_family(os.getpid()))
        resident = _resident_bytes(processes)
        if resident > _NOTICED_GROWTH * self._most_resident_bytes:
            self._most_resident_bytes = resident
            self.peak_bytes = max(self.peak_bytes or 0, sum(map(_pss_bytes, processes)))


def _family(pid: int) -> Iterator[int]:
    """Yield a process and its descendants; only itself if the kernel does not list children."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread or process may end at any moment
            for child in children.read_text().split():
                yield from _family(int(child))


def _resident_bytes(processes: Iterable[int]) -> int:
    """Return the private bytes of all processes, and the shared ones of the one with most."""
    private = 0
    most_shared = 0
    for pid in processes:
        with contextlib.suppress(OSError):
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            private += int(resident) - int(shared)
            most_shared = max(most_shared, int(shared))
    return (private + most_shared) * _PAGE_BYTES


def _pss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0
