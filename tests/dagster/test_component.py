"""Tests of the component: its attributes, its schema and what `dg` scaffolds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster.components.scaffold.scaffold import get_scaffolder
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from surge_dagster import EmbeddingCatalog
from surge_dagster.config.settings import Settings
from surge_dagster.engine.errors import ConfigError
from tests.dagster.conftest import Workbench

DEFINITIONS = """
from pathlib import Path
import dagster as dg

@dg.definitions
def defs() -> dg.Definitions:
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""
PROJECT = """
[project]
name = "my_project"
version = "1"
[tool.dg]
directory_type = "project"
[tool.dg.project]
root_module = "my_project"
"""


@pytest.fixture
def project(tmp_path: Path, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `dg` project without catalogs; DAGSTER_HOME is the workbench's."""
    package = tmp_path / "src" / "my_project"
    (package / "defs").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "definitions.py").write_text(DEFINITIONS)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    return tmp_path


def load(**attributes: Any) -> EmbeddingCatalog:
    return EmbeddingCatalog.from_attributes_dict(attributes=attributes)


def test_scaffolded_catalog_lies_in_the_project_from_any_working_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project / "src" / "my_project" / "defs" / "shop"
    folder.mkdir()

    scaffolder = get_scaffolder(EmbeddingCatalog)

    assert isinstance(scaffolder, dg.Scaffolder)

    scaffolder.scaffold(
        dg.ScaffoldRequest(
            type_name="surge_dagster.EmbeddingCatalog",
            target_path=folder,
            scaffold_format="yaml",
            project_root=project,
            params=None,  # pyright: ignore[reportArgumentType]
        )
    )
    monkeypatch.syspath_prepend(project / "src")
    monkeypatch.chdir(project / "src")
    resources = dg.load_from_defs_folder(path_within_project=project).resources or {}
    places = [resources[key].url for key in ("shop_catalog", "shop_output")]

    assert places == [f"{project}/data/shop/catalog", f"{project}/data/shop/embeddings"]


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
