"""Which rows of a partition a run reports as changed, however its rows were gathered."""

from __future__ import annotations

from pathlib import Path

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.run.change_feed import RowChanges
from surge_dagster.engine.run.report import OldVectorSample
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.tables.opening import open_source
from tests.engine.feeds import changed_ids, note_changes
from tests.engine.run.test_ranges import ranges_of, write_big
from tests.engine.run.test_staged_runs import BIG, cut_off
from tests.engine.runs import completed, failures, finish, make_run, of_kind
from tests.small_catalogs import partition_of

EDITED = [*BIG[:100], ("id-100", "edited"), *BIG[101:440], ("new", "new")]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[RowChanges | None]:
    """What each reading of an old file found out about changed rows."""
    found: list[RowChanges | None] = []
    note_changes(monkeypatch, lambda _, changes: found.append(changes))
    return found


def assert_edited(changes: RowChanges | None) -> None:
    """Assert that these are the changes from `BIG` to `EDITED`."""
    assert changes is not None
    assert changed_ids(changes) == ["id-100", "new"]
    assert changes.deleted.to_pylist() == [row[0] for row in BIG[440:]]


def test_resumed_run_reports_only_edited_rows(
    hash_pool: EncoderPool, tmp_path: Path, noted: list[RowChanges | None]
) -> None:
    completed(make_run(hash_pool, [partition_of("big", BIG)], tmp_path, changes=True))
    cut = cut_off("big", EDITED, 350, version="v2")
    assert failures(finish(make_run(hash_pool, [cut], tmp_path, Thresholds(1, 100), changes=True)))

    edited = partition_of("big", EDITED, version="v2")
    run = completed(make_run(hash_pool, [edited], tmp_path, changes=True))

    assert run.report.texts_reused >= 200
    assert_edited(noted[-1])


def test_divided_partition_reports_only_edited_rows(
    hash_pool: EncoderPool, tmp_path: Path, noted: list[RowChanges | None]
) -> None:
    source = open_source(write_big(tmp_path / "c"))
    output = tmp_path / "o"
    completed(make_run(hash_pool, source, output, changes=True))
    write_big(tmp_path / "c", EDITED, "v2")

    for half in ((0, 240), (240, len(EDITED))):
        ranges = ranges_of(source, half)
        finish(make_run(hash_pool, source, output, ranges=ranges, changes=True))

    assert_edited(noted[-1])


def test_each_run_of_a_divided_partition_compares_old_vectors(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    source = open_source(write_big(tmp_path / "c"))
    output = tmp_path / "o"
    completed(make_run(hash_pool, source, output))
    write_big(tmp_path / "c", BIG[1:], "v2")

    for half in ((0, 240), (240, 449)):
        events = finish(make_run(hash_pool, source, output, ranges=ranges_of(source, half)))
        assert of_kind(events, OldVectorSample)
