"""Incremental runs: rows whose text is in the partition's old file keep its vector, and nothing
else does."""

from __future__ import annotations

import random

import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.run import old_rows
from tests.engine.refreshes import ROWS, Output, output
from tests.small_catalogs import DIMENSION, numbered_rows, read_embedded, rewrite

__all__ = ["output"]


LONG = "x" * 5000  # hash:// counts a token for every four bytes and takes 256


def test_only_rows_with_new_texts_are_encoded(output: Output) -> None:
    output.embed(ROWS)
    edited = [
        *ROWS[:10],
        ("new", "inserted"),
        *ROWS[10:20],
        ("id-20", "edited"),
        *ROWS[21:40],
        *ROWS[50:],
        ROWS[45],
    ]
    receipt = output.embed(edited)
    output.check(edited)
    assert receipt.rows_encoded == 2
    assert receipt.rows_reused == 50
    assert output.encoded == 2
    assert output.run.report.texts_encoded == 2
    assert output.run.report.costs.rows_reused == 50
    assert output.run.report.compared_rows == 1
    assert output.run.report.drifted_rows == 0


def test_rows_of_a_split_partition_are_reused(output: Output) -> None:
    rows = numbered_rows("k", 450)
    output.embed(rows)
    edited = [("first", "first"), *rows[:200], *rows[210:], ("last", "last")]
    receipt = output.embed(edited)
    output.check(edited)
    assert receipt.rows_encoded == 2
    assert receipt.rows_reused == 440
    assert output.encoded == 2
    assert read_embedded(output.root, output.run.space.name, "k").facts.rows_reused == 440


def test_vectors_of_many_row_groups_are_found(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surge_dagster.engine.files.rows.MAX_ROW_GROUP_ROWS", 16)
    monkeypatch.setattr(old_rows, "_PIECE_BYTES", 10 * 4 * DIMENSION)
    rows = numbered_rows("k", 90)
    output.embed(rows)
    shuffled = random.Random(5).sample(rows, 80)
    assert output.embed(shuffled, batch_rows=33).rows_encoded == 0
    output.check(shuffled)


def test_forced_run_reuses_nothing(output: Output) -> None:
    output.embed(ROWS)
    receipt = output.embed(ROWS, force=True)
    assert receipt.rows_encoded == 60
    assert receipt.rows_reused == 0
    assert output.encoded == 60


@pytest.mark.parametrize("count", [60, 450], ids=["whole", "split"])
def test_truncated_texts_are_reused_and_stay_marked(output: Output, count: int) -> None:
    rows = [*numbered_rows("k", count), ("long", LONG), ("last", "short")]
    output.embed(rows)

    edited = [*rows[1:], ("new", LONG + " new")]
    receipt = output.embed(edited)

    assert receipt.rows_encoded == 1
    assert receipt.truncated == 2
    truncated = pq.read_table(output.path)["truncated"].to_pylist()
    assert truncated == [text.startswith(LONG) for _, text in edited]


def test_file_without_texts_is_reused_by_its_hashes(output: Output) -> None:
    output.embed(ROWS, include_text=False)
    assert output.embed(ROWS[5:], include_text=False).rows_reused == 55


def test_oldest_vector_is_as_old_as_that_of_the_file_it_came_from(output: Output) -> None:
    first = output.embed(ROWS)
    rewrite(output.path, lambda table: table, oldest_encoded_at="2020-02-02T02:02:02+00:00")
    assert output.embed(ROWS[1:]).oldest_encoded_at == "2020-02-02T02:02:02+00:00"
    assert (
        output.embed(ROWS, force=True).oldest_encoded_at >= first.oldest_encoded_at > "2020-02-03"
    )
