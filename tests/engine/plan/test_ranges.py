"""Where a huge partition is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.plan.ranges import range_from
from tests.small_catalogs import partition_of


def borders(rows: int, wanted: int, groups: Sequence[int]) -> list[int]:
    """Of the ranges of a partition, the first and the last among them."""
    partition, found = replace(partition_of("k", []), rows=rows), [0]
    while found[-1] < rows:
        part = range_from(partition, found[-1], wanted, groups)
        assert (part.key, part.source_version, part.start) == ("k", "v1", found[-1])
        found.append(part.stop)
    return found


@pytest.mark.parametrize(
    ("rows", "groups", "expected"),
    [
        (1_000, [], [0, 250, 500, 750, 1_000]),
        (1_000, [0, 1_000], [0, 250, 500, 750, 1_000]),
        (1_000, [0, 240, 512, 730, 1_000], [0, 240, 512, 730, 1_000]),
        (1_000, [0, 100, 400, 900, 1_000], [0, 250, 500, 750, 1_000]),
        (1_100, [0, 550, 1_100], [0, 250, 550, 800, 1_100]),
        (560, [0, 187, 374, 560], [0, 250, 560]),
        (312, [0, 156, 312], [0, 312]),
        (313, [], [0, 250, 313]),
    ],
)
def test_ranges_begin_at_row_groups_that_are_near(
    rows: int, groups: list[int], expected: list[int]
) -> None:
    assert borders(rows, 250, groups) == expected


@given(st.integers(1, 10_000), st.integers(1, 3_000), st.lists(st.integers(0, 10_000), max_size=30))
def test_no_range_is_much_longer_than_wanted_or_shorter_but_the_last(
    rows: int, wanted: int, groups: list[int]
) -> None:
    found = borders(
        rows, wanted, sorted({0, *(border for border in groups if border < rows), rows})
    )
    lengths = [stop - start for start, stop in pairwise(found)]
    assert max(lengths) <= 1.25 * wanted and min(lengths[:-1], default=wanted) >= 0.75 * wanted
