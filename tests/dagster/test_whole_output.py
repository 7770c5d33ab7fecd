"""What Dagster's page of an asset shows of all its files: rows, place and columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.support.urls import to_uri
from tests.dagster import private_dagster
from tests.dagster.conftest import NAMES, Ran, Workbench, range_tags, values_of
from tests.small_catalogs import partition_folder

INT8 = NAMES.derived("int8")


def newest(bench: Workbench, asset: dg.AssetKey = NAMES.embeddings) -> dg.AssetMaterialization:
    """The materialization from which Dagster's page of an asset takes rows and columns."""
    [record] = bench.instance.fetch_materializations(asset, limit=1).records
    event = record.asset_materialization
    assert event is not None
    return event


def shown(bench: Workbench, asset: dg.AssetKey = NAMES.embeddings) -> dict[str, Any]:
    return private_dagster.standard_metadata(newest(bench, asset).metadata)


def types_of(schema: dg.TableSchema) -> dict[str, str]:
    return {column.name: column.type for column in schema.columns}


def write_numbered_ids(bench: Workbench, key: str) -> None:
    path = partition_folder(bench.catalog, key) / "part-0.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"id": [1, 2], "text": ["boots", "shoes"]}), path)


@pytest.mark.parametrize("asset", [NAMES.embeddings, INT8])
def test_definition_names_the_place_of_the_output(bench: Workbench, asset: dg.AssetKey) -> None:
    bench.settings |= {"derived": [{"dtype": "int8"}], "output": str(bench.output)}

    node = bench.definitions.resolve_asset_graph().get(asset)

    assert private_dagster.standard_metadata(node.metadata)["uri"] == bench.output.as_uri()


def test_event_of_a_partition_names_its_file_and_rows(bench: Workbench) -> None:
    bench.write("größe 1", 5)

    [event] = bench.refresh().materialized().values()

    found = private_dagster.standard_metadata(event.metadata)
    [file] = bench.output.glob("*/*.parquet")
    assert found == {"partition_row_count": 5, "uri": file.as_uri()}


def test_run_that_embeds_one_partition_counts_the_rows_of_all(bench: Workbench) -> None:
    bench.fill("ab", 3)
    bench.refresh()
    bench.write("c", 4)

    assert bench.refresh().success

    assert newest(bench).partition is None
    assert shown(bench)["row_count"] == 10
    assert values_of(newest(bench))["partitions"] == 3


def test_rows_of_a_run_with_nothing_to_do_are_shown(bench: Workbench) -> None:
    bench.fill("ab", 3)
    bench.refresh()

    assert bench.refresh().success

    assert shown(bench)["row_count"] == 6


def test_rows_are_counted_if_another_partition_is_refused(bench: Workbench) -> None:
    bench.write("a", 3)
    bench.write("bad", [("1", ""), ("1", "twice")])

    assert not bench.refresh().success

    assert shown(bench)["row_count"] == 3


def test_run_that_publishes_nothing_and_fails_materializes_nothing(bench: Workbench) -> None:
    bench.write("bad", [("1", ""), ("1", "twice")])

    assert not bench.refresh().success

    assert bench.instance.fetch_materializations(NAMES.embeddings, limit=1).records == []


def test_place_of_the_output_is_the_folder_of_its_space(bench: Workbench) -> None:
    bench.write("a")
    bench.refresh()

    assert shown(bench)["uri"] == (bench.output / bench.space).as_uri()


def test_columns_have_the_types_of_the_files(bench: Workbench) -> None:
    bench.write("a")
    bench.refresh()

    assert types_of(shown(bench)["column_schema"]) == {
        "id": "string",
        "text": "large_string",
        "text_hash": "fixed_size_binary[16]",
        "truncated": "bool",
        "embedding": "float32[16]",
    }


def test_column_whose_type_differs_between_files_shows_both(bench: Workbench) -> None:
    bench.write("a")
    write_numbered_ids(bench, "b")
    bench.refresh()

    assert types_of(shown(bench)["column_schema"])["id"] == "int64 or string"


@pytest.mark.parametrize("asset", [NAMES.embeddings, INT8])
def test_run_of_a_backfill_materializes_only_partitions(
    bench: Workbench, asset: dg.AssetKey
) -> None:
    """Dagster ends a backfill as failed if one of its runs materializes an asset without one."""
    bench.settings["derived"] = [{"dtype": "int8"}]
    bench.fill("ab", 3)
    bench.refresh()
    tags = range_tags("a", "b") | {"dagster/backfill": "x"}

    assert bench.materialize({}, tags, asset).success

    assert newest(bench, asset).partition in {"a", "b"}


def test_run_of_a_backfill_observes_the_whole_output(bench: Workbench) -> None:
    bench.fill("ab", 3)
    bench.refresh()

    assert bench.embed("a", "b", backfill="x").success

    [record] = bench.instance.fetch_observations(NAMES.embeddings, limit=1).records
    event = record.event_log_entry.asset_observation
    assert event is not None
    assert private_dagster.standard_metadata(event.metadata)["row_count"] == 6


@pytest.fixture
def derived(bench: Workbench) -> Ran:
    bench.settings["derived"] = [{"dtype": "int8"}]
    bench.fill("ab", 3)
    bench.refresh()
    return bench.run(NAMES.derive_job)


def test_derived_asset_shows_its_own_rows_and_type(bench: Workbench, derived: Ran) -> None:
    found = shown(bench, INT8)

    assert found["row_count"] == 6
    assert types_of(found["column_schema"])["embedding"] == "int8[16]"


def test_event_of_a_derived_partition_names_its_file(bench: Workbench, derived: Ran) -> None:
    event = derived.materialized(INT8)["a"]

    space = event.metadata["space"].value
    file = Path(bench.output, str(space), "a.parquet")
    found = private_dagster.standard_metadata(event.metadata)
    assert found == {"partition_row_count": 3, "uri": file.as_uri()}


def test_files_that_cannot_be_counted_do_not_fail_the_run(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write("a")
    monkeypatch.setattr("surge_dagster.orchestration.spaces.OutputState", unanswered)

    ran = bench.refresh()

    assert ran.success
    assert newest(bench).partition is None
    assert "dagster/row_count" not in newest(bench).metadata


def unanswered(store: LocalStore, space: str) -> None:
    from surge_dagster.engine.errors import StoreUnavailable

    raise StoreUnavailable("GET failed (503: SlowDown) after 3 attempts.")


@pytest.mark.parametrize(
    ("place", "uri"),
    [
        ("gs://shop/vectors", "gs://shop/vectors"),
        ("file:///data/shop", "file:///data/shop"),
        ("/data/größe 1", "file:///data/gr%C3%B6%C3%9Fe%201"),
        ("/data/a://b", "file:///data/a%3A/b"),
    ],
)
def test_uri_of_a_place(place: str, uri: str) -> None:
    assert to_uri(place) == uri
