"""Which rows a run finds to be changed, by their ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from surge_dagster.engine.feed.changes import PartitionChanges, changes
from surge_dagster.engine.run import change_feed
from surge_dagster.engine.run.change_feed import RowChanges
from surge_dagster.engine.run.report import OldVectorSample
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.tables.frames import FrameCatalog
from surge_dagster.engine.tables.opening import open_source
from tests.engine.carried_values import VALUES
from tests.engine.feeds import changed_ids
from tests.engine.refreshes import ROWS, Refreshed
from tests.engine.run.test_ranges import ranges_of, write_big
from tests.engine.run.test_staged_runs import BIG, cut_off
from tests.engine.runs import Output, failures, of_kind
from tests.small_catalogs import (
    ids_of,
    numbered_rows,
    partition_of,
    rewrite,
    texts_of,
    with_vectors,
)


def _operations(partition: PartitionChanges) -> Iterator[str]:
    for batch in partition:
        yield from batch.column("op").to_pylist()


def test_rows_are_compared_by_id(refreshed: Refreshed, row_changes: list[Any]) -> None:
    refreshed.embed(ROWS, changes=True)
    version = refreshed.check(ROWS).rows_version
    edited = [ROWS[1], ROWS[0], ("id-2", "edited"), ("new", ROWS[3][1]), *ROWS[5:50]]
    refreshed.embed(edited, changes=True)
    [changes] = row_changes
    assert changed_ids(changes) == ["id-2", "new"]
    assert changes.deleted.to_pylist() == ids_of(ROWS[3:5] + ROWS[50:])
    assert changes.previous_rows_version == version


def test_row_takes_the_vector_of_its_own_id_where_texts_are_equal(
    refreshed: Refreshed, row_changes: list[Any]
) -> None:
    refreshed.embed([("a", "equal"), ("b", "equal"), ("c", "other")], changes=True)
    refreshed.embed([("b", "equal"), ("c", "other"), ("a", "equal")], changes=True)
    assert changed_ids(row_changes[-1]) == []


def test_rows_whose_old_vectors_are_not_trusted_have_changed(
    refreshed: Refreshed, row_changes: list[Any]
) -> None:
    refreshed.embed(ROWS, changes=True)
    rewrite(refreshed.path, lambda table: with_vectors(table, lambda matrix: matrix[:, ::-1]))
    refreshed.embed(ROWS[1:], changes=True)
    assert changed_ids(row_changes[-1]) == ids_of(ROWS[1:])


def test_all_rows_of_a_split_partition_change_if_its_vectors_are_not_trusted(
    refreshed: Refreshed,
) -> None:
    """Its first rows are staged before it is known how all of its rows have changed."""
    rows = numbered_rows("k", 450)
    refreshed.embed(rows, changes=True)
    rewrite(refreshed.path, lambda table: with_vectors(table, lambda matrix: matrix[:, ::-1]))
    before = changes(refreshed.root, since={})
    [all_rows] = before
    assert sum(map(len, all_rows)) == 451  # one clears
    refreshed.embed(rows[:-1], changes=True)
    [partition] = changes(refreshed.root, since=before.versions)
    assert list(_operations(partition)) == 449 * ["put"] + ["delete"]


def test_rows_that_were_encoded_again_have_changed(
    refreshed: Refreshed, row_changes: list[Any]
) -> None:
    refreshed.embed(ROWS, changes=True)
    refreshed.embed(ROWS, changes=True, force=True)
    assert changed_ids(row_changes[-1]) == ids_of(ROWS)


def test_too_many_changes_leave_a_gap(
    refreshed: Refreshed, row_changes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "MOST_IDS", 2)
    refreshed.embed(ROWS, changes=True)
    refreshed.embed([*ROWS[1:], ("new", "new"), ("newer", "newer")], changes=True)
    assert row_changes[-1] is None


@pytest.mark.parametrize("kind", ["struct", "category", "uuid", "json"])
def test_one_edited_value_of_a_carried_column_is_one_change(
    output: Output, row_changes: list[Any], kind: str
) -> None:
    def embed(places: list[int]) -> None:
        value = VALUES[kind].take(pa.array(places))
        table = pa.table({"id": ids_of(ROWS), "text": texts_of(ROWS), "value": value})
        version = {"k": str(places)}
        source = FrameCatalog({"k": table}, Selection(carried=("value",)), versions=version)
        output.embed(source, changes=True)

    places = [0, 1, 2] * 20
    embed(places)
    places[7] = 2

    embed(places)

    [found] = row_changes
    assert changed_ids(found) == [ROWS[7][0]]


@pytest.mark.parametrize("include_text", [True, False])
def test_all_rows_change_if_the_file_gets_or_loses_its_texts(
    refreshed: Refreshed, include_text: bool
) -> None:
    refreshed.embed(ROWS, changes=True, include_text=not include_text)
    before = changes(refreshed.root, since={})
    for partition in before:
        list(partition)

    refreshed.embed(ROWS, changes=True, include_text=include_text)

    [partition] = changes(refreshed.root, since=before.versions)
    assert list(_operations(partition)) == ["put"] * len(ROWS)


def test_ids_of_another_type_are_not_compared(refreshed: Refreshed, row_changes: list[Any]) -> None:
    refreshed.embed(ROWS, changes=True)
    rewrite(
        refreshed.path,
        lambda table: table.set_column(0, pa.field("id", pa.int64(), False), [list(range(60))]),
    )
    assert refreshed.embed(ROWS[1:], changes=True).rows_reused == 59
    assert row_changes[-1] is None


EDITED = [*BIG[:100], ("id-100", "edited"), *BIG[101:440], ("new", "new")]


def assert_edited(changes: RowChanges) -> None:
    """Assert that these are the changes from `BIG` to `EDITED`."""
    assert changed_ids(changes) == ["id-100", "new"]
    assert changes.deleted.to_pylist() == ids_of(BIG[440:])


def test_resumed_run_reports_only_edited_rows(output: Output, row_changes: list[Any]) -> None:
    output.embed([partition_of("big", BIG)], changes=True)
    cut = cut_off("big", EDITED, 350, version="v2")
    assert failures(output.events([cut], Thresholds(1, 100), changes=True))

    edited = partition_of("big", EDITED, version="v2")
    run = output.embed([edited], changes=True)

    assert run.report.texts_reused >= 200
    assert_edited(row_changes[-1])


def test_divided_partition_reports_only_edited_rows(
    output: Output, tmp_path: Path, row_changes: list[Any]
) -> None:
    source = open_source(write_big(tmp_path / "c"))
    output.embed(source, changes=True)
    write_big(tmp_path / "c", EDITED, "v2")

    for half in ((0, 240), (240, len(EDITED))):
        ranges = ranges_of(source, half)
        output.events(source, ranges=ranges, changes=True)

    assert_edited(row_changes[-1])


def test_each_run_of_a_divided_partition_compares_old_vectors(
    output: Output, tmp_path: Path
) -> None:
    source = open_source(write_big(tmp_path / "c"))
    output.embed(source)
    write_big(tmp_path / "c", BIG[1:], "v2")

    for half in ((0, 240), (240, 449)):
        events = output.events(source, ranges=ranges_of(source, half))
        assert of_kind(events, OldVectorSample)
