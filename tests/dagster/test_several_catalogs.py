"""Tests of two catalogs in one code location: their names differ, and neither changes the other."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from surge_dagster import embedding_catalog
from surge_dagster.engine.errors import ConfigError
from surge_dagster.orchestration.names import CatalogNames
from tests.dagster.conftest import NAMES, Ran, Tick, Workbench, evaluate, execute, options_of
from tests.small_catalogs import numbered_rows, write_partition

SHOP, DOCS = CatalogNames("shop"), CatalogNames("docs")


def everything_named(definitions: dg.Definitions) -> dict[str, set[str]]:
    """The names of all definitions in a code location."""
    repository = definitions.get_repository_def()
    graph = repository.asset_graph
    found = defaultdict[str, set[str]](set)
    for key in graph.get_all_asset_keys():
        node: Any = graph.get(key)
        found["assets"].add(key.to_user_string())
        found["groups"].add(node.group_name)
        if node.partitions_def is not None:
            found["partitions"].add(node.partitions_def.name)
    for job in repository.get_all_jobs():
        if not job.name.startswith("__"):
            found["jobs"].add(job.name)
            found["ops"].update(node.name for node in job.nodes)
    for automation in (*repository.sensor_defs, *repository.schedule_defs):
        found["automation"].add(automation.name)
    found["checks"].update(map(dg.AssetCheckKey.to_user_string, graph.asset_check_keys))
    found["resources"].update(definitions.resources or ())
    return found


def count_names(definitions: dg.Definitions) -> Counter[str]:
    """How many names of each kind a code location has."""
    return Counter({kind: len(names) for kind, names in everything_named(definitions).items()})


@pytest.fixture
def both(bench: Workbench) -> dg.Definitions:
    """Two catalogs with the same partition keys and other models."""
    made: list[dg.Definitions] = []
    for name, model in (("shop", "hash://16"), ("docs", "hash://24")):
        source = bench.root / name
        for key in "ab":
            write_partition(source, key, numbered_rows(f"{name}-{key}", 3))
        output = str(out_of(bench, name))
        made.append(embedding_catalog(name=name, source=str(source), output=output, model=model))
    return dg.Definitions.merge(*made)


def out_of(bench: Workbench, name: str) -> Path:
    return bench.root / f"{name}-vectors"


def run(bench: Workbench, both: dg.Definitions, job: str, **tags: str) -> Ran:
    return execute(bench.instance, both.resolve_job_def(job), tags=tags)


def look(bench: Workbench, both: dg.Definitions, names: CatalogNames) -> Tick:
    return evaluate(bench.instance, both.get_repository_def(), both.resources, names.sensor)


def test_catalog_without_a_name_has_plain_names(bench: Workbench) -> None:
    found = everything_named(embedding_catalog(source="c", output="o"))

    assert found["assets"] == {
        "source_partitions",
        "superbatches",
        "embeddings",
        "next_space",
        "current_space",
    }
    assert "embeddings:published_partitions_are_valid" in found["checks"]
    assert found["groups"] == {"surge"}
    assert found["partitions"] == {"catalog"}
    assert found["jobs"] == {
        "catalog_refresh",
        "embed_partitions",
        "catalog_check",
        "compare_spaces",
        "switch_current_space",
    }
    assert found["ops"] == {"refresh", "embeddings", "catalog_checks", "compare", "current_space"}
    assert found["automation"] == {
        "new_partitions",
        "lost_runs",
        "nightly_refresh",
        "scheduled_check",
    }
    assert found["resources"] == {"catalog", "encoder", "output", "embeddings_input", "changes"}


def test_names_of_two_catalogs_never_collide() -> None:
    """One catalog's name is a part of the plain names; a prefix could produce a plain name."""
    names = (None, "a", "catalog")
    catalogs = [embedding_catalog(source="c", output="o", name=name) for name in names]

    merged = dg.Definitions.merge(*catalogs)

    assert count_names(merged) == sum(map(count_names, catalogs), Counter())


def test_lineage_leads_from_the_source_to_the_space_of_readers() -> None:
    graph = embedding_catalog(source="c", output="o").get_repository_def().asset_graph

    read = {NAMES.source_partitions, NAMES.superbatches}
    written = {NAMES.embeddings, NAMES.next_space}
    assert graph.get(NAMES.superbatches).parent_keys == {NAMES.source_partitions}
    assert graph.get(NAMES.embeddings).parent_keys == read
    assert graph.get(NAMES.next_space).parent_keys == read
    assert graph.get(NAMES.current_space).parent_keys == written
    assert graph.executable_asset_keys == {NAMES.embeddings}


def test_assets_have_the_owners_of_the_settings() -> None:
    owners = ["ada@example.org", "team:search"]

    shop = embedding_catalog(source="c", output="o", owners=owners, derived=[{"dtype": "int8"}])

    graph = shop.get_repository_def().asset_graph

    for key in graph.get_all_asset_keys():
        assert graph.get(key).owners == owners


def test_description_of_an_asset_names_its_jobs_and_automation() -> None:
    graph = embedding_catalog(name="shop", source="c", output="o").get_repository_def().asset_graph

    automation = {
        SHOP.source_partitions: {SHOP.sensor, SHOP.schedule},
        SHOP.embeddings: {SHOP.refresh_job, SHOP.embed_job, SHOP.check_job, SHOP.sensor},
        SHOP.superbatches: {SHOP.refresh_job, SHOP.embed_job},
        SHOP.current_space: {SHOP.switch_job, SHOP.refresh_job, SHOP.embed_job},
    }
    for asset, names in automation.items():
        description = graph.get(asset).description or ""
        for name in names:
            assert f"`{name}`" in description


def test_each_catalog_is_embedded_with_its_own_model_and_output(
    bench: Workbench, both: dg.Definitions
) -> None:
    ran = run(bench, both, SHOP.refresh_job)

    assert ran.success
    assert set(ran.materialized(SHOP.embeddings)) == {"a", "b"}
    assert not ran.materialized(DOCS.embeddings)
    assert not out_of(bench, "docs").exists()
    assert bench.instance.get_dynamic_partitions("docs_catalog") == []

    ran = run(bench, both, DOCS.refresh_job)

    events = ran.materialized(DOCS.embeddings)

    assert events["a"].metadata["dimension"].value == 24
    assert not ran.materialized(SHOP.embeddings)


def test_checks_of_a_catalog_are_those_of_its_own_assets(
    bench: Workbench, both: dg.Definitions
) -> None:
    assert run(bench, both, DOCS.refresh_job).success

    for check in run(bench, both, DOCS.check_job).evaluations():
        assert check.passed
        assert check.asset_key in (DOCS.source_partitions, DOCS.embeddings)


def test_sensor_of_a_catalog_requests_only_its_own_partitions(
    bench: Workbench, both: dg.Definitions
) -> None:
    assert run(bench, both, SHOP.refresh_job).success

    assert not look(bench, both, SHOP).run_requests
    assert len(look(bench, both, DOCS).run_requests) == 1


def test_sensor_leaves_out_partitions_that_a_job_of_the_user_is_embedding(
    bench: Workbench, both: dg.Definitions
) -> None:
    """Dagster's schedules, sensors and job backfills record no assets on the runs of such a job."""
    bench.instance.add_dynamic_partitions("shop_catalog", ["a", "b"])
    job = dg.define_asset_job("nightly_shop", selection=[SHOP.embeddings])
    theirs = dg.Definitions.merge(both, dg.Definitions(jobs=[job]))

    run = bench.instance.create_run_for_job(
        theirs.resolve_job_def("nightly_shop"),
        status=dg.DagsterRunStatus.STARTED,
        tags={"dagster/partition": "a"},
    )

    assert run.asset_selection is None

    for names, expected in ((SHOP, ["b"]), (DOCS, ["a", "b"])):
        [request] = look(bench, both, names).run_requests
        assert options_of(request)["keys"] == expected


@pytest.mark.parametrize("name", ["", "my shop", "1st", "a/b", "shöp"])
def test_name_that_dagster_does_not_accept_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits and underscores"):
        embedding_catalog(name=name, source="c", output="o")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"source": "/t.csv.gz", "partition_by": "lang,kind"}, "`/t.csv.gz`."),
        ({"source": "s3://shop/{kind}.jsonl"}, "`s3://shop/{kind}.jsonl`."),
        ({"source": "/data/catalog"}, "The catalog in `/data/catalog`."),
        ({"source": "bigquery://p.d.t", "partition_by": "k"}, "bigquery://p.d.t"),
        ({"source": "asset://a", "partition_by": "k"}, "The asset `a`, through"),
    ],
)
def test_source_partitions_show_their_source(settings: dict[str, Any], said: str) -> None:
    graph = embedding_catalog(**settings, output="/out").resolve_asset_graph()

    node = graph.get(CatalogNames().source_partitions)

    assert said in (node.description or "")


def test_source_partitions_name_the_columns_of_their_keys() -> None:
    made = embedding_catalog(source="/t.csv", partition_by="lang,kind", output="/out")

    node = made.resolve_asset_graph().get(CatalogNames().source_partitions)

    assert " The values of `lang` and `kind` are its partitions." in (node.description or "")
