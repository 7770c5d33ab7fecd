"""How much memory this process may use: the machine's, or its container's where that is less."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def memory_bytes(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> int:
    """The machine's memory, or the lowest limit among this process's cgroups (version 1 or 2), whichever is less.

    Args:
        membership: lists the process's cgroups, a line each.
        mount: where their hierarchies lie.
    """
    return min([psutil.virtual_memory().total, *_limits(membership, mount)])


def _limits(membership: Path, mount: Path) -> Iterator[int]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            hierarchy, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            hierarchy, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Every group above limits this one too. In a container the path may be the host's, of which only the mount's
        # own folder is to be seen.
        inner = Path(group.lstrip("/"))
        for folder in (inner, *inner.parents):
            try:
                yield int((hierarchy / folder / name).read_text())
            except (OSError, ValueError):  # not there, or "max"
                continue
