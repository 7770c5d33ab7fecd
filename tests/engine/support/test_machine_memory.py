"""How much memory this process may use: what the machine has, or a container allows."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from surge_dagster.engine.support.machine_memory import memory_bytes


def cgroups(root: Path, membership: str, limits: dict[str, str]) -> int:
    (root / "membership").write_text(membership)
    for name, content in limits.items():
        (root / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "mount" / name).write_text(content)
    return memory_bytes(root / "membership", root / "mount")


def test_without_a_limit_it_is_the_machine_s(tmp_path: Path) -> None:
    machine = psutil.virtual_memory().total
    assert memory_bytes(tmp_path / "none", tmp_path) == machine
    assert cgroups(tmp_path, "0::/\n", {"memory.max": "max\n"}) == machine
    assert cgroups(tmp_path, "4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}) == machine
    assert memory_bytes() <= machine


@pytest.mark.parametrize(
    ("membership", "limits"),
    [
        ("0::/\n", {"memory.max": "1000\n"}),
        ("0::/system.slice/surge.service\n", {"system.slice/surge.service/memory.max": "1000\n"}),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "1000\n", "memory.max": "2000\n"}),
        ("0::/host/docker/1f\n", {"memory.max": "1000\n"}),
        ("5:cpu:/x\n4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "1000\n"}),
        ("4:blkio,memory:/docker/1f\n", {"memory/memory.limit_in_bytes": "1000\n", "cpu/memory.max": "1\n"}),
    ],
)
def test_the_lowest_limit_of_the_groups_above_counts(tmp_path: Path, membership: str, limits: dict[str, str]) -> None:
    assert cgroups(tmp_path, membership, limits) == 1000
