"""The output benchmark's document at small size, and the parts that it is made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import output
from benchmarks.harness import scenario_lines, scenario_targets
from benchmarks.output_bound import CASES, bound_document, bound_targets, sizes_of
from benchmarks.paced_runs import drawn_partitions, embed, paced_pool, ready_partitions
from benchmarks.storage_profiles import PROFILES, DelayedStore, OneAtATime, StorageProfile
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.run.report import SuperBatchReport
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store.local_store import LocalStore
from tests.small_catalogs import read_embedded


@pytest.fixture(scope="module")
def pool() -> Iterator[EncoderPool]:
    """A pool with an encoder that takes no time."""
    with paced_pool(dimension=8) as started:
        yield started


@pytest.mark.soak
def test_small_run_gives_the_document_and_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes some 10 s: the case of the bound is a process of its own."""
    monkeypatch.setattr(output, "CASES", CASES[-1:])
    words = ["--quick", "--memory-folder", str(tmp_path), "--disk-folder", str(tmp_path)]
    document = json.loads(json.dumps(output.measure(output.parse(words))))
    assert list(tmp_path.iterdir()) == [], "no temporary file remains"
    (size,) = document["serialization"]
    assert 0 < size["validation_share"] < 1
    assert document["tiny"]["partitions_per_second"].keys() == {
        "run on tmpfs",
        "run on disk",
        "loop on disk, 4 threads",
        "loop on disk, 1 thread",
    }
    (case,) = document["bound"]["cases"]
    assert 0 < case["ledger_peak_bytes"] <= case["limit_bytes"]
    assert all(aim.measured is not None for aim in scenario_targets(output.SCENARIOS, document))
    printed = "\n".join(scenario_lines(output.SCENARIOS, document))
    for text in ("1,000 rows", "run on tmpfs", "a store that stalls"):
        assert text in printed


def test_only_the_requested_scenarios_have_aims() -> None:
    size = {"rows": 10, "validation_share": 0.02}
    assert scenario_targets(output.SCENARIOS, {"serialization": [size]})[0].met is True
    assert scenario_targets(output.SCENARIOS, {"serialization": [size | {"validation_share": 0.06}]})[0].met is False
    assert scenario_targets(output.SCENARIOS, {}) == []


def test_largest_partition_comes_first_in_the_middle_or_last() -> None:
    places = [sizes_of(case, 5_000, 4)[0].index(5_000) for case in CASES[:3]]
    assert places == [0, 2, 4]
    assert sizes_of(CASES[3], 50_000, 4) == ([5] * 4, 1_000_000)
    assert sum(sizes_of(CASES[-1], 5_000, 4)[0]) >= 4_800


class TestRuns:
    def test_object_takes_its_latency_and_its_bytes_over_the_bandwidth(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slept: list[float] = []
        monkeypatch.setattr("benchmarks.storage_profiles.time.sleep", slept.append)
        store = DelayedStore(tmp_path, StorageProfile("slow", 0.5, 2_000.0), scale=0.5)
        store.prepare("s")
        for name in ("s/a.parquet", "s/space.json"):
            with store.create(name) as upload:
                upload.sink.write(b"x" * 100)
                upload.publish(lambda: None)
        assert slept == [0.5 + 100 / 1_000]

    @pytest.mark.parametrize(("keep", "size"), [(True, 100), (False, 0)])
    def test_store_forgets_published_files_but_no_staged_ones(self, tmp_path: Path, keep: bool, size: int) -> None:
        store = DelayedStore(tmp_path, PROFILES["null"], keep=keep)
        store.prepare("s")
        for name in ("s/a.parquet", ".staging/a.arrow"):
            with store.create(name) as upload:
                upload.sink.write(b"x" * 100)
                assert upload.publish(lambda: None).size == 100
        assert ((tmp_path / "s/a.parquet").stat().st_size, (tmp_path / ".staging/a.arrow").stat().st_size) == (
            size,
            100,
        )

    def test_synchronous_publishing_ends_before_the_next_superbatch_is_encoded(
        self, pool: EncoderPool, tmp_path: Path
    ) -> None:
        order: list[str] = []

        class Watched(OneAtATime):
            def submit(self, slot: Any, borders: Any = None, rows: Any = None) -> Any:
                call = super().submit(slot, borders, rows)
                order.append("encoded")
                return call

            def seen(self, event: Any) -> None:
                if isinstance(event, SuperBatchReport):
                    order.append("published")
                super().seen(event)

        front: Any = Watched(pool)
        store = DelayedStore(tmp_path, PROFILES["null"])
        work = ready_partitions(6, 10)
        report = embed(front, work, store, Thresholds(b_min=20, b_max=20), seen=front.seen, publish_threads=1)
        assert report.superbatches == 3
        assert order == ["encoded", "published"] * 3

    def test_run_writes_the_drawn_texts(self, pool: EncoderPool, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        assert embed(pool, drawn_partitions([3, 12_000]), store).texts_encoded == 12_003
        found = read_embedded(tmp_path, pool.space.name, "category-000001")
        assert found.ids == list(range(12_000))
        assert found.texts is not None
        assert len(set(found.texts)) > 11_000
        assert np.abs(np.linalg.norm(found.matrix, axis=1) - 1).max() < 1e-5


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_memory_bound_holds_for_five_million_texts_in_any_place(tmp_path: Path) -> None:
    """Takes minutes: files of 8 GB, three times, and a store that stalls for half a minute."""
    found = bound_document(list(CASES), 5_000_000, 2_000, 30.0, tmp_path)
    for aim in bound_targets(found):
        assert aim.measured is not None and aim.measured <= aim.target, aim
