"""The installed package holds every file of the repository's sources, under one namespace."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest

from surge_dagster import __version__

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
ARROW_VARIABLE = "ARROW_DEFAULT_MEMORY_POOL"
GOOGLE = {"dagster_gcp", "google.auth", "google.cloud"}
# Top-level folders and the names that they are imported by.
FOLDERS = {
    "surge_dagster": "surge_dagster",
    "assets": "surge_dagster.assets",
    "resources": "surge_dagster.resources",
}


def modules_on_disk() -> set[str]:
    """Every file of the package, by its installed path."""
    found: set[str] = set()
    for folder, name in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".yaml", ".typed"}:
                found.add(f"{name.replace('.', '/')}/{path.relative_to(ROOT / folder)}")
    return found


def printed(program: str) -> list[str]:
    """The words that a Python program prints."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd="/", check=True, stdout=-1, text=True).stdout.split()


def test_mapped_packages_import_under_the_namespace_and_not_from_the_top() -> None:
    imported = "import surge_dagster.assets, surge_dagster.resources"

    assert printed(f"{imported}, importlib.util as u; print(u.find_spec('assets'))") == ["None"]


def test_every_public_name_can_be_imported_first() -> None:
    """Each name is imported in a process of its own, forked from one that has imported the package
    and libraries."""
    of_dagster = {
        "CatalogSource",
        "EmbeddingCatalog",
        "EmbeddingsInput",
        "EncoderResource",
        "OutputStore",
        "embedding_catalog",
        "failure_text",
    }
    command = f"""
import os, sys
before = dict(os.environ)
import surge_dagster
assert dict(os.environ) == before
assert not {{"dagster", "torch", "pyarrow", "numpy"}} & set(sys.modules)
import numpy, pyarrow
for name in sorted(surge_dagster.__all__, key=lambda name: name in {of_dagster!r}):
    if name in {of_dagster!r}:
        import dagster
    if not (child := os.fork()):
        exec(f"from surge_dagster import {{name}}")
        of_dagster = name in {of_dagster!r}
        os._exit("torch" in sys.modules or ("dagster" in sys.modules and not of_dagster))
    assert not os.waitpid(child, 0)[1], name
"""
    environment = {name: value for name, value in os.environ.items() if name != ARROW_VARIABLE}
    subprocess.run([sys.executable, "-c", command], cwd="/", check=True, env=environment)


COMMAND = "import surge_dagster.__main__, pyarrow"
# In a process that had imported pyarrow before.
DAGSTER_RUN = (
    "import pyarrow; from surge_dagster.orchestration.refresh import _use_jemalloc as f; f()"
)


@pytest.mark.parametrize("started", [COMMAND, DAGSTER_RUN], ids=["command", "dagster run"])
@pytest.mark.parametrize(("named", "allocator"), [(None, "jemalloc"), ("system", "system")])
def test_processes_allocate_with_jemalloc_by_default(
    monkeypatch: pytest.MonkeyPatch, started: str, named: str | None, allocator: str
) -> None:
    monkeypatch.delenv(ARROW_VARIABLE, raising=False)
    if named is not None:
        monkeypatch.setenv(ARROW_VARIABLE, named)

    assert printed(f"{started}; print(pyarrow.default_memory_pool().backend_name)") == [allocator]


def test_deployments_allocate_with_jemalloc() -> None:
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    assert f"{ARROW_VARIABLE}=jemalloc" in dockerfile


def test_collecting_tests_imports_no_package_that_takes_seconds(
    imported_by_collecting: frozenset[str],
) -> None:
    """Each process of `make test` collects all tests; those that need such a package import it
    themselves."""
    slow = {
        "torch",
        "sentence_transformers",
        "scipy",
        "openvino",
        "moto",
        "dagster_graphql.schema",
        "dagster_k8s",
        "dagster_webserver",
        "google.cloud.bigquery_storage_v1",
        "lancedb",
        "qdrant_client",
        "datasets",
        "deltalake",
    }

    assert not slow & imported_by_collecting


@pytest.mark.parametrize(
    ("begin", "slow"),
    [
        (
            "import surge_dagster as s; s.embedding_catalog(output='gs://b/out', devices='cuda')",
            {
                *GOOGLE,
                "torch",
                "transformers",
                "pandas",
                "polars",
                "obstore",
                "sentence_transformers",
            },
        ),
        (
            "import surge_dagster.engine.encoder.worker.main",
            {"torch", "transformers", "pandas", "pyarrow", "openvino", "tokenizers"},
        ),
        (
            "import surge_dagster as s; s.open_store('/tmp'); s.EmbeddingRun",
            {"obstore", "boto3", "polars", *GOOGLE},
        ),
    ],
    ids=[
        "definitions of every run, tick and server of Dagster",
        "worker of each GPU",
        "run with a local output",
    ],
)
def test_process_begins_without_packages_that_take_seconds_to_import(
    begin: str, slow: set[str]
) -> None:
    assert printed(f"import sys; {begin}; print(*{slow!r} & set(sys.modules))") == []


def test_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    """Takes seconds: it builds the wheel with the installed setuptools."""
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    source = tmp_path / "source"
    source.mkdir()
    # building leaves traces beside the sources
    for name in (*FOLDERS, "pyproject.toml", "setup.py", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")

    names = set(zipfile.ZipFile(wheel).namelist())

    metadata = f"surge_dagster-{__version__}.dist-info/"
    assert {name for name in names if not name.startswith(metadata)} == modules_on_disk()
    assert f"{metadata}licenses/LICENSE" in names
    assert __version__ in wheel.name


def imported_distributions() -> set[str]:
    """The distributions of all packages that a file of ours imports, wherever the import stands."""
    names: set[str] = set()
    for path in chain.from_iterable((ROOT / folder).rglob("*.py") for folder in FOLDERS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.add(node.module.partition(".")[0])
    names -= sys.stdlib_module_names | {"surge_dagster"}
    known = packages_distributions()
    return {
        "google-auth" if name == "google" else known.get(name, [name])[0].lower() for name in names
    }


def test_every_imported_package_is_declared_and_that_of_s3_is_an_extra() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in requirements}

    extras = SETTINGS["project"]["optional-dependencies"]

    core = names(SETTINGS["project"]["dependencies"])

    assert names(extras["s3"]) - core == {"boto3"}

    for extra, requirements in extras.items():
        if extra not in ("bench", "dev", "integrations"):
            core |= names(requirements)
    assert imported_distributions() <= core


def test_constraints_pin_the_declared_dependencies() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()

    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))

    assert "+" not in pins["torch"], "a local version would rule out the other build"

    project = SETTINGS["project"]
    for requirement in chain(project["dependencies"], *project["optional-dependencies"].values()):
        name = requirement.split(">")[0].split("=")[0].split("[")[0]
        assert name in pins, f"{name} is declared and not pinned"
