"""Memory that this process may use, and the samples of what it uses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from surge_dagster.engine.support.process_memory import MemoryGauge, memory_bytes


def cgroups(root: Path, membership: str, limits: dict[str, str]) -> int:
    (root / "membership").write_text(membership)
    for name, content in limits.items():
        (root / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "mount" / name).write_text(content)
    return memory_bytes(root / "membership", root / "mount")


def test_memory_without_a_limit_is_that_of_the_machine(tmp_path: Path) -> None:
    machine = psutil.virtual_memory().total
    assert memory_bytes(tmp_path / "none", tmp_path) == machine
    assert cgroups(tmp_path, "0::/\n", {"memory.max": "max\n"}) == machine
    assert memory_bytes() <= machine


@pytest.mark.parametrize(
    ("membership", "limits"),
    [
        ("0::/\n", {"memory.max": "1000\n"}),
        ("0::/system.slice/surge.service\n", {"system.slice/surge.service/memory.max": "1000\n"}),
        (
            "0::/a/b\n",
            {"a/b/memory.max": "max\n", "a/memory.max": "1000\n", "memory.max": "2000\n"},
        ),
        ("0::/host/docker/1f\n", {"memory.max": "1000\n"}),
        ("5:cpu:/x\n0::/\n", {"memory.max": "1000\n"}),
    ],
)
def test_lowest_limit_of_all_parent_groups_counts(
    tmp_path: Path, membership: str, limits: dict[str, str]
) -> None:
    assert cgroups(tmp_path, membership, limits) == 1000


def test_gauge_measures_allocated_memory() -> None:
    with MemoryGauge(interval_seconds=60) as gauge:
        held = bytearray(b"\1") * (200 << 20)
    assert gauge.peak_bytes > len(held)
    assert not gauge._thread.is_alive()


def test_process_that_ends_during_a_sample_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as running:
        ending = psutil.Process(running.pid)
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [ending])
    with MemoryGauge(interval_seconds=60) as gauge:
        gauge._sample()
    assert gauge.peak_bytes > 0
