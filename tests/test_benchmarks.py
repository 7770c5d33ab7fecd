"""Benchmarks that promise more than to run, which `.ci/run` tries at a small size."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


# Of what the package requires, a GPU machine lacks everything but torch and sentence-transformers.
WITHOUT = """
from importlib import metadata
from importlib.machinery import PathFinder
LACKING = {"dagster", "datasets", "obstore", "polars", "pydantic"}
find = PathFinder.find_spec

def find_spec(name, *rest):
    return None if name.split(".")[0] in LACKING else find(name, *rest)

PathFinder.find_spec = staticmethod(find_spec)
# sentence-transformers imports `datasets` where its metadata are found.
of_name = metadata.Distribution.from_name
metadata.Distribution.from_name = lambda name: of_name("-" if name == "datasets" else name)
"""


def test_gpu_benchmark_measures_everything_without_dagster(tmp_path: Path) -> None:
    """It runs from the folder that is carried to a GPU machine."""
    folder = tmp_path / "carried"
    output_of("gpu_models", str(folder), str(tiny_model("bert_cls", tmp_path)))
    (folder / "sitecustomize.py").write_text(WITHOUT)
    options = ("--model", "model", "--device", "cpu", "--quick", "--out", "results")
    command = [sys.executable, "-m", "benchmarks.gpu", *options]
    environment = {**os.environ, "PYTHONPATH": str(folder)}

    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Everything was measured." in ended.stdout

    lines = (folder / "results" / "results.jsonl").read_text().splitlines()
    cosines = [json.loads(line).get("lowest_cosine", 1.0) for line in lines]

    assert min(cosines) > 0.9999


def test_evaluation_page_is_that_of_the_measured_document(tmp_path: Path) -> None:
    """`python -m benchmarks.evaluation --render` makes it again after an edit."""
    document = tmp_path / "evaluation.json"
    shutil.copy(DOCS / "evaluation.json", document)

    output_of("evaluation", "--render", "--document", str(document))

    page = (DOCS / "evaluation.md").read_text()

    assert (tmp_path / "evaluation.md").read_text() == page
    assert document.read_text() == (DOCS / "evaluation.json").read_text()

    images = re.findall(r"\(images/([\w-]+\.svg)\)", page)
    assert images == [path.name for path in (tmp_path / "images").iterdir()]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_memory_bound_holds_for_five_million_texts_in_any_place(tmp_path: Path) -> None:
    """Takes minutes: files of 8 GB, three times, and a store that stalls for half a minute."""
    words = ["--scenarios", "bound", "--bound-texts", "5000000", "--disk-folder", str(tmp_path)]

    document = run_benchmark("output", *words)

    assert len(document["bound"]["cases"]) == 10
    assert [aim["name"] for aim in document["targets"] if not aim["met"]] == []
