"""The calibration of a plan: what it measures, on any catalog and output, and what it leaves
behind: nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from surge_dagster.engine.encoder.costs import EncodeCosts
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.plan.calibrating import known_costs
from surge_dagster.engine.plan.calibration_run import _sampled_rows, calibrate
from surge_dagster.engine.plan.other_programs import CoreSeconds
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import StorageOptions
from tests.engine.priced_pool import C_IPC, catalog
from tests.engine.runs import in_memory
from tests.engine.store.object_server import ObjectServer, open_bucket


def listed(sizes: list[int]) -> list[Partition]:
    return [
        replace(one, rows=rows) for one, rows in zip(in_memory(catalog(sizes)), sizes, strict=True)
    ]


def test_calibration_encodes_some_texts_forgets_earlier_runs_and_leaves_no_file(
    priced_pool: Any, tmp_path: Path
) -> None:
    priced_pool.calibration.observe("runs cpu", [[1, 1, 1, 99.0, 0]])
    priced_pool.calibration.observe("waits cpu", [[99.0]])
    sizes = [70, 3, 50] * 80
    encoded = calibrate(
        listed(sizes), str(tmp_path / "not" / "there"), StorageOptions(), priced_pool, seconds=20.0
    )
    assert 2_000 <= encoded < 2_140  # twenty seconds of them, and the rest of two partitions
    assert list(tmp_path.iterdir()) == []
    assert priced_pool.calibration.observations("waits cpu") == [[0.0], [0.0]]
    assert priced_pool.costs.call_seconds == pytest.approx(C_IPC, rel=1e-3)
    first, second, *others = priced_pool.calibration.observations("runs cpu")
    assert first[0] < second[0] < priced_pool.costs.b_min  # from small SuperBatches to larger ones
    assert max(others)[0] >= 1_000, "the second run has SuperBatches of B_min"


def test_calibration_counts_whatever_else_the_machine_does(
    priced_pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CoreSeconds, "share_of_others", lambda now, since: 0.9)
    calibrate(listed([30]), str(tmp_path), StorageOptions(), priced_pool)
    assert priced_pool.calibration.observations("runs cpu") != []


@pytest.mark.parametrize(("sizes", "encoded"), [([], 0), ([0], 0), ([2], 2)])
def test_calibration_with_too_few_texts_keeps_the_costs_measured_at_the_start(
    priced_pool: Any, tmp_path: Path, sizes: list[int], encoded: int
) -> None:
    assert calibrate(listed(sizes), str(tmp_path), StorageOptions(), priced_pool) == encoded
    assert priced_pool.costs.call_seconds == pytest.approx(C_IPC, rel=1e-3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sizes", "counted", "seconds", "encoded"),
    [
        ([70, 3, 700], lambda rows: None, 20.0, (70 + 3 + 164) + (70 + 3 + 256)),
        ([70, 90], lambda rows: 100, 20.0, 160),  # with rows that are left out
        # empty ones give no rows
        ([0] * 50 + [3_000], lambda rows: rows, 10.0, pytest.approx(1_000, abs=2)),
        ([70], lambda rows: rows, 1e-3, 2),  # one in each run, however long it seems
    ],
)
def test_calibration_encodes_what_its_seconds_allow_whatever_the_source_has_counted(
    priced_pool: Any, tmp_path: Path, sizes: list[int], counted: Any, seconds: float, encoded: int
) -> None:
    partitions = [replace(each, rows=counted(each.rows)) for each in listed(sizes)]
    assert (
        calibrate(partitions, str(tmp_path), StorageOptions(), priced_pool, seconds=seconds)
        == encoded
    )


def test_size_of_files_whose_rows_are_not_counted_is_not_that_of_their_first_rows(
    priced_pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        EncodeCosts, "text_seconds", lambda self, tokens=None: 1e-3 * (tokens or 10)
    )
    partitions = [replace(one, rows=None, text_bytes=10**9) for one in listed([70, 3, 700])]
    assert calibrate(partitions, str(tmp_path), StorageOptions(), priced_pool) > 500


@example(sizes=[1] * 96, share=0.5)
@given(
    sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=200), share=st.floats(0.001, 2.0)
)
def test_sample_of_rows_is_as_large_as_wanted_and_no_partition_gives_more_than_it_has(
    sizes: list[int], share: float
) -> None:
    rows = _sampled_rows(np.array(sizes, float), share * sum(sizes))
    assert sum(rows) == pytest.approx(min(share, 1.0) * sum(sizes), abs=1)
    assert all(0 <= taken <= size for taken, size in zip(rows, sizes, strict=True))


def test_partition_with_half_of_the_rows_gives_half_of_the_sample() -> None:
    rows = _sampled_rows(np.array([10.0] * 500 + [5_000.0]), 1_000)
    assert rows[-1] == pytest.approx(500, rel=0.1)
    assert sum(taken > 0 for taken in rows[:-1]) < 150, "few partitions are opened"


def test_calibration_keeps_the_thresholds_and_the_memory_limit_of_the_run(
    priced_pool: Any, tmp_path: Path
) -> None:
    partitions, options = listed([70] * 40), StorageOptions()
    calibrate(
        partitions, str(tmp_path), options, priced_pool, thresholds=Thresholds(b_min=300, b_max=350)
    )
    assert max(texts for texts, *_ in priced_pool.calibration.observations("runs cpu")) <= 350
    with pytest.raises(ConfigError, match="memory_limit_bytes"):
        calibrate(partitions, str(tmp_path), options, priced_pool, memory_limit_bytes=1_000_000)


def test_calibration_replaces_the_files_that_a_killed_calibration_left_in_a_bucket(
    priced_pool: Any, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_bucket(object_server)
    options = StorageOptions(endpoint=object_server.url, access_key_id="a", secret_access_key="b")
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "delete", lambda self, name: None)
        assert calibrate(listed([70, 30]), store.url, options, priced_pool) == 100
    assert object_server.objects(), "as after a kill"
    assert calibrate(listed([70, 30]), store.url, options, priced_pool) == 100
    assert object_server.objects() == {}
    assert known_costs(priced_pool, store).io.publish.values.sum() > 0
