"""The calibration of a plan: what it measures, on any catalog and output, and what it leaves
behind: nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.plan.planned_run import calibrate, known_costs
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import StorageOptions
from tests.engine.priced_pool import C_IPC, catalog
from tests.engine.runs import in_memory
from tests.engine.store.object_server import ObjectServer, open_bucket


def kept(pool: Any) -> list[list[float]]:
    """The calls of runs that the pool's calibration has."""
    return pool.calibration.observations("runs cpu")


def listed(sizes: list[int]) -> list[Partition]:
    return [
        replace(one, rows=rows) for one, rows in zip(in_memory(catalog(sizes)), sizes, strict=True)
    ]


def test_calibration_forgets_earlier_runs_and_leaves_no_file(
    priced_pool: Any, tmp_path: Path
) -> None:
    priced_pool.calibration.observe("runs cpu", [[1, 1, 1, 99.0, 0]])
    output = str(tmp_path / "not" / "there")

    encoded = calibrate(listed([70, 3, 50] * 80), output, StorageOptions(), priced_pool)

    assert encoded == pytest.approx(2_000, rel=0.1)  # twenty seconds of them
    assert list(tmp_path.iterdir()) == []
    assert 99.0 not in [seconds for _, _, _, seconds, _ in kept(priced_pool)]
    assert priced_pool.speed.is_learned


@pytest.mark.parametrize(("sizes", "encoded"), [([], 0), ([0], 0), ([2], 2)])
def test_calibration_with_too_few_texts_keeps_the_costs_of_the_start(
    priced_pool: Any, tmp_path: Path, sizes: list[int], encoded: int
) -> None:
    assert calibrate(listed(sizes), str(tmp_path), StorageOptions(), priced_pool) == encoded
    assert priced_pool.speed.call_seconds == pytest.approx(C_IPC, rel=1e-3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sizes", "counted", "seconds", "encoded"),
    [
        ([70, 3, 700], lambda rows: None, 20.0, 70 + 3 + 256),
        ([70, 90], lambda rows: 100, 20.0, 160),  # with rows that are left out
        ([0] * 50 + [3_000], lambda rows: rows, 10.0, 1_000),  # empty ones give no rows
        ([70], lambda rows: rows, 1e-3, 1),  # however long it seems
    ],
)
def test_calibration_encodes_what_its_seconds_allow(
    priced_pool: Any, tmp_path: Path, sizes: list[int], counted: Any, seconds: float, encoded: int
) -> None:
    partitions = [replace(each, rows=counted(each.rows)) for each in listed(sizes)]
    assert (
        calibrate(partitions, str(tmp_path), StorageOptions(), priced_pool, seconds=seconds)
        == encoded
    )


def test_calibration_keeps_the_thresholds_and_the_memory_limit_of_the_run(
    priced_pool: Any, tmp_path: Path
) -> None:
    partitions = listed([70] * 40)
    options = StorageOptions()
    calibrate(
        partitions, str(tmp_path), options, priced_pool, thresholds=Thresholds(b_min=300, b_max=350)
    )
    assert max(texts for texts, *_ in kept(priced_pool)) <= 350
    with pytest.raises(ConfigError, match="memory_limit_bytes"):
        calibrate(partitions, str(tmp_path), options, priced_pool, memory_limit_bytes=1_000_000)


def test_calibration_replaces_the_files_of_a_killed_one_in_a_bucket(
    priced_pool: Any, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_bucket(object_server)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "delete", lambda self, name: None)
        assert calibrate(listed([70, 30]), store.url, object_server.options, priced_pool) == 100
    assert object_server.objects(), "as after a kill"
    assert calibrate(listed([70, 30]), store.url, object_server.options, priced_pool) == 100
    assert object_server.objects() == {}
    assert known_costs(priced_pool, store).io.publish.sum() > 0
