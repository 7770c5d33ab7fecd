"""Runs that are stopped or fail: what is encoded is published, and every thread ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import EncodeCall
from surge_dagster.engine.sources.partition import Partition
from tests.engine.runs import (
    HeldCall,
    busy_threads,
    completed,
    in_memory,
    make_run,
)
from tests.small_catalogs import (
    assert_embedded,
    numbered_rows,
    partition_of,
    published_files,
)


@pytest.mark.parametrize("after", [1, 2, 5])
def test_closing_early_publishes_what_is_encoded_and_ends_every_thread(
    hash_pool: EncoderPool, tmp_path: Path, after: int
) -> None:
    catalog = {f"p{n:02d}": numbered_rows(f"p{n}", 60) for n in range(40)}
    before = busy_threads()
    run = make_run(hash_pool, in_memory(catalog), tmp_path)
    seen: list[str] = []
    for receipt in run:
        seen.append(receipt.key)
        if len(seen) == after:
            break
    assert busy_threads() <= before
    files = published_files(tmp_path, run.space.name)
    assert {f"{key}.parquet" for key in seen} <= files
    assert all(name.endswith(".parquet") for name in files), "no temp file stays"
    assert len(files) == run.report.partitions_written == run.report.texts_encoded // 60
    again = completed(make_run(hash_pool, in_memory(catalog), tmp_path))
    assert again.report.texts_encoded == 60 * (40 - len(files))
    for key, rows in catalog.items():
        assert_embedded(tmp_path, run.space.name, key, rows)


def test_superbatch_in_the_pool_when_the_run_is_closed_is_published(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    class SlowPool:
        """Is done with the second SuperBatch only when the run is stopping."""

        left = 2
        begun = threading.Event()

        def __getattr__(self, name: str) -> Any:
            return getattr(hash_pool, name)

        def submit(
            self, slot: Slot, borders: np.ndarray, rows: np.ndarray | None = None
        ) -> EncodeCall:
            call = hash_pool.submit(slot, borders, rows)
            self.left -= 1
            if self.left:
                return call
            self.begun.set()
            return HeldCall(call, run._stop.stopping)  # pyright: ignore[reportReturnType]

    catalog = {f"p{n}": numbered_rows(f"p{n}", 60) for n in range(10)}
    run = make_run(SlowPool(), in_memory(catalog), tmp_path)
    for receipt in run:
        assert receipt.key == "p0"
        assert SlowPool.begun.wait(60)
        break
    files = published_files(tmp_path, run.space.name)
    assert {"p0.parquet", "p1.parquet"} <= files, (
        "the pool may have begun the third one by then, and no other"
    )
    assert run.report.texts_encoded == 60 * len(files) <= 180


@pytest.mark.parametrize("where", ["source", "consumer"])
def test_error_of_source_or_consumer_stops_the_run_and_is_raised(
    hash_pool: EncoderPool, tmp_path: Path, where: str
) -> None:
    def partitions() -> Iterator[Partition]:
        yield partition_of("first", numbered_rows("first", 60))
        if where == "source":
            raise LookupError("the listing broke")

    before = busy_threads()
    with pytest.raises(LookupError, match="broke"):
        for _ in make_run(hash_pool, partitions(), tmp_path):
            if where == "consumer":
                raise LookupError("the loop broke")
    assert busy_threads() <= before


def test_two_runs_share_a_pool(hash_pool: EncoderPool, tmp_path: Path) -> None:
    catalogs = [{f"p{n}": numbered_rows(f"{c}{n}", 40) for n in range(10)} for c in "xy"]
    runs = [
        make_run(hash_pool, in_memory(catalog), tmp_path / str(n))
        for n, catalog in enumerate(catalogs)
    ]
    threads = [threading.Thread(target=lambda run=run: list(run.events())) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, catalog in enumerate(catalogs):
        for key, rows in catalog.items():
            assert_embedded(tmp_path / str(number), runs[number].space.name, key, rows)
