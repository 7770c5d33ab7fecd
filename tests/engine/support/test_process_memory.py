"""Memory that this process may use, and the samples of what it uses."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from surge_dagster.engine.support import process_memory
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
    assert gauge.peak_bytes is not None
    assert gauge.peak_bytes > len(held)
    assert not gauge._thread.is_alive()


def test_gauge_adds_up_this_process_and_its_descendants() -> None:
    hold = "import time; held = bytearray(b'1') * (100 << 20); print(flush=True); time.sleep(600)"
    command = f'exec {sys.executable} -c "{hold}" & wait'
    with (
        subprocess.Popen(
            ["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=True
        ) as shell,
        MemoryGauge(interval_seconds=60) as gauge,
    ):
        assert shell.stdout is not None
        shell.stdout.readline()
        before = psutil.Process().memory_info().rss
        gauge._sample()
        os.killpg(shell.pid, signal.SIGKILL)

    assert gauge.peak_bytes is not None
    assert gauge.peak_bytes > before / 2 + (100 << 20)


def test_gauge_reads_shared_pages_only_if_more_memory_is_resident(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resident = iter([1000, 900, 1005, 1500])
    monkeypatch.setattr(process_memory, "_resident_bytes", lambda processes: next(resident))
    monkeypatch.setattr(process_memory, "_family", lambda pid: [pid])
    readings: list[int] = []
    monkeypatch.setattr(process_memory, "_pss_bytes", lambda pid: readings.append(pid) or 700)
    gauge = MemoryGauge()

    for _ in range(3):
        gauge._sample()
    assert len(readings) == 1

    gauge._sample()
    assert len(readings) == 2


def test_gauge_notices_private_growth_after_two_processes_shared_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 200 << 20
    descriptor = os.memfd_create("shared")
    os.ftruncate(descriptor, size)
    shared = mmap.mmap(descriptor, size)
    shared.write(b"1" * size)
    read_all = (
        f"import mmap; shared = mmap.mmap({descriptor}, {size}); sum(shared[::4096]); "
        "print(flush=True); input()"
    )
    gauge = MemoryGauge()
    with subprocess.Popen(
        [sys.executable, "-c", read_all],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[descriptor],
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        monkeypatch.setattr(process_memory, "_family", lambda pid: [pid, child.pid])
        gauge._sample()
        child.communicate(b"\n")
    before = gauge.peak_bytes
    os.close(descriptor)

    held = bytearray(b"1") * (100 << 20)
    gauge._sample()

    assert before is not None
    assert gauge.peak_bytes is not None
    assert gauge.peak_bytes > before + len(held) // 2
    shared.close()


def test_peak_is_unknown_if_the_system_reports_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "_resident_bytes", lambda processes: 0)
    gauge = MemoryGauge()

    gauge._sample()

    assert gauge.peak_bytes is None


def test_process_that_has_ended_takes_no_memory() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass

    assert process_memory._resident_bytes([ended.pid]) == 0
    assert process_memory._pss_bytes(ended.pid) == 0
    assert list(process_memory._family(ended.pid)) == [ended.pid]
