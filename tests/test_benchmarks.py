"""Benchmarks that promise more than to run, which `.ci/run` tries at a small size."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.engine.encoder.conftest import tiny_model

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def run_benchmark(name: str, *words: str) -> dict[str, Any]:
    """The document that a benchmark prints as its last line."""
    return json.loads(output_of(name, *words).splitlines()[-1])


def output_of(name: str, *words: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.{name}", *words]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


ON_A_GPU_MACHINE = (
    "torch",
    "transformers",
    "sentence-transformers",
    "pyarrow",
    "filelock",
    "psutil",
)
WITHOUT = """
from importlib import metadata
from importlib.machinery import PathFinder
LACKING = {lacking}
find = PathFinder.find_spec

def find_spec(name, *rest):
    return None if name.split(".")[0] in LACKING else find(name, *rest)

PathFinder.find_spec = staticmethod(find_spec)
# sentence-transformers imports `datasets` where its metadata are found.
of_name = metadata.Distribution.from_name
metadata.Distribution.from_name = lambda name: of_name("-" if name == "datasets" else name)
"""


def lacking_on_a_gpu_machine() -> set[str]:
    """Top-level modules that are installed here and neither belong to what is there nor to what
    that requires."""
    there, waiting = set[str](), list(ON_A_GPU_MACHINE)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in there:
            there.add(name)
            with contextlib.suppress(PackageNotFoundError):
                stated = map(Requirement, requires(name) or [])
                waiting += [
                    one.name
                    for one in stated
                    if one.marker is None or one.marker.evaluate({"extra": ""})
                ]
    installed = packages_distributions().items()
    # Both are in the carried folder.
    carried = {"surge_dagster", "benchmarks"}
    return {
        module for module, names in installed if not there & set(map(canonicalize_name, names))
    } - carried


def test_gpu_benchmark_measures_everything_where_there_is_no_dagster(tmp_path: Path) -> None:
    """From the folder that is carried to a GPU machine, which has torch and little else."""
    lacking = lacking_on_a_gpu_machine() | {"pydantic"}  # the hub's typer alone requires it
    assert {"dagster", "polars", "obstore"} < lacking
    model = tiny_model("bert_cls", tmp_path)
    output_of("gpu_models", str(tmp_path / "carried"), str(model))
    (tmp_path / "carried" / "sitecustomize.py").write_text(WITHOUT.format(lacking=lacking))
    options = ("--model", "model", "--device", "cpu", "--quick", "--out", "results")
    command = [sys.executable, "-m", "benchmarks.gpu", *options]
    folder = str(tmp_path / "carried")
    environment = {**os.environ, "PYTHONPATH": folder}
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "Everything was measured." in finished.stdout, finished.stdout[-3000:]
    rows = [
        json.loads(line)
        for line in (tmp_path / "carried" / "results" / "results.jsonl").read_text().splitlines()
    ]
    measured = {row["stage"] for row in rows if len(row) > 3}
    assert measured == {
        "environment",
        "ceilings",
        "passes",
        "attention",
        "tokenizer",
        "pool",
        "run",
        "peer",
        "lanes",
    }
    assert all(row["lowest_cosine"] > 0.9999 for row in rows if "lowest_cosine" in row)


def test_evaluation_page_is_that_of_the_measured_document(tmp_path: Path) -> None:
    """`python -m benchmarks.evaluation --render` makes it again after an edit of its text or of a
    table."""
    document = tmp_path / "evaluation.json"
    shutil.copy(DOCS / "evaluation.json", document)
    assert "failures: wrong partitions" in output_of(
        "evaluation", "--render", "--document", str(document)
    )
    page = (DOCS / "evaluation.md").read_text()
    assert (tmp_path / "evaluation.md").read_text() == page
    assert document.read_text() == (DOCS / "evaluation.json").read_text()
    images = re.findall(r"\(images/([\w-]+\.svg)\)", page)
    assert images == [path.name for path in (tmp_path / "images").iterdir()]
    assert all((DOCS / "images" / name).is_file() for name in images)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_memory_bound_holds_for_five_million_texts_in_any_place(tmp_path: Path) -> None:
    """Takes minutes: files of 8 GB, three times, and a store that stalls for half a minute."""
    words = ["--scenarios", "bound", "--bound-texts", "5000000", "--disk-folder", str(tmp_path)]
    document = run_benchmark("output", *words)
    assert len(document["bound"]["cases"]) == 10
    assert [aim["name"] for aim in document["targets"] if not aim["met"]] == []
