"""Tests of the component, with Dagster's command line `dg`, in a project with two catalogs in YAML."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster.components.scaffold.scaffold import get_scaffolder
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from surge_dagster import EmbeddingCatalog
from surge_dagster.config.settings import Settings
from surge_dagster.engine.errors import ConfigError
from surge_dagster.orchestration.names import CatalogNames
from tests.dagster.conftest import Ran, Workbench
from tests.small_catalogs import numbered_rows, write_partition

DOCS = CatalogNames("docs")
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
ATTRIBUTES: dict[str, Any] = {
    "name": "docs",
    "source": "{{ context.project_root }}/docs",
    "output": "{{ context.project_root }}/vectors",
    "model": "hash://24",
    "b_min": "{{ env.DOCS_B_MIN }}",
    "document_prompt": "passage: ",
    "nightly_cron": "30 3 * * *",
    "check_cron": "0 5 * * 0",
    "timezone": "Europe/Berlin",
    "storage_options": {"secret_access_key": "{{ env.DOCS_SECRET }}", "region": "eu-west-1"},
}


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
    monkeypatch.setenv("DOCS_B_MIN", "10")
    monkeypatch.setenv("DOCS_SECRET", "hunter2")
    return tmp_path


def run_dg(project: Path, *arguments: str, code: int = 0) -> str:
    """Run `dg` in a project, check its exit code and return its output."""
    # The project has no environment of its own.
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "DG_CLI_TELEMETRY_ENABLED": "false"}
    command = [str(Path(sys.executable).with_name("dg")), *arguments]
    if not Path(command[0]).exists():
        pytest.skip("not installed: the extra 'integrations'")
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def load(**attributes: Any) -> EmbeddingCatalog:
    return EmbeddingCatalog.from_attributes_dict(attributes=attributes)


def write_defs(project: Path, name: str, attributes: dict[str, Any]) -> None:
    folder = project / "src" / "my_project" / "defs" / name
    folder.mkdir()
    document = {"type": "surge_dagster.EmbeddingCatalog", "attributes": attributes}
    (folder / "defs.yaml").write_text(yaml.safe_dump(document))


@pytest.mark.soak
def test_project_with_two_catalogs_passes_dg_check_and_embeds_one(
    project: Path, bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes long because `dg` loads the project in two processes."""
    write_defs(
        project, "shop", {"name": "shop", "source": "data/shop", "output": "data/shop-vectors"}
    )
    write_defs(project, "docs", ATTRIBUTES)
    output = run_dg(project, "check", "defs")
    assert "All component YAML validated" in output and "All definitions loaded" in output

    write_partition(project / "docs", "a", numbered_rows("a", 3))
    monkeypatch.syspath_prepend(project / "src")
    definitions = dg.load_from_defs_folder(path_within_project=project)
    job = definitions.resolve_job_def(DOCS.refresh_job)
    result = job.execute_in_process(instance=bench.instance)
    ran = Ran(bench.instance, result.run_id, result.success)
    assert ran.success and ran.materialized(DOCS.embeddings)["a"].metadata["dimension"].value == 24
    assert len(list(project.glob("vectors/*/a.parquet"))) == 1 and not (project / "data").exists()


def test_scaffolded_catalog_lies_in_the_project_whatever_the_working_folder(
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
    assert (settings.model, settings.dtype, settings.b_min, made.name) == (
        "hash://24",
        "float16",
        7,
        None,
    )
    assert (
        settings.storage_options.options().secret_access_key == "hunter2"
        and "hunter2" not in repr(made)
    )
    assert settings.storage_options.region == "eu-west-1"


def test_alert_webhook_is_read_from_a_template_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEBHOOK", "https://chat/hunter2")

    made = load(source="c", output="o", name="a", alert_webhook="{{ env.WEBHOOK }}")

    webhook = made.settings.alert_webhook
    assert webhook
    assert webhook.get_secret_value() == "https://chat/hunter2"
    assert "hunter2" not in repr(made)


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"bmin": 3}, "bmin"),
        ({"b_min": "many"}, "b_min"),
        ({"b_min": 0}, "b_min"),
        ({"dtype": "int8"}, "dtype"),
        ({"storage_options": {"secret": "hunter2"}}, "storage_options.secret"),
        ({"gcp": {"credentials": "hunter2"}}, "gcp"),
        ({"alert_webhook": ["hunter2"]}, "alert_webhook"),
        ({"source": None}, "source"),
        ({"storage_options": None}, "storage_options"),
    ],
)
def test_error_of_a_wrong_attribute_contains_its_name(
    attributes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        load(**{"source": "c", "output": "o", **attributes})
    places = {".".join(map(str, error["loc"])) for error in refused.value.errors()}
    assert any(place.startswith(named) for place in places) and "hunter2" not in str(refused.value)


def test_schema_accepts_values_and_templates_and_refuses_other_values() -> None:
    """`dg check yaml` validates against the schema alone."""
    schema = Draft202012Validator(EmbeddingCatalog.model().model_json_schema())

    def is_valid(**attributes: Any) -> bool:
        return schema.is_valid({"source": "c", "output": "o", **attributes})

    assert is_valid(
        removed_partitions="{{ env.A }}",
        checks="{{ env.A }}",
        dtype="float16",
        max_runs="{{ env.A }}",
    )
    assert is_valid(checks={"ids_match": False, "texts_match": "off"}, document_prompt=None)
    assert is_valid(
        run_tags={
            "dagster/priority": 5,
            "queue": "{{ env.A }}",
            "dagster-k8s/config": {"a": {"b": 1}},
        }
    )
    assert not is_valid(run_tags={"queue": None})
    assert not is_valid(removed_partitions="remove")
    assert not is_valid(checks={"ids_match": "loud"}) and not is_valid(checks={"nothing": "warn"})
    assert not is_valid(checks=7) and not is_valid(max_runs="many") and not is_valid(bmin=3)


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
    assert (settings.model, settings.document_prompt, settings.b_min, settings.dtype) == (
        "hash://8",
        "query: ",
        None,
        "float32",
    )
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
