"""Which rows a run finds to be changed, by their ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.feed.changes import PartitionChanges, changes
from surge_dagster.engine.run import change_feed
from surge_dagster.engine.run.change_feed import RowChanges
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.tables.frames import FrameCatalog
from tests.engine.carried_values import VALUES
from tests.engine.feeds import changed_ids, note_changes
from tests.engine.refreshes import ROWS, Output, output
from tests.engine.runs import completed, make_run
from tests.small_catalogs import numbered_rows, read_embedded, rewrite, with_vectors

__all__ = ["output"]


@pytest.fixture
def row_changes(monkeypatch: pytest.MonkeyPatch) -> list[RowChanges | None]:
    """What the runs of a test found out about changed rows, one entry for each reading of an old
    file."""
    noted_changes: list[RowChanges | None] = []
    note_changes(monkeypatch, lambda _, changes: noted_changes.append(changes))
    return noted_changes


def _operations(partition: PartitionChanges) -> Iterator[str]:
    for batch in partition:
        yield from batch.column("op").to_pylist()


def test_rows_are_compared_by_id(output: Output, row_changes: list[RowChanges | None]) -> None:
    output.embed(ROWS, changes=True)
    version = read_embedded(output.root, output.run.space.name, "k").facts.rows_version
    edited = [ROWS[1], ROWS[0], ("id-2", "edited"), ("new", ROWS[3][1]), *ROWS[5:50]]
    output.embed(edited, changes=True)
    [changes] = row_changes
    assert changes is not None
    assert changed_ids(changes) == ["id-2", "new"]
    assert changes.deleted.to_pylist() == [ROWS[n][0] for n in (3, 4, *range(50, 60))]
    assert changes.previous_rows_version == version


def test_row_takes_the_vector_of_its_own_id_where_texts_are_equal(
    output: Output, row_changes: list[RowChanges | None]
) -> None:
    output.embed([("a", "equal"), ("b", "equal"), ("c", "other")], changes=True)
    output.embed([("b", "equal"), ("c", "other"), ("a", "equal")], changes=True)
    assert changed_ids(row_changes[-1]) == []


def test_rows_whose_old_vectors_are_not_trusted_have_changed(
    output: Output, row_changes: list[RowChanges | None]
) -> None:
    output.embed(ROWS, changes=True)
    rewrite(output.path, lambda table: with_vectors(table, lambda matrix: matrix[:, ::-1]))
    output.embed(ROWS[1:], changes=True)
    assert changed_ids(row_changes[-1]) == [row_id for row_id, _ in ROWS[1:]]


def test_all_rows_of_a_split_partition_change_if_its_vectors_are_not_trusted(
    output: Output,
) -> None:
    """Its first rows are staged before it is known how all of its rows have changed."""
    rows = numbered_rows("k", 450)
    output.embed(rows, changes=True)
    rewrite(output.path, lambda table: with_vectors(table, lambda matrix: matrix[:, ::-1]))
    before = changes(output.root, since={})
    assert sum(len(batch) for partition in before for batch in partition) == 451  # one clears
    output.embed(rows[:-1], changes=True)
    operations = [
        op
        for partition in changes(output.root, since=before.versions)
        for op in _operations(partition)
    ]
    assert operations == 449 * ["put"] + ["delete"]


def test_rows_that_were_encoded_again_have_changed(
    output: Output, row_changes: list[RowChanges | None]
) -> None:
    output.embed(ROWS, changes=True)
    output.embed(ROWS, changes=True, force=True)
    assert changed_ids(row_changes[-1]) == [row_id for row_id, _ in ROWS]


def test_too_many_changes_leave_a_gap(
    output: Output, row_changes: list[RowChanges | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "MOST_IDS", 2)
    output.embed(ROWS, changes=True)
    output.embed([*ROWS[1:], ("new", "new"), ("newer", "newer")], changes=True)
    assert row_changes[-1] is None


@pytest.mark.parametrize("kind", VALUES)
def test_one_edited_value_of_a_carried_column_is_one_change(
    hash_pool: EncoderPool, tmp_path: Path, row_changes: list[RowChanges | None], kind: str
) -> None:
    def embed(places: list[int]) -> None:
        table = pa.table(
            {
                "id": [row_id for row_id, _ in ROWS],
                "text": [text for _, text in ROWS],
                "value": VALUES[kind].take(pa.array(places)),
            }
        )
        version = {"k": str(places)}
        source = FrameCatalog({"k": table}, Selection(carried=("value",)), versions=version)
        completed(make_run(hash_pool, source, tmp_path, changes=True))

    places = [row % 3 for row in range(len(ROWS))]
    embed(places)
    places[7] = 2

    embed(places)

    [found] = row_changes
    assert changed_ids(found) == [ROWS[7][0]]


@pytest.mark.parametrize("include_text", [True, False])
def test_all_rows_change_if_the_file_gets_or_loses_its_texts(
    output: Output, include_text: bool
) -> None:
    output.embed(ROWS, changes=True, include_text=not include_text)
    before = changes(output.root, since={})
    for partition in before:
        list(partition)

    output.embed(ROWS, changes=True, include_text=include_text)

    [partition] = changes(output.root, since=before.versions)
    assert list(_operations(partition)) == ["put"] * len(ROWS)


def test_ids_of_another_type_are_not_compared(
    output: Output, row_changes: list[RowChanges | None]
) -> None:
    output.embed(ROWS, changes=True)
    rewrite(
        output.path,
        lambda table: table.set_column(0, pa.field("id", pa.int64(), False), [list(range(60))]),
    )
    assert output.embed(ROWS[1:], changes=True).rows_reused == 59
    assert row_changes[-1] is None
