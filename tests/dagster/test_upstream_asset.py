"""A catalog that is an asset gives the vectors that the same rows in folders give, and ticks never
load it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest

from surge_dagster import embedding_catalog
from surge_dagster.engine.errors import ConfigError
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.resources.upstream_asset import asset_key, asset_url
from tests.dagster import private_dagster
from tests.dagster.conftest import QUIET, Ran, Tick, Workbench, evaluate, range_tags
from tests.small_catalogs import Rows, assert_embedded, numbered_rows

PARTS, WHOLE = CatalogNames("parts"), CatalogNames("whole")
CATALOG: dict[str, Rows] = {
    "a": numbered_rows("a", 5),
    "b": numbered_rows("b", 3),
    "ß, 50%": numbered_rows("s", 2),
}


class Location:
    """The code location of `upstream_catalog.py`, loaded as a run's process does."""

    def __init__(self, bench: Workbench) -> None:
        self.root, self.instance = bench.root, bench.instance
        # A copy for each test: Dagster loads a file once in a process.
        self._file = Path(shutil.copy(Path(__file__).with_name("upstream_catalog.py"), bench.root))

    @property
    def repository(self) -> dg.RepositoryDefinition:
        return self._loaded.get_definition()

    @property
    def _loaded(self) -> Any:
        return private_dagster.repository_of_file(self._file, "defs")

    def write(self, catalog: Mapping[str, Rows]) -> None:
        rows = [
            (key, *row, place) for key, found in catalog.items() for place, row in enumerate(found)
        ]
        frame = pl.DataFrame(rows, schema=["category", "id", "text", "place"], orient="row")
        frame.sort("place", "category").write_parquet(self.root / "frames.parquet")

    def run(self, job: str, config: Mapping[str, Any] = {}, **how: Any) -> Ran:
        made = self._loaded.get_reconstructable_job(job)
        with dg.execute_job(made, self.instance, run_config={**config, **QUIET}, **how) as result:
            return Ran(self.instance, result.run_id, result.success)

    def materialize(self, asset: str, keys: Sequence[str | None] = (None,)) -> None:
        for key in keys:
            tags = {"dagster/partition": key} if key else {}
            assert self.run("__ASSET_JOB", asset_selection=[dg.AssetKey(asset)], tags=tags).success

    def tick(self, names: CatalogNames) -> Tick:
        repository = self.repository
        given = {key: repository.get_top_level_resources()[key] for key in names.resource_keys}
        return evaluate(self.instance, repository, given, names.sensor)

    def launch(self, names: CatalogNames, found: Tick) -> Ran:
        [request] = found.run_requests
        return self.run(names.embed_job, request.run_config, tags=dict(request.tags))

    def assert_embedded(self, names: CatalogNames, catalog: Mapping[str, Rows]) -> None:
        output = self.root / str(names.name)
        [space] = [each.parent.name for each in output.glob("*/space.json")]
        for key, rows in catalog.items():
            assert_embedded(output, space, key, rows)


@pytest.fixture
def location(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Location:
    monkeypatch.setenv("UPSTREAM_ROOT", str(bench.root))
    found = Location(bench)
    found.write(CATALOG)
    return found


def test_partitions_of_an_asset_become_those_of_the_catalog(location: Location) -> None:
    location.materialize("products", ["a", "b"])

    assert location.launch(PARTS, location.tick(PARTS)).success

    location.assert_embedded(PARTS, {key: CATALOG[key] for key in "ab"})
    assert not location.tick(PARTS).run_requests

    location.materialize("products", ["ß, 50%"])

    ran = location.launch(PARTS, location.tick(PARTS))

    assert ran.success
    assert len(ran.materialized(PARTS.embeddings)) == 1

    location.assert_embedded(PARTS, CATALOG)
    assert location.run(PARTS.check_job).success


def test_a_backfill_of_embeddings_loads_the_asset_in_the_job_of_assets(location: Location) -> None:
    location.materialize("products", ["a", "b"])
    location.tick(PARTS)
    tags = range_tags("a", "b") | {"dagster/backfill": "x"}

    ran = location.run("__ASSET_JOB", asset_selection=[PARTS.embeddings], tags=tags)

    assert ran.success
    assert ran.materialized(PARTS.embeddings).keys() == {"a", "b"}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The types with which Dagster's IO managers were asked for an asset's value."""
    load = dg.RepositoryDefinition.load_asset_value
    types: list[Any] = []

    def noted(*given: Any, **named: Any) -> Any:
        types.append(named["python_type"])
        return load(*given, **named)

    monkeypatch.setattr(dg.RepositoryDefinition, "load_asset_value", noted)
    return types


def test_tick_loads_no_table_and_its_run_loads_it_once(
    location: Location, loaded: list[Any]
) -> None:
    location.materialize("table")

    first = location.tick(WHOLE)

    assert loaded == []

    assert location.launch(WHOLE, first).success

    location.assert_embedded(WHOLE, CATALOG)
    assert loaded == [pl.DataFrame]
    assert "embedded the last materialization" in location.tick(WHOLE).skip_message
    assert loaded == [pl.DataFrame], "the tick lists nothing"


def test_run_lists_the_asset_anew(location: Location, loaded: list[Any]) -> None:
    location.materialize("table")

    assert location.run(WHOLE.refresh_job).success
    assert location.run(WHOLE.refresh_job).success

    assert loaded == [pl.DataFrame] * 2


def test_table_that_was_materialized_again_is_requested_and_compared(location: Location) -> None:
    location.materialize("table")

    assert location.run(WHOLE.refresh_job).success

    changed = {**CATALOG, "b": numbered_rows("b", 4), "new": numbered_rows("new", 1)}
    location.write(changed)

    location.materialize("table")

    assert len(location.tick(WHOLE).run_requests) == 1

    ran = location.run(WHOLE.refresh_job)
    assert ran.materialized(WHOLE.embeddings).keys() == {"b", "new"}

    location.assert_embedded(WHOLE, changed)


def test_run_that_failed_to_list_the_asset_is_requested_again(
    location: Location, bench: Workbench
) -> None:
    location.materialize("table")
    values = location.root / "values"

    values.rename(location.root / "away")

    assert not location.launch(WHOLE, location.tick(WHOLE)).success

    waiting = location.tick(WHOLE)
    assert not waiting.run_requests
    assert "(attempt 1)" in waiting.skip_message

    bench.ahead += timedelta(minutes=1)

    again = location.tick(WHOLE)

    [request] = again.run_requests
    assert request.tags["surge/attempt"] == "2"

    (location.root / "away").rename(values)
    assert location.launch(WHOLE, again).success
    assert "embedded the last materialization" in location.tick(WHOLE).skip_message


def test_lineage_leads_from_the_asset_to_the_source_partitions(location: Location) -> None:
    graph = location.repository.asset_graph
    assert graph.get(PARTS.source_partitions).parent_keys == {dg.AssetKey("products")}


def test_source_may_be_an_asset_its_key_or_its_url() -> None:
    @dg.asset(key=["shop", "products"])
    def products() -> None: ...

    for source in (products, products.key, dg.AssetSpec(products.key), "asset://shop/products"):
        made = embedding_catalog(source=source)
        assert made.resources
        assert made.resources["catalog"].url == "asset://shop/products"
    for key in (products.key, dg.AssetKey(["shop", "a/b", "50%"])):
        assert asset_key(asset_url(key)) == key
    for wrong in ("asset://", "asset://shop//b"):
        with pytest.raises(
            ConfigError, match="expected the key of an asset, as in asset://products"
        ):
            embedding_catalog(source=wrong)


def test_an_asset_that_is_missing_or_never_materialized_is_named(
    location: Location, bench: Workbench
) -> None:
    failed = location.run(WHOLE.refresh_job, raise_on_error=False)

    assert not failed.success
    assert "asset 'table' was never materialized" in failed.failure()

    without_asset = embedding_catalog(
        source="asset://products", output=str(bench.output), model="hash://16"
    )

    result = without_asset.resolve_job_def("catalog_refresh").execute_in_process(
        instance=bench.instance, raise_on_error=False, run_config=QUIET
    )

    assert (
        "no code location in which the asset 'products'"
        in Ran(bench.instance, result.run_id, False).failure()
    )
