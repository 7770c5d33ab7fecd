"""Work is divided by weight: every partition and every row is in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.plan.dividing import Divider, cut, range_from, weight_of
from surge_dagster.engine.sources.partition import Partition
from tests.small_catalogs import partition_of


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1_000, [(0, 250), (250, 500), (500, 750), (750, 1_000)]),
        (1_100, [(0, 250), (250, 500), (500, 750), (750, 1_000), (1_000, 1_100)]),
        (560, [(0, 250), (250, 560)]),
        (312, [(0, 312)]),
        (313, [(0, 250), (250, 313)]),
    ],
)
def test_last_range_takes_the_few_rows_that_remain(
    rows: int, expected: list[tuple[int, int]]
) -> None:
    partition = replace(partition_of("k", []), rows=rows)
    ranges: list[tuple[int, int]] = []
    while not ranges or ranges[-1][1] < rows:
        start = ranges[-1][1] if ranges else 0
        part = range_from(partition, start, 250)
        assert part.key == "k"
        assert part.source_version == "v1"
        ranges.append((part.start, part.stop))
    assert ranges == expected


def of_sizes(sizes: Sequence[int | None]) -> list[Partition]:
    partitions = []
    for number, size in enumerate(sizes):
        partitions.append(replace(partition_of(f"p{number}", []), text_bytes=size))
    return partitions


SIZES = st.lists(st.none() | st.integers(0, 10**9), min_size=1, max_size=60)


@given(SIZES, st.integers(1, 12), st.integers(1, 10**9))
def test_pieces_hold_every_partition_once_in_the_given_order(
    sizes: list[int | None], most: int, least: int
) -> None:
    partitions = of_sizes(sizes)
    pieces = cut(partitions, most, least)
    keys: list[str] = []
    for piece in pieces:
        assert piece.keys
        keys += piece.keys
    assert keys == [each.key for each in partitions]
    assert len(pieces) <= most


@given(SIZES, st.integers(1, 12))
def test_no_piece_is_heavier_than_its_share_and_one_partition(
    sizes: list[int | None], most: int
) -> None:
    weights = [*map(weight_of, of_sizes(sizes))]
    for piece in cut(of_sizes(sizes), most, 1):
        assert piece.weight <= sum(weights) / most + max(weights) + 1


def test_little_work_is_one_piece() -> None:
    partitions = of_sizes([1_000_000] * 7)
    assert len(cut(partitions, 3, 16 << 20)) == 1
    pieces = cut(partitions, 3, 1_000_000)
    assert [len(piece.keys) for piece in pieces] == [2, 3, 2]


@given(st.lists(st.integers(1, 3_000), min_size=1, max_size=12), st.data())
def test_every_row_is_in_one_piece_and_one_partition_at_a_time_is_divided(
    sizes: list[int], data: st.DataObject
) -> None:
    partitions = {}
    for number, size in enumerate(sizes):
        partitions[f"p{number}"] = replace(
            partition_of(f"p{number}", []),
            rows=size,
            text_bytes=size * 100,
            read_range=lambda start, stop: iter(()),
        )
    divider = Divider(partitions.values(), divides_rows=True)
    total = divider.weight
    given_rows = dict.fromkeys(partitions, 0)
    weight = 0
    while divider:
        piece = divider.take(data.draw(st.floats(10, 100_000)))
        weight += piece.weight
        for key in piece.keys:
            for other in partitions.keys() - {key}:
                assert given_rows[other] in (0, partitions[other].rows)
            start = 0 if piece.rows is None else piece.rows.start
            assert start == given_rows[key], "one after the other"
            given_rows[key] = (partitions[key].rows or 0) if piece.rows is None else piece.rows.stop
    assert given_rows == {key: each.rows for key, each in partitions.items()}
    assert weight == total
    assert divider.weight == 0


@pytest.mark.parametrize(
    ("can_read", "divides_rows", "expected"),
    [(True, True, (0, 250)), (False, True, None), (True, False, None)],
)
def test_rows_are_divided_only_if_the_source_can_read_them(
    can_read: bool, divides_rows: bool, expected: tuple[int, int] | None
) -> None:
    partition = replace(partition_of("k", []), rows=1_000, text_bytes=1 << 20)
    if can_read:
        partition = replace(partition, read_range=lambda start, stop: iter(()))
    piece = Divider([partition], divides_rows=divides_rows).take(weight_of(partition) / 4)
    assert (piece.rows and (piece.rows.start, piece.rows.stop)) == expected


def test_no_further_rows_of_a_dropped_partition_are_given_out() -> None:
    partition = replace(
        partition_of("k", []), rows=1_000, text_bytes=1 << 20, read_range=lambda *_: iter(())
    )
    divider = Divider([partition], divides_rows=True)
    divider.take(10_000)
    assert divider.has_rows_of("k")
    divider.drop("k")
    assert not divider
    assert divider.weight == 0
