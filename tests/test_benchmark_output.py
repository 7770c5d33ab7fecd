"""The output benchmark: the promised document and table from runs of small size, and the parts that it is made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import output, output_tiny
from benchmarks.output_bound import CASES, bound_document, sizes_of
from benchmarks.output_profiles import PROFILES, DelayedStore, OneAtATime, StorageProfile
from benchmarks.output_runs import drawn_partitions, embed, paced_pool, ready_partitions
from benchmarks.output_table import output_lines, profiles_chart
from benchmarks.output_targets import output_targets
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.report import SuperBatchReport
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.thresholds import Thresholds
from tests.small_catalogs import read_embedded


@pytest.fixture(scope="module")
def pool() -> Iterator[EncoderPool]:
    """A pool of a null encoder."""
    with paced_pool(8) as started:
        yield started


@pytest.mark.soak
def test_a_small_run_gives_the_promised_document_table_and_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes some 10 s: each side of the serialization and each case of the bound is a process of its own."""
    monkeypatch.setattr(output, "CASES", CASES[-1:])
    words = ["--quick", "--memory-folder", str(tmp_path), "--disk-folder", str(tmp_path), "--profiles", "null,s3"]
    document = json.loads(json.dumps(output.measure(output.parse(words))))
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    (size,) = document["serialization"]
    assert size["ratio_to_naive"] > 1
    assert size["naive_extra_memory"] > 0
    assert {"validation_share", "memcpy_seconds", "raw_write_seconds", "disk_seconds"} <= size.keys()
    null, s3 = document["profiles"]["profiles"]
    assert (null["async_to_first"], s3["published_gain"]) == (1.0, 0.286)
    assert 0 < s3["sync_overlap_ratio"] <= 1
    assert document["tiny"]["partitions_per_second"].keys() == {
        "run on tmpfs",
        "run on disk",
        "loop on disk, 8 threads",
        "loop on disk, 1 thread",
        "loop on tmpfs, 8 threads",
    }
    (case,) = document["bound"]["cases"]
    assert 0 < case["ledger_peak_bytes"] <= document["bound"]["limit_bytes"]
    aims = output_targets(document)
    assert [aim.as_dict() for aim in aims] == document["targets"]
    assert [aim.name for aim in aims if aim.measured is None] == []
    printed = "\n".join(output_lines(document, aims))
    for text in ("1,000 rows", "s3", "run on tmpfs", "a store that stalls"):
        assert text in printed
    drawn = ElementTree.fromstring(profiles_chart(document["profiles"]))
    assert len([mark for mark in drawn.iter() if mark.tag.endswith("rect")]) == 1 + 2 + 2 * 2


def test_every_loop_beside_the_tiny_partitions_writes_all_of_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, int, frozenset[str]]] = []
    loop = output_tiny._loop

    def watched(files: dict[str, bytes], folder: Path, threads: int) -> float:
        written.append((folder.parent.name, threads, frozenset(files)))
        return loop(files, folder, threads)

    monkeypatch.setattr(output_tiny, "_loop", watched)
    for folder in ("memory", "disk"):
        (tmp_path / folder).mkdir()
    output_tiny.tiny_document(30, 1, tmp_path / "memory", tmp_path / "disk")
    assert [(where, threads) for where, threads, _ in written] == [("disk", 8), ("disk", 1), ("memory", 8)]
    assert {len(files) for _, _, files in written} == {30}
    assert len({files for _, _, files in written}) == 1


def test_only_the_scenarios_that_were_asked_for_have_aims() -> None:
    assert output_targets({"profiles": {"async_spread": 0.02}})[0].met is True
    assert output_targets({"profiles": {"async_spread": 0.04}})[0].met is False
    assert output_targets({}) == []


def test_the_largest_partition_comes_first_in_the_middle_or_last() -> None:
    places = [sizes_of(case, 5_000, 4)[0].index(5_000) for case in CASES[:3]]
    assert places == [0, 2, 4]
    assert sizes_of(CASES[3], 50_000, 4) == ([5] * 4, 1_000_000)
    assert sum(sizes_of(CASES[4], 5_000, 4)[0]) >= 4_800


class TestRuns:
    def test_an_object_takes_its_latency_and_its_bytes_over_the_bandwidth(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slept: list[float] = []
        monkeypatch.setattr("benchmarks.output_profiles.time.sleep", slept.append)
        store = DelayedStore(tmp_path, StorageProfile("slow", 0.5, 2_000.0, 0.0), scale=0.5)
        store.prepare("s")
        for name in ("s/a.parquet", "s/space.json"):
            with store.create(name) as upload:
                upload.sink.write(b"x" * 100)
                upload.publish(lambda: None)
        assert slept == [0.5 + 100 / 1_000]

    def test_synchronous_means_that_nothing_is_encoded_before_all_is_published(
        self, pool: EncoderPool, tmp_path: Path
    ) -> None:
        order: list[str] = []

        class Watched(OneAtATime):
            def submit(self, slot: Any, borders: np.ndarray | None = None) -> Any:
                call = super().submit(slot, borders)
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

    def test_runs_write_the_texts_that_were_drawn(self, pool: EncoderPool, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        assert embed(pool, drawn_partitions([3, 12_000]), store).texts_encoded == 12_003
        found = read_embedded(tmp_path, pool.space.name, "category-000001")
        assert found.ids == list(range(12_000))
        assert found.texts is not None
        assert len(set(found.texts)) > 11_000
        assert np.abs(np.linalg.norm(found.matrix, axis=1) - 1).max() < 1e-5


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_bound_holds_for_five_million_texts_among_small_partitions_wherever_they_come(tmp_path: Path) -> None:
    """Takes minutes: files of 8 GB, three times, and a store that stands still for half a minute."""
    found = bound_document(list(CASES), 5_000_000, 2_000, 30.0, tmp_path)
    for case in found["cases"]:
        assert case["ledger_peak_bytes"] <= found["limit_bytes"], case
        assert case["above_start_bytes"] <= found["limit_bytes"] + found["allowance_bytes"], case
