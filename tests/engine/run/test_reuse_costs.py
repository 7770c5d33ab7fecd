"""What reading old vectors takes is bounded: readings of a row group, and memory."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from surge_dagster.engine.run import old_rows
from tests.engine.refreshes import ROWS, Output, output
from tests.small_catalogs import numbered_rows

__all__ = ["output"]


def test_rows_in_any_order_read_the_old_file_only_a_few_times(
    output: Output, monkeypatch: pytest.MonkeyPatch
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
    output.embed(rows)
    shuffled = Random(2).sample(rows, len(rows))
    receipt = output.embed(shuffled, batch_rows=20)
    output.check(shuffled)
    assert 3 * 20 <= len(groups) < 4 * 20
    assert 60 < receipt.rows_reused < 160
    groups.clear()
    assert output.embed(shuffled[1:], batch_rows=20).rows_reused == 319 and len(groups) == 20, (
        "each once, in order"
    )


def test_old_file_that_does_not_fit_is_not_used(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.embed(ROWS)
    monkeypatch.setattr(old_rows, "LOOKUP_BYTES", 1 << 40)
    assert output.embed(ROWS[1:]).rows_reused == 0
    output.check(ROWS[1:])
