"""What reading old vectors takes is bounded: readings of a row group, and memory."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from surge_dagster.engine.files.parquet import STRING_COPIES, OutputFile
from surge_dagster.engine.run import previous_rows, thresholds
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.support.ledger import Ledger
from tests.engine.refreshes import ROWS, Output, output
from tests.engine.runs import finish, limit_bytes, make_run, receipts
from tests.small_catalogs import Rows, numbered_rows, partition_of

__all__ = ["output"]


def test_rows_in_any_order_read_the_old_file_a_few_times_and_not_for_each_piece(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, rows, group_rows = previous_rows.PreviousRows._read_group, numbered_rows("k", 320), 16
    groups: list[int] = []

    def noted(previous: Any, group: int) -> Any:
        groups.append(group)
        return read(previous, group)

    monkeypatch.setattr("surge_dagster.engine.files.rows.MAX_ROW_GROUP_ROWS", group_rows)
    monkeypatch.setattr(previous_rows, "_MOST_READINGS", 3)
    monkeypatch.setattr(previous_rows.PreviousRows, "_read_group", noted)
    output.embed(rows)
    shuffled = Random(2).sample(rows, len(rows))
    receipt = output.embed(shuffled, batch_rows=20)
    output.check(shuffled)
    assert 3 * 20 <= len(groups) < 4 * 20 and 60 < receipt.rows_reused < 160
    groups.clear()
    assert output.embed(shuffled[1:], batch_rows=20).rows_reused == 319 and len(groups) == 20, (
        "each once, in order"
    )


def test_old_file_that_does_not_fit_is_not_used(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.embed(ROWS)
    monkeypatch.setattr(previous_rows, "LOOKUP_BYTES", 1 << 40)
    assert output.embed(ROWS[1:]).rows_reused == 0
    output.check(ROWS[1:])


@pytest.mark.parametrize("beyond", [0, 1_000])
def test_republishing_takes_only_free_memory_and_never_waits_for_gathered_rows(
    output: Output, monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    """The file takes what is left beside a SuperBatch, or more than that."""
    rows = [(f"id-{n}", str(n)) for n in range(950)]
    limit_bytes(monkeypatch, 24_000)
    monkeypatch.setattr(thresholds, "_B_MAX_FACTOR", 1)

    def run(version: str, rows: Rows) -> EmbeddingRun:
        partitions = [
            partition_of("a", rows, version=version),
            partition_of("b", ROWS, version=version),
        ]
        return make_run(output.pool, partitions, output.root, Thresholds(b_min=1000, b_max=1000))

    first = run("v1", rows)
    finish(first)
    left = first.memory.plan.beside_superbatch - first.memory.plan.reader - (1 + STRING_COPIES) * 40
    monkeypatch.setattr(OutputFile, "reading_bytes", lambda *_: left + beyond)

    def reserve_at_once(ledger: Ledger, size: int, cancelled: Any = None) -> None:
        if not ledger.try_reserve(size):
            raise AssertionError(f"nothing would release the {size:,} bytes that are waited for")

    monkeypatch.setattr(Ledger, "reserve", reserve_at_once)
    outcomes = {
        receipt.key: (receipt.action, receipt.rows_reused)
        for receipt in receipts(finish(run("v2", rows[1:])))
    }
    assert outcomes == {
        "a": ("encoded", 949),
        "b": ("encoded", 60) if beyond else ("republished", 0),
    }


def test_old_file_is_given_up_when_the_ids_need_its_memory(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.embed(ROWS)
    reserve = previous_rows._Memory.reserve

    def greedy(memory: Any, size: int) -> bool:
        return reserve(memory, memory._memory.plan.source - memory.held)

    monkeypatch.setattr(previous_rows._Memory, "reserve", greedy)
    assert output.embed(ROWS[1:]).rows_reused == 0
    output.check(ROWS[1:])
