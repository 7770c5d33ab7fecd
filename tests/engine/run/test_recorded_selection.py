"""How rows are selected is recorded in the space with the first file that is published so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surge_dagster.engine.output.catalog_record import CatalogRecord
from surge_dagster.engine.output.spaces import recorded_catalog
from surge_dagster.engine.sources.partition import Partition
from tests.engine.runs import Output, failures, receipts
from tests.small_catalogs import numbered_rows, partition_of

OLD = {"columns": ["sku"]}
NEW = {"columns": ["price"]}
ROWS = numbered_rows("a", 20)


def run_of(output: Output, partition: Partition, settings: Mapping[str, Any]) -> list[Any]:
    """The events of a run over the same catalog with other settings."""
    return output.events([partition], catalog=CatalogRecord("/shop", settings=settings))


def recorded(output: Output) -> Mapping[str, Any]:
    catalog = recorded_catalog(output.store, output.pool.space)
    assert catalog is not None
    return catalog.settings


def test_run_that_publishes_nothing_leaves_the_selection_of_the_files(output: Output) -> None:
    run_of(output, partition_of("a", ROWS), OLD)
    bad = partition_of("a", ROWS, version="v2", fails_at=3)

    assert failures(run_of(output, bad, NEW))

    assert recorded(output) == OLD


def test_run_without_work_leaves_the_selection_of_the_files(output: Output) -> None:
    run_of(output, partition_of("a", ROWS), OLD)
    run_of(output, partition_of("a", ROWS), NEW)

    assert recorded(output) == OLD


def test_selection_is_recorded_before_the_first_receipt(output: Output) -> None:
    run_of(output, partition_of("a", ROWS), OLD)
    partitions = [partition_of("a", ROWS, version="v2"), partition_of("b", ROWS)]
    catalog = CatalogRecord("/shop", settings=NEW)

    for _ in output.run(partitions, catalog=catalog):
        assert recorded(output) == NEW
        break


def test_first_run_of_a_space_records_its_selection(output: Output) -> None:
    events = run_of(output, partition_of("a", ROWS), NEW)

    assert receipts(events, "encoded")
    assert recorded(output) == NEW
