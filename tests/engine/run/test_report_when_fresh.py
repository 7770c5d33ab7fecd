"""A run with nothing to do starts no worker; one that is only constructed writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.catalog_record import CatalogRecord
from surge_dagster.engine.output.freshness import Freshness
from surge_dagster.engine.output.spaces import find_space, recorded_catalog
from surge_dagster.engine.run.change_feed import ChangeFeed
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.local_store import LocalStore
from tests.engine.runs import (
    Output,
    UnstartedPool,
    busy_threads,
    finish,
    in_memory,
    make_run,
    receipts,
)
from tests.small_catalogs import DIMENSION, keys_of, numbered_rows, partition_of

CATALOG = [*in_memory({"a": numbered_rows("a", 3), "b": numbered_rows("b", 3)})]


@pytest.fixture
def complete(output: Output) -> Output:
    """An output in which every partition is fresh."""
    output.events(CATALOG)
    return output


def idle_run(output: Output, partitions: list[Partition], **options: Any) -> EmbeddingRun:
    return output.run(partitions, pool=UnstartedPool(output.pool), **options)


def test_constructing_a_run_writes_nothing_and_starts_nothing(output: Output) -> None:
    before = busy_threads()
    catalog = CatalogRecord("/shop")
    idle_run(output, CATALOG, catalog=catalog, change_feed=ChangeFeed(always=True))
    assert not output.root.exists()
    assert busy_threads() == before


def test_run_without_work_starts_no_pool_reads_nothing_and_is_reported(complete: Output) -> None:
    unread: list[Partition] = []
    for partition in CATALOG:
        unread.append(replace(partition, read=lambda: pytest.fail("it was read")))
    run = idle_run(complete, unread)
    assert keys_of(receipts(finish(run), "fresh")) == ["a", "b"]
    report = run.report
    assert report.partitions_skipped == 2
    assert report.partitions_written == 0
    assert report.texts_encoded == 0
    assert report.space == complete.space
    assert report.dimension == DIMENSION


def test_run_without_work_records_its_catalog(complete: Output) -> None:
    finish(idle_run(complete, CATALOG, catalog=CatalogRecord("/shop")))
    recorded = recorded_catalog(complete.store, complete.pool.space)
    assert recorded is not None
    assert recorded.place == "/shop"


def test_run_says_what_it_does_before_it_encodes(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    start = output.pool.start

    def say(*_: object, **__: object) -> None:
        said.append(run.preparing)

    def partitions() -> Iterator[Partition]:
        say()
        yield from CATALOG

    monkeypatch.setattr(output.pool, "start", lambda: say() or start())
    monkeypatch.setattr("surge_dagster.engine.run.embedding_run.sweep_orphan_files", say)
    run = output.run(partitions())
    finish(run)
    deciding = "the files of the output are being compared with the source"
    assert list(dict.fromkeys(said)) == [
        deciding,
        "the encoder is starting",
        "the output is being prepared",
    ]


@pytest.mark.parametrize(
    "more", [partition_of("c", []), partition_of("b", [], version="v2")], ids=["new", "changed"]
)
def test_pool_is_started_by_the_first_partition_that_is_not_fresh(
    complete: Output, more: Partition
) -> None:
    partitions = [CATALOG[0], more]
    with pytest.raises(AssertionError, match="the pool was started"):
        list(idle_run(complete, partitions))
    events = complete.events(partitions)
    assert keys_of(receipts(events, "fresh")) == ["a"]
    assert keys_of(receipts(events, "encoded")) == [more.key]


def test_fresh_run_makes_its_request_mean_the_space_again(tmp_path: Path) -> None:
    """Two requests of one space: the second one's run finds everything fresh."""
    first = EncodingSpec(f"hash://{DIMENSION}")
    second = replace(first, normalize=True)
    for request in (first, second):
        with EncoderPool(request, devices="cpu") as pool:
            finish(make_run(pool, CATALOG, tmp_path))
    found = find_space(LocalStore(tmp_path), first)
    assert found is not None
    assert found == find_space(LocalStore(tmp_path), second)


def test_partition_that_its_caller_takes_for_missing_is_encoded(complete: Output) -> None:
    """A run does not decide again."""
    events = complete.events(CATALOG, freshness=dict.fromkeys("ab", Freshness("missing")))
    assert keys_of(receipts(events, "encoded")) == ["a", "b"]
