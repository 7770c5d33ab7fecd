"""Small catalogs for clusters of threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from surge_dagster.cluster import stretches
from surge_dagster.cluster.machine_work import MachineWork
from surge_dagster.engine.encoder.pool import EncoderPool
from tests.cluster.local_cluster import CATALOG, SPEC, FolderRuns, SmallRuns
from tests.engine.encoder.faulty_pools import no_leaks
from tests.small_catalogs import numbered_rows, partition_folder, write_rows

__all__ = ["no_leaks"]


@pytest.fixture
def stretches_of_one_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "STRETCH_SECONDS", 0)
    monkeypatch.setattr(stretches, "_LEAST_SECONDS", 0)


@pytest.fixture
def pool() -> Iterator[EncoderPool]:
    with EncoderPool(SPEC, devices="cpu") as pool:
        yield pool


@pytest.fixture
def runs(tmp_path: Path) -> SmallRuns:
    return SmallRuns(CATALOG, tmp_path)


@pytest.fixture
def giant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderRuns:
    """Runs over a catalog of which one partition is by far the largest, and is divided into ranges."""
    monkeypatch.setattr(stretches, "STRETCH_SECONDS", 1)
    monkeypatch.setattr(stretches, "_FIRST_SPEED", 12_000)
    monkeypatch.setattr(MachineWork, "bytes_per_second", None)
    for key, count in {"giant": 600, "a": 5, "b": 7}.items():
        rows = numbered_rows(key, count, words=12)
        write_rows(
            partition_folder(tmp_path / "catalog", key) / "part-0.parquet", rows, row_group_size=100
        )
    return FolderRuns({}, tmp_path)
