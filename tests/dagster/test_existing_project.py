"""A Dagster project with assets before and after the embeddings works as a whole.

It is the folder `existing_project`, which docs/operate.md describes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest

from surge_dagster.orchestration.names import CatalogNames
from tests.dagster import private_dagster
from tests.dagster.conftest import QUIET, Ran, Workbench, evaluate, workbench
from tests.extras import require

PROJECT = Path(__file__).with_name("existing_project")
FOLDER = PROJECT / "src"
SHOP = CatalogNames("shop")
PRODUCTS = dg.AssetKey("products")
DUPLICATES = dg.AssetKey("duplicates")
SIZE = dg.AssetKey("catalog_size")
CATEGORIES = ("boots", "garden tools")


class Project:
    """The code location, loaded as a run's process does."""

    def __init__(self, bench: Workbench) -> None:
        self.data = bench.root
        self.instance = bench.instance
        self._loaded = private_dagster.repository_of_file(
            FOLDER / "my_shop" / "definitions.py", "defs"
        )

    @property
    def repository(self) -> dg.RepositoryDefinition:
        return self._loaded.get_definition()

    def run(self, job: str, config: Mapping[str, Any] = {}, **how: Any) -> Ran:
        made = self._loaded.get_reconstructable_job(job)
        with dg.execute_job(made, self.instance, run_config={**config, **QUIET}, **how) as result:
            return Ran(self.instance, result.run_id, result.success)

    def materialize(self, asset: dg.AssetKey, partition: str | None = None) -> Ran:
        """Materialize an asset as its button in the UI does."""
        tags = {"dagster/partition": partition} if partition else {}
        return self.run("__ASSET_JOB", asset_selection=[asset], tags=tags)

    def launch_requested(self) -> list[Ran]:
        """Launch what the catalog's sensor requests now."""
        resources = self.repository.get_top_level_resources()
        given = {key: resources[key] for key in SHOP.resource_keys}
        requests = evaluate(self.instance, self.repository, given, SHOP.sensor).run_requests
        return [
            self.run(SHOP.embed_job, request.run_config, tags=dict(request.tags))
            for request in requests
        ]

    def embed(self) -> None:
        """Materialize the shop's own asset, and launch what the sensor requests then."""
        for category in CATEGORIES:
            assert self.materialize(PRODUCTS, category).success
        [ran] = self.launch_requested()
        assert ran.success

    def evaluated(self, cursor: Any = None) -> Any:
        """Evaluate the automation conditions of all assets, as Dagster's daemon does."""
        assets = list(self.repository.assets_defs_by_key.values())
        return dg.evaluate_automation_conditions(assets, self.instance, cursor=cursor)


@contextmanager
def project_in(bench: Workbench) -> Iterator[Project]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOP_DATA", str(bench.root))
        patch.syspath_prepend(FOLDER)
        yield Project(bench)


@pytest.fixture
def project(bench: Workbench) -> Iterator[Project]:
    with project_in(bench) as made:
        yield made


@pytest.fixture(scope="module")
def embedded(
    tmp_path_factory: pytest.TempPathFactory, empty_home: Path, lasting_workers: None
) -> Iterator[Project]:
    """The project after its first run; tests materialize only assets after `embeddings`."""
    root = tmp_path_factory.mktemp("shop")
    with workbench(root, empty_home) as bench, project_in(bench) as made:
        made.embed()
        yield made


def test_assets_before_and_after_are_connected_by_the_catalog(project: Project) -> None:
    graph = project.repository.asset_graph

    assert graph.get(SHOP.source_partitions).parent_keys == {PRODUCTS}
    assert SHOP.source_partitions in graph.get(SHOP.embeddings).parent_keys
    assert SHOP.embeddings in graph.get(DUPLICATES).parent_keys
    assert SHOP.embeddings in graph.get(SIZE).parent_keys


def test_partitions_of_the_asset_before_are_embedded(embedded: Project) -> None:
    assert embedded.instance.get_materialized_partitions(SHOP.embeddings) == set(CATEGORIES)


def test_asset_after_gets_the_vectors_of_its_partition(embedded: Project) -> None:
    assert embedded.materialize(DUPLICATES, "boots").success

    stored = embedded.repository.load_asset_value(
        DUPLICATES, instance=embedded.instance, partition_key="boots"
    )
    assert isinstance(stored, pl.DataFrame)
    assert stored.rows() == [("boots 0", "boots 3")]


def test_asset_after_without_partitions_gets_all_vectors(embedded: Project) -> None:
    ran = embedded.materialize(SIZE)

    [event] = ran.materialized(SIZE).values()
    assert event.metadata["dagster/row_count"].value == 8


def test_eager_assets_after_are_requested_for_what_was_embedded(project: Project) -> None:
    before = project.evaluated()

    project.embed()

    after = project.evaluated(before.cursor)
    assert after.get_requested_partitions(DUPLICATES) == set(CATEGORIES)
    assert after.get_num_requested(SIZE) == 1


def test_run_with_nothing_to_do_requests_no_asset_after(project: Project) -> None:
    before = project.evaluated()
    project.embed()
    after = project.evaluated(before.cursor)

    assert project.run(SHOP.refresh_job).success

    assert project.evaluated(after.cursor).total_requested == 0


def test_new_version_of_the_asset_before_reaches_only_its_partition(project: Project) -> None:
    project.embed()
    project.materialize(PRODUCTS, "boots")

    ran = project.run(SHOP.refresh_job)

    assert ran.materialized(SHOP.embeddings).keys() == {"boots"}


def test_post_processing_of_the_project_reaches_embeddings(project: Project) -> None:
    node = project.repository.asset_graph.get(SHOP.embeddings)

    assert node.owners == ["team:search"]
    assert node.group_name == "search"
    assert node.tags["tier"] == "gold"
    assert isinstance(node.freshness_policy, dg.FreshnessPolicy)


@pytest.mark.processes
def test_dg_finds_the_project_as_its_comment_says(tmp_path: Path) -> None:
    require("dev", "dagster_dg_cli")
    [command] = re.findall("^#     (.+) dg dev$", (PROJECT / "pyproject.toml").read_text(), re.M)
    given = dict(setting.split("=") for setting in command.split())
    assert given.keys() == {"SHOP_DATA", "PYTHONPATH"}

    listed = subprocess.run(
        [Path(sys.executable).with_name("dg"), "list", "defs", "--json"],
        cwd=PROJECT,
        env={**os.environ, **given, "SHOP_DATA": str(tmp_path)},
        capture_output=True,
        text=True,
    )

    assert listed.returncode == 0, listed.stderr
    keys = {asset["asset_key"] for asset in json.loads(listed.stdout)["assets"]}
    assert keys >= {"products", "shop/embeddings", "duplicates"}
