"""Incremental runs: rows whose text is in the partition's old file keep its vector, nothing else
does, and what reading old vectors takes is bounded. Unchanged partitions are republished."""

from __future__ import annotations

import random
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.run import old_rows
from tests.engine.refreshes import ROWS, Refreshed
from tests.engine.runs import Output, finish, receipts
from tests.small_catalogs import (
    DIMENSION,
    Rows,
    numbered_rows,
    partition_of,
    read_embedded,
    rewrite,
)

LONG = "x" * 5000  # hash:// counts a token for every four bytes and takes 256


def test_only_rows_with_new_texts_are_encoded(refreshed: Refreshed) -> None:
    refreshed.embed(ROWS)
    edited = [
        *ROWS[:10],
        ("new", "inserted"),
        *ROWS[10:20],
        ("id-20", "edited"),
        *ROWS[21:40],
        *ROWS[50:],
        ROWS[45],
    ]
    receipt = refreshed.embed(edited)
    refreshed.check(edited)
    assert receipt.rows_encoded == 2
    assert receipt.rows_reused == 50
    assert refreshed.pool.rows == 2
    assert refreshed.run.report.texts_encoded == 2
    assert refreshed.run.report.costs.rows_reused == 50
    assert refreshed.run.report.compared_rows == 1
    assert refreshed.run.report.drifted_rows == 0


def test_rows_of_a_split_partition_are_reused(refreshed: Refreshed) -> None:
    rows = numbered_rows("k", 450)
    refreshed.embed(rows)
    edited = [("first", "first"), *rows[:200], *rows[210:], ("last", "last")]
    receipt = refreshed.embed(edited)
    refreshed.check(edited)
    assert receipt.rows_encoded == 2
    assert receipt.rows_reused == 440
    assert refreshed.pool.rows == 2
    assert read_embedded(refreshed.root, refreshed.run.space.name, "k").facts.rows_reused == 440


def test_vectors_of_many_row_groups_are_found(
    refreshed: Refreshed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surge_dagster.engine.files.rows.MAX_ROW_GROUP_ROWS", 16)
    monkeypatch.setattr(old_rows, "_PIECE_BYTES", 10 * 4 * DIMENSION)
    rows = numbered_rows("k", 90)
    refreshed.embed(rows)
    shuffled = random.Random(5).sample(rows, 80)
    assert refreshed.embed(shuffled, batch_rows=33).rows_encoded == 0
    refreshed.check(shuffled)


def test_forced_run_reuses_nothing(refreshed: Refreshed) -> None:
    refreshed.embed(ROWS)
    receipt = refreshed.embed(ROWS, force=True)
    assert receipt.rows_encoded == 60
    assert receipt.rows_reused == 0
    assert refreshed.pool.rows == 60


@pytest.mark.parametrize("count", [60, 450], ids=["whole", "split"])
def test_truncated_texts_are_reused_and_stay_marked(refreshed: Refreshed, count: int) -> None:
    rows = [*numbered_rows("k", count), ("long", LONG), ("last", "short")]
    refreshed.embed(rows)

    edited = [*rows[1:], ("new", LONG + " new")]
    receipt = refreshed.embed(edited)

    assert receipt.rows_encoded == 1
    assert receipt.truncated == 2
    truncated = pq.read_table(refreshed.path)["truncated"].to_pylist()
    assert truncated == [False] * (count - 1) + [True, False, True]


def test_file_without_texts_is_reused_by_its_hashes(refreshed: Refreshed) -> None:
    refreshed.embed(ROWS, include_text=False)
    assert refreshed.embed(ROWS[5:], include_text=False).rows_reused == 55


def test_oldest_vector_is_as_old_as_that_of_the_file_it_came_from(refreshed: Refreshed) -> None:
    first = refreshed.embed(ROWS)
    rewrite(refreshed.path, lambda table: table, oldest_encoded_at="2020-02-02T02:02:02+00:00")
    assert refreshed.embed(ROWS[1:]).oldest_encoded_at == "2020-02-02T02:02:02+00:00"
    assert (
        refreshed.embed(ROWS, force=True).oldest_encoded_at
        >= first.oldest_encoded_at
        > "2020-02-03"
    )


def test_rows_in_any_order_read_the_old_file_only_a_few_times(
    refreshed: Refreshed, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = old_rows.OldRows._read_group
    rows = numbered_rows("k", 320)
    group_rows = 16
    groups: list[int] = []

    def noted(previous: Any, group: int) -> Any:
        groups.append(group)
        return read(previous, group)

    monkeypatch.setattr("surge_dagster.engine.files.rows.MAX_ROW_GROUP_ROWS", group_rows)
    monkeypatch.setattr(old_rows, "_MOST_READINGS", 3)
    monkeypatch.setattr(old_rows.OldRows, "_read_group", noted)
    refreshed.embed(rows)
    shuffled = Random(2).sample(rows, len(rows))
    receipt = refreshed.embed(shuffled, batch_rows=20)
    refreshed.check(shuffled)
    assert 3 * 20 <= len(groups) < 4 * 20
    assert 60 < receipt.rows_reused < 160
    groups.clear()
    assert refreshed.embed(shuffled[1:], batch_rows=20).rows_reused == 319 and len(groups) == 20, (
        "each once, in order"
    )


def test_old_file_that_does_not_fit_is_not_used(
    refreshed: Refreshed, monkeypatch: pytest.MonkeyPatch
) -> None:
    refreshed.embed(ROWS)
    monkeypatch.setattr(old_rows, "LOOKUP_BYTES", 1 << 40)
    assert refreshed.embed(ROWS[1:]).rows_reused == 0
    refreshed.check(ROWS[1:])


@pytest.mark.parametrize("rows", [numbered_rows("a", 45), [], numbered_rows("a", 250)])
def test_equal_content_under_a_new_version_is_republished_and_not_encoded(
    output: Output, rows: Rows
) -> None:
    [first] = receipts(output.events([partition_of("a", rows)]))
    before = output.check("a", rows)

    run = output.run([partition_of("a", rows, version="v2")])
    [receipt] = receipts(finish(run))

    assert receipt.action == "republished"
    assert receipt.source_version == "v2"
    assert receipt.desired_version == first.desired_version
    assert receipt.etag != first.etag
    assert run.report.texts_encoded == 0
    assert run.report.partitions_republished == 1
    facts = output.check("a", rows)
    assert facts.source_version == "v2"
    assert facts.rows_version == before.rows_version


def test_rows_that_are_written_again_get_a_new_version(output: Output) -> None:
    rows = numbered_rows("a", 3)
    output.events([partition_of("a", rows)])
    before = output.check("a", rows)

    output.events([partition_of("a", rows)], force=True)

    facts = output.check("a", rows)
    assert facts.rows_version != before.rows_version
