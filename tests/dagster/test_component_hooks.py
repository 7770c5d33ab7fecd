"""What users change of the component's assets and runs: `post_processing`, and a subclass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster.components.testing import DefsFolderSandbox, create_defs_folder_sandbox
from dagster.components.testing.test_cases import TranslationTestCase, test_cases
from dagster.components.testing.utils import component_defs
from pydantic import ValidationError

from surge_dagster import EmbeddingCatalog
from surge_dagster.assets.embeddings import CatalogRun
from surge_dagster.config.settings import load_settings
from surge_dagster.engine.errors import ConfigError
from surge_dagster.orchestration.names import CatalogNames
from tests.dagster.conftest import MODEL, NAMES, Ran, Workbench, execute

SHOP = CatalogNames("shop")
# Runs report assets under their keys, partitions and code version.
_OF_RUNS = ("key", "key_prefix", "partitions_defs", "code-version")
CASES = [case for case in test_cases if case.name not in _OF_RUNS]


@pytest.fixture
def sandbox() -> Iterator[DefsFolderSandbox]:
    with create_defs_folder_sandbox() as made:
        yield made


@contextmanager
def processed(
    sandbox: DefsFolderSandbox, target: str, attributes: Mapping[str, Any]
) -> Iterator[dg.Definitions]:
    """Give the definitions of the catalog "shop", whose defs.yaml changes its assets."""
    contents: dict[str, Any] = {
        "type": "surge_dagster.EmbeddingCatalog",
        "attributes": {"name": "shop", "source": "catalog", "output": "output", "model": MODEL},
        "post_processing": {"assets": [{"target": target, "attributes": dict(attributes)}]},
    }
    folder = sandbox.scaffold_component(EmbeddingCatalog, "shop", defs_yaml_contents=contents)
    with sandbox.load_component_and_build_defs(folder) as (_, definitions):
        yield definitions


def spec_of(definitions: dg.Definitions, key: dg.AssetKey) -> dg.AssetSpec:
    [spec] = [spec for spec in definitions.resolve_all_asset_specs() if spec.key == key]
    return spec


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_post_processing_changes_embeddings(
    sandbox: DefsFolderSandbox, case: TranslationTestCase
) -> None:
    target = "key:shop/embeddings"

    with processed(sandbox, target, case.attributes) as definitions:
        assert case.assertion(spec_of(definitions, SHOP.embeddings))


def test_post_processing_replaces_the_freshness_policy(sandbox: DefsFolderSandbox) -> None:
    window = "dg.FreshnessPolicy.time_window(fail_window=datetime.timedelta(days=7))"
    attributes = {"freshness_policy": f"{{{{ {window} }}}}"}

    with processed(sandbox, "key:shop/embeddings", attributes) as definitions:
        policy = spec_of(definitions, SHOP.embeddings).freshness_policy

    assert policy == dg.FreshnessPolicy.time_window(fail_window=timedelta(days=7))


def test_post_processing_of_all_assets_reaches_external_ones(sandbox: DefsFolderSandbox) -> None:
    attributes = {"owners": ["team:search"], "group_name": "search", "kinds": ["catalog"]}

    with processed(sandbox, "*", attributes) as definitions:
        specs = list(definitions.resolve_all_asset_specs())

    assert {spec.key for spec in specs} >= {SHOP.source_partitions, SHOP.current_space}
    assert {tuple(spec.owners) for spec in specs} == {("team:search",)}
    assert {spec.group_name for spec in specs} == {"search"}
    assert all("catalog" in spec.kinds for spec in specs)


def test_post_processing_keeps_what_it_does_not_name(sandbox: DefsFolderSandbox) -> None:
    attributes = {"metadata": {"team": "search"}}

    with processed(sandbox, "key:shop/embeddings", attributes) as definitions:
        metadata = spec_of(definitions, SHOP.embeddings).metadata

    assert {"dagster/column_schema", "dagster/uri", "team"} <= metadata.keys()


def test_automation_condition_requests_missing_partitions(sandbox: DefsFolderSandbox) -> None:
    attributes = {"automation_condition": "{{ dg.AutomationCondition.on_missing() }}"}

    with (
        dg.DagsterInstance.ephemeral() as instance,
        processed(sandbox, "key:shop/embeddings", attributes) as definitions,
    ):
        first = dg.evaluate_automation_conditions(definitions, instance)
        instance.add_dynamic_partitions(SHOP.partitions_name, ["a", "b"])
        for key in "ab":
            event = dg.AssetMaterialization(SHOP.source_partitions, partition=key)
            instance.report_runless_asset_event(event)
        instance.report_runless_asset_event(dg.AssetMaterialization(SHOP.superbatches))
        second = dg.evaluate_automation_conditions(definitions, instance, cursor=first.cursor)

    assert first.total_requested == 0
    assert second.get_requested_partitions(SHOP.embeddings) == {"a", "b"}


class Announced(EmbeddingCatalog):
    """A catalog of a project with its own tags, and something to do around each run."""

    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        return super().get_asset_spec(spec).merge_attributes(tags={"domain": "shop"})

    def execute(
        self, context: dg.OpExecutionContext, run: CatalogRun
    ) -> Iterable[dg.AssetCheckResult]:
        context.log.info(f"before {run.partition_keys}")
        yield from super().execute(context, run)
        context.log.info(f"after {run.report.texts_encoded} texts")


class Renamed(EmbeddingCatalog):
    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        return spec.replace_attributes(key=[*spec.key.path, "v2"])


class Repartitioned(EmbeddingCatalog):
    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        return spec.replace_attributes(partitions_def=dg.StaticPartitionsDefinition(["a"]))


class Stopped(EmbeddingCatalog):
    def execute(
        self, context: dg.OpExecutionContext, run: CatalogRun
    ) -> Iterable[dg.AssetCheckResult]:
        raise dg.Failure("the price list is being loaded")


class OfOtherCode(EmbeddingCatalog):
    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        return spec.replace_attributes(code_version="9")


class Forgetful(EmbeddingCatalog):
    def get_asset_spec(self, spec: dg.AssetSpec) -> Any:
        spec.merge_attributes(tags={"domain": "shop"})


class Idle(EmbeddingCatalog):
    def execute(
        self, context: dg.OpExecutionContext, run: CatalogRun
    ) -> Iterable[dg.AssetCheckResult]:
        return []


class Mute(EmbeddingCatalog):
    def execute(self, context: dg.OpExecutionContext, run: CatalogRun) -> Any:
        super().execute(context, run)


def definitions_of(kind: type[EmbeddingCatalog], root: Path) -> dg.Definitions:
    settings = load_settings(
        source=str(root / "catalog"), output=str(root / "output"), model=MODEL, owners=["team:a"]
    )
    return component_defs(component=kind(settings))


def test_subclass_changes_the_spec_of_every_asset(tmp_path: Path) -> None:
    specs = list(definitions_of(Announced, tmp_path).resolve_all_asset_specs())

    assert {spec.tags.get("domain") for spec in specs} == {"shop"}
    assert {tuple(spec.owners) for spec in specs} == {("team:a",)}


@dataclass(frozen=True)
class OfDomain(EmbeddingCatalog):
    """A catalog with attributes of its own."""

    domain: str = "shop"
    levels: list[int] = field(default_factory=lambda: [1])


@pytest.mark.parametrize(
    ("given", "domain", "levels"),
    [({}, "shop", [1]), ({"domain": "{{ env.DOMAIN }}", "levels": [1, 2]}, "garden", [1, 2])],
)
def test_fields_of_a_subclass_are_attributes(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], domain: str, levels: list[int]
) -> None:
    monkeypatch.setenv("DOMAIN", "garden")

    made = OfDomain.from_attributes_dict(attributes={"source": "c", "output": "o", **given})

    assert made.domain == domain
    assert made.levels == levels
    assert made.settings.source == "c"


@pytest.mark.parametrize("wrong", [{"levels": "many"}, {"domains": "shop"}])
def test_wrong_attribute_of_a_subclass_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        OfDomain.from_attributes_dict(attributes={"source": "c", "output": "o", **wrong})


@dataclass(frozen=True)
class OfOwners(EmbeddingCatalog):
    owners: str = "team:search"


def test_field_with_the_name_of_a_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="'owners' of OfOwners is a setting"):
        OfOwners.from_attributes_dict(attributes={"source": "c", "output": "o"})


@dataclass(frozen=True, kw_only=True)
class OfRequiredDomain(EmbeddingCatalog):
    domain: str


def test_unset_variable_of_a_required_field_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOMAIN", raising=False)
    given = {"source": "c", "output": "o", "domain": "{{ env.DOMAIN }}"}

    with pytest.raises(ConfigError, match=r"domain: '{{ env.DOMAIN }}' resolves to nothing"):
        OfRequiredDomain.from_attributes_dict(attributes=given)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Renamed, "changed key of the asset"),
        (Repartitioned, "changed partitions_def of the asset"),
        (OfOtherCode, "changed code_version of the asset"),
        (Forgetful, "returned NoneType for the asset"),
    ],
)
def test_subclass_that_changes_what_runs_report_is_refused(
    tmp_path: Path, kind: type[EmbeddingCatalog], problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"get_asset_spec {problem}"):
        definitions_of(kind, tmp_path)


def refreshed(bench: Workbench, definitions: dg.Definitions) -> Ran:
    return execute(bench.instance, definitions.resolve_job_def(NAMES.refresh_job))


def materialized(bench: Workbench, definitions: dg.Definitions) -> Ran:
    bench.instance.add_dynamic_partitions(NAMES.partitions_name, ["a"])
    job = definitions.resolve_implicit_global_asset_job_def()
    tags = {"dagster/partition": "a"}
    return execute(bench.instance, job, tags=tags, asset_selection=[NAMES.embeddings])


@pytest.mark.parametrize(
    ("launch", "before"), [(refreshed, "before None"), (materialized, "before ['a']")]
)
def test_subclass_works_before_and_after_each_run(
    bench: Workbench, launch: Callable[[Workbench, dg.Definitions], Ran], before: str
) -> None:
    bench.write("a", 3)

    ran = launch(bench, definitions_of(Announced, bench.root))

    lines = ran.logged()
    assert ran.success
    assert ran.materialized().keys() == {"a"}
    assert ran.checks()[NAMES.run_check.name].passed
    assert lines.index(before) < lines.index("after 3 texts")


@pytest.mark.parametrize("launch", [refreshed, materialized])
def test_error_of_a_subclass_fails_the_run(
    bench: Workbench, launch: Callable[[Workbench, dg.Definitions], Ran]
) -> None:
    bench.write("a")

    ran = launch(bench, definitions_of(Stopped, bench.root))

    assert not ran.success
    assert ran.failure() == "the price list is being loaded"


@pytest.mark.parametrize("launch", [refreshed, materialized])
@pytest.mark.parametrize(
    ("kind", "problem"), [(Idle, "embedded nothing"), (Mute, "returned None; expected")]
)
def test_run_whose_subclass_does_not_embed_fails(
    bench: Workbench,
    launch: Callable[[Workbench, dg.Definitions], Ran],
    kind: type[EmbeddingCatalog],
    problem: str,
) -> None:
    bench.write("a")

    ran = launch(bench, definitions_of(kind, bench.root))

    assert f"execute of the component {problem}" in ran.failure()
    assert "yield from super().execute(context, run)" in ran.failure()
    assert not ran.will_retry


def test_component_says_what_it_is_and_whose() -> None:
    spec = EmbeddingCatalog.get_spec()

    assert spec.description and spec.description.startswith("Embeddings of a partitioned catalog")
    assert spec.owners == ["team:surge-dagster"]
    assert "embeddings" in spec.tags
