"""A table of BigQuery as the catalog of a run, with the project of a `BigQueryResource`."""

from __future__ import annotations

import dagster as dg
import pytest

from surge_dagster import embedding_catalog
from surge_dagster.resources import CatalogSource
from tests.dagster.conftest import Workbench
from tests.engine.tables.bigquery_fake import CATALOG, SOURCE, TABLE, FakeBigQuery, table_of
from tests.extras import require
from tests.small_catalogs import assert_embedded

require("bigquery", "google.cloud.bigquery_storage_v1")


def test_a_run_embeds_a_table_with_the_resource_of_dagster_gcp(bench: Workbench) -> None:
    gcp = pytest.importorskip("dagster_gcp")
    fake = FakeBigQuery(table_of(CATALOG))
    fake.breaks = 1
    made = embedding_catalog(
        source=SOURCE, partition_by="category", output=str(bench.output), model="hash://16"
    )
    catalog = CatalogSource(  # pyright: ignore[reportCallIssue]
        url=SOURCE, partition_by=["category"], bigquery=gcp.BigQueryResource(project="p")
    )
    definitions = dg.Definitions(
        jobs=made.jobs, resources={**(made.resources or {}), "catalog": catalog}
    )
    with fake.serve_by_default():
        ran = definitions.resolve_job_def("catalog_refresh").execute_in_process(
            instance=bench.instance, raise_on_error=False
        )
    assert ran.success and fake.breaks == 0
    assert f"`{TABLE}`" in fake.queries[0]
    for key, rows in CATALOG.items():
        assert_embedded(bench.output, bench.space, key, rows)
