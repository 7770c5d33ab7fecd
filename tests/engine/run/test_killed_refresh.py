"""SIGKILL during an incremental run: the next run completes it, with every row's own vector and
without encoding what an old file has, and a consumer of the change feed has the rows of the files.
`make soak` kills a hundred runs, which takes some minutes.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from random import Random

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.feed.changes import changes
from surge_dagster.engine.run.staging import STAGING
from surge_dagster.engine.tables.opening import open_source
from tests.engine.edits import EDITS, edited
from tests.engine.feeds import Applied, hand_over, rows_of
from tests.engine.killed_run import THRESHOLDS
from tests.engine.run.test_resume import CATALOG, Mortal, Output, in_flight, mortal_run
from tests.engine.runs import failures, finish, make_run
from tests.small_catalogs import Rows, assert_embedded, published_files, write_catalog

__all__ = ["mortal_run"]


STEPS = 150  # fewer than an incremental run has
SOAK = (pytest.mark.soak, pytest.mark.timeout(1800))


@pytest.fixture(scope="module")
def edited_catalog() -> dict[str, Rows]:
    random = Random(7)
    return {
        key: edited(rows, [*EDITS] * (1 + len(rows) // 60), random) for key, rows in CATALOG.items()
    }


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory, edited_catalog: dict[str, Rows]) -> Path:
    return write_catalog(
        tmp_path_factory.mktemp("edited") / "catalog", edited_catalog, version="v2"
    )


@pytest.fixture(scope="module")
def yesterday(tmp_path_factory: pytest.TempPathFactory, hash_pool: EncoderPool) -> Path:
    root = tmp_path_factory.mktemp("yesterday")
    finish(
        make_run(
            hash_pool,
            open_source(write_catalog(root / "catalog", CATALOG)),
            root / "out",
            THRESHOLDS,
        )
    )
    target: Applied = {}
    hand_over(changes(root / "out", "shop"), target)
    assert target == rows_of(CATALOG)
    return root / "out"


@pytest.mark.parametrize(
    "step",
    [
        20,
        61,
        110,
        *(pytest.param(Random(seed).randint(1, STEPS), marks=SOAK) for seed in range(100)),
    ],
)
def test_incremental_run_is_completed_after_a_kill(
    hash_pool: EncoderPool,
    tmp_path: Path,
    yesterday: Path,
    mortal_run: Mortal,
    catalog: Path,
    edited_catalog: dict[str, Rows],
    step: int,
) -> None:
    rows, output = edited_catalog, Output(str(tmp_path / "out"), tmp_path / "out", None)
    shutil.copytree(yesterday, output.folder)
    status, lines = mortal_run(output, "any", step)
    assert status == -signal.SIGKILL
    target = rows_of(CATALOG)
    came = hand_over(changes(output.folder, "shop"), target) if step % 2 else []
    run = make_run(hash_pool, open_source(catalog), output.open(), THRESHOLDS)
    assert failures(finish(run)) == []
    space = run.space.name
    for key in rows:
        assert_embedded(output.folder, space, key, rows[key])
    assert published_files(output.folder, space) == {f"{key}.parquet" for key in rows}
    assert not (output.folder / STAGING).exists()
    new = sum(text not in {old for _, old in CATALOG[key]} for key in rows for _, text in rows[key])
    assert run.report.texts_encoded <= new
    assert in_flight(lines) > 0
    came += hand_over(changes(output.folder, "shop"), target)
    assert target == rows_of(rows)
    given = [(partition, row) for _, partition, row in came]
    assert len(given) == len(set(given)), "nothing comes twice"
    assert "clear" not in {op for op, _, _ in came}, "no partition comes whole"
    assert hand_over(changes(output.folder, "shop"), target) == []
