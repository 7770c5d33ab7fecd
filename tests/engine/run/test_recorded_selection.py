"""How rows are selected is recorded in the space with the first file that is published so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.output.catalog_record import CatalogRecord
from surge_dagster.engine.output.spaces import recorded_catalog
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.local_store import LocalStore
from tests.engine.runs import failures, finish, make_run, receipts
from tests.small_catalogs import numbered_rows, partition_of

OLD = {"columns": ["sku"]}
NEW = {"columns": ["price"]}
ROWS = numbered_rows("a", 20)


def run_of(
    pool: EncoderPool, output: Path, partition: Partition, settings: Mapping[str, Any]
) -> list[Any]:
    """The events of a run over the same catalog with other settings."""
    return finish(
        make_run(pool, [partition], output, catalog=CatalogRecord("/shop", settings=settings))
    )


def recorded(pool: EncoderPool, output: Path) -> Mapping[str, Any]:
    catalog = recorded_catalog(LocalStore(output), pool.space)
    assert catalog is not None
    return catalog.settings


def test_run_that_publishes_nothing_leaves_the_selection_of_the_files(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    run_of(hash_pool, tmp_path, partition_of("a", ROWS), OLD)
    bad = partition_of("a", ROWS, version="v2", fails_at=3)

    assert failures(run_of(hash_pool, tmp_path, bad, NEW))

    assert recorded(hash_pool, tmp_path) == OLD


def test_run_without_work_leaves_the_selection_of_the_files(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    run_of(hash_pool, tmp_path, partition_of("a", ROWS), OLD)
    run_of(hash_pool, tmp_path, partition_of("a", ROWS), NEW)

    assert recorded(hash_pool, tmp_path) == OLD


def test_selection_is_recorded_before_the_first_receipt(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    run_of(hash_pool, tmp_path, partition_of("a", ROWS), OLD)
    partitions = [partition_of("a", ROWS, version="v2"), partition_of("b", ROWS)]
    catalog = CatalogRecord("/shop", settings=NEW)

    for _ in make_run(hash_pool, partitions, tmp_path, catalog=catalog):
        assert recorded(hash_pool, tmp_path) == NEW
        break


def test_first_run_of_a_space_records_its_selection(hash_pool: EncoderPool, tmp_path: Path) -> None:
    events = run_of(hash_pool, tmp_path, partition_of("a", ROWS), NEW)

    assert receipts(events, "encoded")
    assert recorded(hash_pool, tmp_path) == NEW
