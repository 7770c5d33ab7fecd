"""A run with nothing to do starts no worker; one that is only constructed writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.catalog_record import CatalogRecord
from surge_dagster.engine.output.spaces import find_space, recorded_catalog
from surge_dagster.engine.run.change_feed import ChangeFeed
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.local_store import LocalStore
from tests.engine.runs import UnstartedPool, busy_threads, finish, make_run, receipts
from tests.small_catalogs import DIMENSION, numbered_rows, partition_of

CATALOG = [partition_of(key, numbered_rows(key, 3)) for key in "ab"]


@pytest.fixture
def complete(hash_pool: EncoderPool, tmp_path: Path) -> Path:
    """An output in which every partition is fresh."""
    finish(make_run(hash_pool, CATALOG, tmp_path / "out"))
    return tmp_path / "out"


def idle_run(
    hash_pool: EncoderPool, partitions: list[Partition], output: Path, **options: Any
) -> EmbeddingRun:
    return make_run(UnstartedPool(hash_pool), partitions, output, **options)


def test_constructing_a_run_writes_nothing_and_starts_nothing(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    before = busy_threads()
    idle_run(
        hash_pool,
        CATALOG,
        tmp_path / "out",
        catalog=CatalogRecord("/shop"),
        change_feed=ChangeFeed(always=True),
    )
    assert not (tmp_path / "out").exists()
    assert busy_threads() == before


def test_run_without_work_starts_no_pool_and_is_reported(
    hash_pool: EncoderPool, complete: Path
) -> None:
    run = idle_run(hash_pool, CATALOG, complete)
    assert [receipt.key for receipt in receipts(finish(run), "fresh")] == ["a", "b"]
    report = run.report
    assert report.partitions_skipped == 2
    assert report.partitions_written == 0
    assert report.texts_encoded == 0
    assert report.space == hash_pool.space.name
    assert report.dimension == DIMENSION


def test_run_without_work_records_its_catalog(hash_pool: EncoderPool, complete: Path) -> None:
    finish(idle_run(hash_pool, CATALOG, complete, catalog=CatalogRecord("/shop")))
    recorded = recorded_catalog(LocalStore(complete), hash_pool.space)
    assert recorded is not None
    assert recorded.place == "/shop"


def test_run_says_what_it_does_before_it_encodes(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    start = hash_pool.start

    def say(*_: object, **__: object) -> None:
        said.append(run.preparing)

    def partitions() -> Iterator[Partition]:
        say()
        yield from CATALOG

    monkeypatch.setattr(hash_pool, "start", lambda: say() or start())
    monkeypatch.setattr("surge_dagster.engine.run.embedding_run.sweep_orphan_files", say)
    run = make_run(hash_pool, partitions(), tmp_path)
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
    hash_pool: EncoderPool, complete: Path, more: Partition
) -> None:
    partitions = [CATALOG[0], more]
    with pytest.raises(AssertionError, match="the pool was started"):
        list(idle_run(hash_pool, partitions, complete))
    events = finish(make_run(hash_pool, partitions, complete))
    assert [(receipt.key, receipt.action) for receipt in receipts(events)] == [
        ("a", "fresh"),
        (more.key, "encoded"),
    ]


def test_fresh_run_makes_its_request_mean_the_space_again(tmp_path: Path) -> None:
    """Two requests of one space: the second one's run finds everything fresh."""
    requests = (
        EncodingSpec(f"hash://{DIMENSION}"),
        EncodingSpec(f"hash://{DIMENSION}", normalize=True),
    )
    for request in requests:
        with EncoderPool(request, devices="cpu") as pool:
            finish(make_run(pool, CATALOG, tmp_path / "out"))
    first, second = (find_space(LocalStore(tmp_path / "out"), request) for request in requests)
    assert first is not None
    assert first == second
