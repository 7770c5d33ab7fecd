"""Runs that are stopped or fail: what is encoded is published, and every thread ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.schedule import EncodeCall
from surge_dagster.engine.sources.partition import Partition
from tests.engine.runs import (
    HeldCall,
    Output,
    Wrapped,
    busy_threads,
    in_memory,
)
from tests.small_catalogs import (
    numbered_catalog,
    numbered_rows,
    partition_of,
)


@pytest.mark.parametrize("after", [1, 2, 5])
def test_closing_early_publishes_what_is_encoded_and_ends_every_thread(
    output: Output, after: int
) -> None:
    catalog = numbered_catalog([60] * 40)
    before = busy_threads()
    run = output.run(in_memory(catalog))
    seen: list[str] = []
    for receipt in run:
        seen.append(receipt.key)
        if len(seen) == after:
            break
    assert busy_threads() <= before
    files = output.keys()
    assert set(seen) <= files
    assert files <= catalog.keys(), "no temp file stays"
    assert len(files) == run.report.partitions_written == run.report.texts_encoded // 60
    again = output.embed(in_memory(catalog))
    assert again.report.texts_encoded == 60 * (40 - len(files))
    output.check_all(catalog)


def test_superbatch_in_the_pool_when_the_run_is_closed_is_published(output: Output) -> None:
    class SlowPool(Wrapped):
        """Is done with the second SuperBatch only when the run is stopping."""

        left = 2
        begun = threading.Event()

        def submit(
            self, slot: Slot, borders: np.ndarray, rows: np.ndarray | None = None
        ) -> EncodeCall:
            call = self.inner.submit(slot, borders, rows)
            self.left -= 1
            if self.left:
                return call
            self.begun.set()
            return HeldCall(call, run._stop.stopping)  # pyright: ignore[reportReturnType]

    catalog = numbered_catalog([60] * 10)
    run = output.run(in_memory(catalog), pool=SlowPool(output.pool))
    for receipt in run:
        assert receipt.key == "p0"
        assert SlowPool.begun.wait(60)
        break
    files = output.keys()
    assert {"p0", "p1"} <= files, "the pool may have begun the third one by then, and no other"
    assert run.report.texts_encoded == 60 * len(files) <= 180


@pytest.mark.parametrize("where", ["source", "consumer"])
def test_error_of_source_or_consumer_stops_the_run_and_is_raised(
    output: Output, where: str
) -> None:
    def partitions() -> Iterator[Partition]:
        yield partition_of("first", numbered_rows("first", 60))
        if where == "source":
            raise LookupError("the listing broke")

    before = busy_threads()
    with pytest.raises(LookupError, match="broke"):
        for _ in output.run(partitions()):
            if where == "consumer":
                raise LookupError("the loop broke")
    assert busy_threads() <= before


def test_two_runs_share_a_pool(output: Output, tmp_path: Path) -> None:
    other = Output(output.pool, tmp_path / "other")
    catalog = numbered_catalog([40] * 10)
    other_catalog = numbered_catalog([40] * 10, words=2)
    runs = [output.run(in_memory(catalog)), other.run(in_memory(other_catalog))]

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(list, runs))

    output.check_all(catalog)
    other.check_all(other_catalog)
