"""A plan and the run after it: texts and tokens are predicted whatever was embedded before; no
clock is involved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from surge_dagster.engine.plan import catalog_sample
from surge_dagster.engine.plan.planned_run import learning, plan
from surge_dagster.engine.plan.planner import Plan
from surge_dagster.engine.run.report import RunReport
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.checked_rows import checked_rows
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.store import open_store
from tests.engine.priced_pool import C_IPC, C_TEXT
from tests.engine.runs import make_run
from tests.small_catalogs import Rows, numbered_rows, partition_of

BOUNDS = Thresholds(b_min=300, b_max=400)
OTHERS = {
    "long texts": [(str(row), f"{row} " * 4_000) for row in range(8)],
    "another language": [(str(row), f"жёлтый чайник номер {row}") for row in range(90)],
    "equal texts": [(str(row), "the same text") for row in range(90)],
}


def listed(catalog: Mapping[str, Rows], version: str = "v1") -> list[Partition]:
    return [
        replace(partition_of(key, rows, version=version), rows=len(rows))
        for key, rows in catalog.items()
    ]


def planned_and_embedded(
    pool: Any, partitions: list[Partition], output: Path
) -> tuple[Plan, RunReport]:
    """The plan of a run, and the report of that run."""
    planned = plan(partitions, open_store(output), pool, BOUNDS)
    run = make_run(pool, partitions, output, BOUNDS)
    list(learning(run, pool, open_store(output)))
    return planned, run.report


@pytest.mark.parametrize("other", OTHERS)
def test_plan_has_the_texts_and_tokens_of_its_own_catalog(
    priced_pool: Any, tmp_path: Path, other: str
) -> None:
    planned_and_embedded(priced_pool, listed({"other": OTHERS[other]}), tmp_path / "other")
    catalog = {
        "plain": numbered_rows("plain", 350),
        "equal": [(str(row), f"text {row % 20}") for row in range(60)],
        "more": numbered_rows("more", 150),
        "cut": [(str(row), f"{row} " * 600) for row in range(30)],
    }
    for attempt in range(2):  # the second one after a run over the same catalog
        planned, report = planned_and_embedded(
            priced_pool, listed(catalog), tmp_path / str(attempt)
        )
        assert planned.tokens == pytest.approx(report.costs.tokens, rel=1e-3)
        assert planned.tokens_counted
        assert planned.texts_encoded == report.texts_encoded == 590
        assert planned.superbatches == report.superbatches
        computed = C_IPC * report.superbatches + C_TEXT * report.costs.texts_computed
        assert planned.forecast.encode_seconds == pytest.approx(computed, rel=1e-3)
        wall = planned.forecast.wall_seconds
        assert report.predicted_wall_seconds == pytest.approx(wall, rel=0.01)


def edited(rows: Rows, share: float, random: Random) -> Rows:
    return [(key, f"{text} edited" if random.random() < share else text) for key, text in rows]


def test_texts_that_the_old_files_have_are_no_work(priced_pool: Any, tmp_path: Path) -> None:
    random = Random(1)
    catalog = {key: numbered_rows(key, size) for key, size in {"a": 1_300, "b": 40, "c": 9}.items()}
    planned_and_embedded(priced_pool, listed(catalog), tmp_path)
    catalog = {key: edited(rows, 0.02, random) for key, rows in catalog.items()}
    catalog["b"] = [*catalog["b"], *numbered_rows("b", 7, start=40)]
    planned, report = planned_and_embedded(priced_pool, listed(catalog, "v2"), tmp_path)
    assert planned.tokens == pytest.approx(report.costs.tokens, rel=0.05)
    assert planned.texts_encoded == report.texts_encoded
    assert 20 < report.texts_encoded < 60
    assert planned.texts == planned.rows_reused + planned.texts_encoded == 1_356
    assert planned.superbatches == report.superbatches
    fresh, _ = planned_and_embedded(priced_pool, listed(catalog, "v2"), tmp_path)
    assert fresh.partitions_fresh == 3
    assert fresh.partitions == 0


def test_changes_of_many_partitions_are_estimated_from_some_of_them(
    priced_pool: Any, tmp_path: Path
) -> None:
    random = Random(2)
    catalog = {str(key): numbered_rows(str(key), 130 + key) for key in range(90)}
    planned_and_embedded(priced_pool, listed(catalog), tmp_path)
    catalog = {key: edited(rows, 0.1, random) for key, rows in catalog.items()}
    planned, report = planned_and_embedded(priced_pool, listed(catalog, "v2"), tmp_path)
    assert planned.tokens == pytest.approx(report.costs.tokens, rel=0.1)
    assert planned.texts_encoded == pytest.approx(report.texts_encoded, rel=0.1)
    assert 50 < planned.partitions_sampled <= 64


def with_missing_texts(catalog: Mapping[str, Rows], version: str) -> Iterator[Partition]:
    """Partitions of a source that skips rows without a text: three behind each of these rows."""
    for key, rows in catalog.items():
        texts = [value for _, text in rows for value in (text, None, "", None)]
        columns = {
            "id": pa.array(map(str, range(len(texts)))),
            "text": pa.array(texts, pa.string()),
        }
        read = partial(
            checked_rows, Selection(missing_text="skip"), key, [pa.record_batch(columns)]
        )
        yield replace(partition_of(key, [], version=version), rows=len(texts), read=read)


def test_rows_that_a_run_skips_are_no_texts(
    priced_pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of each partition a part is read, and of 64 partitions
    monkeypatch.setattr(catalog_sample, "_ROWS", 10)
    random = Random(3)
    catalog = {str(key): numbered_rows(str(key), 12 + key % 5) for key in range(70)}
    for version in ("v1", "v2"):
        partitions = list(with_missing_texts(catalog | {"none": [("id-0", "")]}, version))
        planned, report = planned_and_embedded(priced_pool, partitions, tmp_path)
        assert planned.texts == pytest.approx(
            report.texts_encoded + report.costs.rows_reused, rel=0.02
        )
        assert planned.texts_encoded == pytest.approx(report.texts_encoded, rel=0.15)
        assert planned.tokens == pytest.approx(report.costs.tokens, rel=0.15)
        catalog = {key: edited(rows, 0.4, random) for key, rows in catalog.items()}
    blank = list(with_missing_texts({"none": [("id-0", "")] * 4}, "v3"))
    assert plan(blank, open_store(tmp_path / "other"), priced_pool, BOUNDS).texts == 0


def test_partitions_that_a_run_refuses_are_no_work(priced_pool: Any, tmp_path: Path) -> None:
    repeated = [*numbered_rows("repeated", 20), ("id-3", "the same id")]
    partitions = listed({"good": numbered_rows("good", 30), "repeated": repeated})
    partitions.append(replace(partition_of("bad", numbered_rows("bad", 50), fails_at=40), rows=50))
    for expected in (30, 0):  # they are refused by every run
        planned, report = planned_and_embedded(priced_pool, partitions, tmp_path)
        assert planned.texts == report.texts_encoded == expected
        refused, failed = map(list, (planned.partitions_refused, report.partitions_failed))
        assert sorted(refused, key=str) == sorted(failed, key=str)
        assert len(refused) == 2
