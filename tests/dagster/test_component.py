"""Tests of the component: its attributes, its schema and what `dg` scaffolds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster.components.testing import DefsFolderSandbox, create_defs_folder_sandbox
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from surge_dagster import EmbeddingCatalog
from surge_dagster.component import _Scaffolder, _ScaffoldParams
from surge_dagster.config.settings import Settings
from surge_dagster.engine.errors import ConfigError


@pytest.fixture
def sandbox() -> Iterator[DefsFolderSandbox]:
    """A `dg` project without catalogs."""
    with create_defs_folder_sandbox() as made:
        yield made


def load(**attributes: Any) -> EmbeddingCatalog:
    return EmbeddingCatalog.from_attributes_dict(attributes=attributes)


def scaffolded(sandbox: DefsFolderSandbox, **params: str) -> Path:
    """Scaffold the catalog "shop" as `dg scaffold defs` does, and return its folder."""
    return sandbox.scaffold_component(EmbeddingCatalog, "shop", scaffold_params=params)


def places_of(sandbox: DefsFolderSandbox) -> list[str]:
    """Load the project, and return source and output of its catalog."""
    with sandbox.build_all_defs() as definitions:
        resources = definitions.resources or {}
        return [resources[key].url for key in ("shop_catalog", "shop_output")]


def test_scaffolded_catalog_lies_in_the_project_from_any_working_folder(
    sandbox: DefsFolderSandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scaffolded(sandbox)
    monkeypatch.chdir(tmp_path)

    data = f"{sandbox.project_root}/data/shop"
    assert places_of(sandbox) == [f"{data}/catalog", f"{data}/embeddings"]


def test_scaffolded_catalog_has_the_places_that_were_given(
    sandbox: DefsFolderSandbox,
) -> None:
    scaffolded(sandbox, source="s3://shop/catalog", output="gs://vectors/shop")

    assert places_of(sandbox) == ["s3://shop/catalog", "gs://vectors/shop"]


def test_scaffolded_file_sets_what_was_given_and_no_more(sandbox: DefsFolderSandbox) -> None:
    folder = scaffolded(sandbox, model="intfloat/e5-small", nightly_cron="0 3 * * *")

    written = yaml.safe_load((folder / "defs.yaml").read_text())
    assert written["attributes"].keys() == {"name", "source", "output", "model", "nightly_cron"}


@pytest.mark.parametrize(("folder", "name"), [("2024-shop", "catalog_2024_shop"), ("a-b", "a_b")])
def test_scaffolded_name_is_valid_in_any_folder(
    sandbox: DefsFolderSandbox, folder: str, name: str
) -> None:
    made = sandbox.scaffold_component(EmbeddingCatalog, folder, scaffold_params={})

    written = yaml.safe_load((made / "defs.yaml").read_text())
    assert written["attributes"]["name"] == name


def test_catalog_that_is_appended_to_a_file_has_another_name(
    sandbox: DefsFolderSandbox,
) -> None:
    file = scaffolded(sandbox) / "defs.yaml"
    params = _ScaffoldParams()  # pyright: ignore[reportCallIssue]
    request = dg.ScaffoldRequest(
        "surge_dagster.EmbeddingCatalog", file, "yaml", sandbox.project_root, params, append=True
    )

    _Scaffolder().scaffold(request)

    names = [each["attributes"]["name"] for each in yaml.safe_load_all(file.read_text())]
    assert len(set(names)) == 2


def test_each_answer_in_the_comments_of_a_scaffolded_file_is_valid(
    sandbox: DefsFolderSandbox,
) -> None:
    lines = (scaffolded(sandbox) / "defs.yaml").read_text().splitlines()
    answers = [line.removeprefix("  # ") for line in lines if re.match(r"  # \w+: ", line)]
    schema = Draft202012Validator(EmbeddingCatalog.model().model_json_schema())

    attributes: list[dict[str, Any]] = [yaml.safe_load(answer) for answer in answers]

    assert len(attributes) > 8
    for each in attributes:
        assert schema.is_valid({"source": "c", "output": "o", **each}), each


def test_attributes_are_the_settings_and_the_name() -> None:
    assert set(EmbeddingCatalog.model().model_fields) == {"name", *Settings.model_fields}


def test_attributes_override_the_environment_and_templates_are_resolved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "SURGE_MODEL": "hash://8",
        "SURGE_DTYPE": "float16",
        "B": "7",
        "SECRET": "hunter2",
    }.items():
        monkeypatch.setenv(name, value)
    storage = {"secret_access_key": "{{ env.SECRET }}", "region": "eu-west-1"}
    made = load(
        source="c", output="o", model="hash://24", b_min="{{ env.B }}", storage_options=storage
    )
    settings = made.settings

    assert settings.model == "hash://24"
    assert settings.dtype == "float16"
    assert settings.b_min == 7
    assert made.name is None
    assert settings.storage_options.options().secret_access_key == "hunter2"
    assert "hunter2" not in repr(made)
    assert settings.storage_options.region == "eu-west-1"


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"bmin": 3}, "bmin"),
        ({"b_min": "many"}, "b_min"),
        ({"storage_options": {"secret": "hunter2"}}, "storage_options.secret"),
        ({"alert_webhook": ["hunter2"]}, "alert_webhook"),
        ({"source": None}, "source"),
    ],
)
def test_error_of_a_wrong_attribute_contains_its_name(
    attributes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        load(**{"source": "c", "output": "o", **attributes})
    places = {".".join(map(str, error["loc"])) for error in refused.value.errors()}

    assert any(place.startswith(named) for place in places)
    assert "hunter2" not in str(refused.value)


VALID: list[dict[str, Any]] = [
    {"dtype": "float16", "document_prompt": None},
    {"max_runs": "{{ env.A }}", "removed_partitions": "{{ env.A }}", "checks": "{{ env.A }}"},
    {"checks": {"ids_match": False, "texts_match": "off"}},
    {"run_tags": {"dagster/priority": 5, "dagster-k8s/config": {"a": {"b": 1}}}},
]
INVALID: list[dict[str, Any]] = [
    {"bmin": 3},
    {"max_runs": "many"},
    {"removed_partitions": "remove"},
    {"run_tags": {"queue": None}},
    {"checks": {"ids_match": "loud"}},
    {"checks": {"nothing": "warn"}},
]


@pytest.mark.parametrize(
    ("attributes", "is_valid"), [*((each, True) for each in VALID), *((i, False) for i in INVALID)]
)
def test_schema_accepts_values_and_templates_and_refuses_others(
    attributes: dict[str, Any], is_valid: bool
) -> None:
    """`dg check yaml` validates only against the schema."""
    schema = Draft202012Validator(EmbeddingCatalog.model().model_json_schema())

    assert schema.is_valid({"source": "c", "output": "o", **attributes}) is is_valid


def test_unset_variable_or_null_counts_as_not_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("surge.yaml").write_text("document_prompt: 'query: '\n")
    monkeypatch.setenv("SURGE_MODEL", "hash://8")
    unset = "{{ env.NOT_SET }}"
    settings = load(
        source="c",
        output="{{ env.NOT_SET or 'o' }}",
        model=unset,
        document_prompt=unset,
        b_min=unset,
        dtype=None,
        name=None,
    ).settings

    assert settings.model == "hash://8"
    assert settings.document_prompt == "query: "
    assert settings.b_min is None
    assert settings.dtype == "float32"
    assert settings.output == "o"


@pytest.mark.parametrize("name", ["source", "output"])
def test_source_and_output_that_resolve_to_nothing_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"attribute {name}: '{{{{ env.NOT_SET }}}}' resolves to nothing; set the",
    ):
        load(**{"source": "c", "output": "o", name: "{{ env.NOT_SET }}"})


def test_source_and_output_are_required() -> None:
    with pytest.raises(ValidationError) as refused:
        load(name="shop")
    assert [error["loc"] for error in refused.value.errors()] == [("source",), ("output",)]
