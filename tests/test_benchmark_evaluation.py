"""The evaluation: every experiment runs at a tiny scale, and the page in the repository is that of its document."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evaluation import calls, experiments, published, serialization
from benchmarks.evaluation.__main__ import measure, write
from benchmarks.evaluation.aims import aims
from benchmarks.evaluation.charts import draw
from benchmarks.evaluation.experiments import EXPERIMENTS
from benchmarks.evaluation.failures import failures
from benchmarks.evaluation.metering import Meter
from benchmarks.evaluation.page import CHARTS, DOCUMENT, IMAGES, PAGE, render, rows_of
from benchmarks.evaluation.scales import SCALES, case_of
from benchmarks.evaluation.strategies import measure_on
from benchmarks.evaluation.tables import TABLES, sigmas
from benchmarks.fixed_costs import fit_line
from benchmarks.paced_runs import paced_pool
from surge_dagster.catalogs.synthetic import partition_sizes
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.plan.cost_model import variation


@dataclass(frozen=True)
class _Row:
    milliseconds: float


@pytest.fixture(scope="module")
def pool() -> Iterator[EncoderPool]:
    with paced_pool(dimension=8, workers=1, call_seconds=0.001) as started:
        yield started


@pytest.fixture
def in_this_process(pool: EncoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every experiment on one small pool, instead of a process and a pool for each run."""
    monkeypatch.setattr(experiments, "measure", lambda strategy, case: measure_on(pool, strategy, case))
    monkeypatch.setattr(experiments, "opened", lambda case: contextlib.nullcontext(pool))
    monkeypatch.setattr(calls, "peer_call_cost", lambda sizes, *_: fit_line(sizes, [0.1, 0.2, 0.3, 0.4]))
    monkeypatch.setattr(serialization, "_in_own_process", serialization._measured)
    monkeypatch.setattr(Meter, "grown_bytes", 1)  # a run of milliseconds may grow by nothing


@pytest.mark.usefixtures("in_this_process")
def test_every_experiment_gives_rows_for_every_table_and_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of failures, which start processes, are the measured ones."""
    measured, scale = json.loads(DOCUMENT.read_text()), SCALES["tiny"]
    monkeypatch.setattr("benchmarks.evaluation.aims._BATCHED", scale.batched[-1])
    found = {"failures": measured["experiments"]["failures"]}
    for name in EXPERIMENTS.keys() - found.keys():
        rows = [asdict(row) for row in EXPERIMENTS[name](scale)]
        found[name] = found["failures"] | {"scale": "tiny", "rows": rows}
    document = json.loads(json.dumps(measured | {"experiments": found}))
    page, rows = render(document), rows_of(document)
    assert "Not measured" not in page
    assert "[[" not in page
    assert [aim.name for aim in aims(rows) if aim.measured is None and "0 million" not in aim.name] == []
    assert [path.name for path in draw(rows, tmp_path)] == [f"evaluation-{name}.svg" for name in CHARTS]


@pytest.mark.soak
def test_runs_with_failures_are_complete_and_name_what_they_refuse() -> None:
    """Takes some 10 s: a process to kill, a bucket, and five runs."""
    rows = {row.name: row for row in failures(4_000)}
    assert [row.wrong for row in rows.values()] == [0] * 5
    assert {name for name, row in rows.items() if row.refused} == {"a partition cannot be read"}
    killed = rows["the run is killed at half"]
    assert killed.published_before is not None
    assert killed.published_before + killed.encoded_after <= killed.texts


def test_page_is_that_of_the_measured_document() -> None:
    """`python -m benchmarks.evaluation --render` makes it again after an edit of its text or of a table."""
    page = PAGE.read_text()
    assert page == render(json.loads(DOCUMENT.read_text()))
    for name in re.findall(r"\(images/(evaluation-[\w-]+\.svg)\)", page):
        assert (IMAGES / name).is_file()


def test_page_and_charts_are_written_beside_the_document(tmp_path: Path) -> None:
    document = json.loads(DOCUMENT.read_text())
    write(document, tmp_path / "evaluation.json")
    assert json.loads((tmp_path / "evaluation.json").read_text()) == document
    assert (tmp_path / "evaluation.md").read_text() == PAGE.read_text()
    assert len(list((tmp_path / "images").iterdir())) == len(CHARTS)


def test_other_experiments_keep_their_rows_unless_machine_or_libraries_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPERIMENTS, "calls", lambda scale: iter([_Row(0.5)]))
    arguments = argparse.Namespace(scale="tiny", only=["calls"])
    [first] = measure(arguments, {})
    assert first["experiments"]["calls"]["rows"] == [{"milliseconds": 0.5}]
    first["experiments"]["failures"] = first["experiments"]["removed"] = first["experiments"].pop("calls")
    [second] = measure(arguments, json.loads(json.dumps(first)))
    assert set(second["experiments"]) == {"calls", "failures"}
    first["versions"]["numpy"] = "1.0"
    [third] = measure(arguments, first)
    assert set(third["experiments"]) == {"calls"}


def test_variation_beside_a_sigma_is_that_of_the_sizes_that_ran() -> None:
    cases = [case_of(published.MINILM_ON_TWO, 20_000, sigma=sigma) for sigma in published.SIGMAS]
    ran = {"memory": 0.1, "ttfo": 1.0, "largest": 1, "throughput": 1.0}
    rows: list[dict[str, Any]] = [
        ran | {"name": name, "group": f"{case.sigma}", "texts": case.texts, "partitions": case.partitions}
        for case in cases
        for name in ("PBP", "SURGE async")
    ]
    _, _, *lines = sigmas({"packing": rows})
    for case, line in zip(cases, lines, strict=True):
        sizes = partition_sizes(case.texts, case.partitions, case.sigma, case.seed)
        assert line.startswith(f"| {case.sigma} | {variation(sizes):.2f} (")


def test_experiment_that_was_not_measured_is_said_so() -> None:
    document = json.loads(DOCUMENT.read_text()) | {"experiments": {}}
    page = render(document)
    assert page.count("Not measured in this run.") == len([needed for _, needed in TABLES.values() if needed])
    assert "evaluation-sizes.svg" in page
    assert "evaluation-scaling.svg" not in page
