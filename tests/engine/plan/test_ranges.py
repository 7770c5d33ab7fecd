"""Where a huge partition is divided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from surge_dagster.engine.plan.ranges import divide
from surge_dagster.engine.sources.partition import Partition, RowBatch
from tests.small_catalogs import partition_of


def partition(rows: int | None, borders: list[int]) -> Partition:
    def read_range(start: int, stop: int) -> Iterator[RowBatch]:
        raise AssertionError("nothing is read")

    return replace(partition_of("k", []), rows=rows, read_range=read_range, borders=lambda: borders)


@pytest.mark.parametrize(
    ("rows", "groups", "expected"),
    [
        (1_000, [], [0, 250, 500, 750, 1_000]),
        (1_000, [0, 1_000], [0, 250, 500, 750, 1_000]),
        (1_000, [0, 240, 512, 730, 1_000], [0, 240, 512, 730, 1_000]),
        (1_000, [0, 100, 400, 900, 1_000], [0, 250, 500, 750, 1_000]),
        (1_100, [0, 550, 1_100], [0, 275, 550, 825, 1_100]),
        (499, [0, 250, 499], [0, 250, 499]),
        (374, [0, 187, 374], []),
        (0, [0], []),
    ],
)
def test_ranges_begin_at_row_groups_that_are_near(rows: int, groups: list[int], expected: list[int]) -> None:
    found = divide(partition(rows, groups), round(rows / 250))
    assert [(each.key, each.source_version) for each in found] == [("k", "v1")] * max(0, len(expected) - 1)
    assert [each.start for each in found] == expected[:-1]
    assert [each.stop for each in found] == expected[1:]


@pytest.mark.parametrize("lacks", ["rows", "read_range"])
def test_partition_whose_rows_cannot_be_read_apart_stays_whole(lacks: str) -> None:
    assert divide(replace(partition(1_000, []), **{lacks: None}), 4) == []
