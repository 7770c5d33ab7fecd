"""Stretches hold every partition once, the largest first, and shrink towards the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.cluster.stretches import Stretches
from surge_dagster.engine.plan.weights import weight_of
from surge_dagster.engine.sources.partition import RowBatch
from tests.small_catalogs import partition_of


def sized(sizes: list[int], at_once: int = 1) -> Stretches:
    """Of partitions with so many bytes of text."""
    partitions = (
        replace(partition_of(f"p{row}", []), text_bytes=size) for row, size in enumerate(sizes)
    )
    return Stretches(partitions, at_once=at_once)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=40), st.integers(1, 8))
def test_every_partition_is_in_one_stretch_and_larger_ones_come_first(
    sizes: list[int], machines: int
) -> None:
    left, given_keys, weights = sized(sizes), list[str](), list[int]()
    while left:
        stretch = left.next(100.0, machines)
        assert stretch is not None
        given_keys += stretch.keys
        weights += [stretch.weight]
    assert sorted(given_keys) == sorted(f"p{row}" for row in range(len(sizes)))
    order = [sizes[int(key[1:])] for key in given_keys]
    assert order == sorted(order, reverse=True)
    assert left.next(100.0, machines) is None


def test_stretches_follow_the_speed_of_a_machine_and_shrink_as_less_is_left() -> None:
    one = weight_of(replace(partition_of("p", []), text_bytes=1))
    first = sized([1] * 1_000).next(one * 2.0, 4)
    assert first is not None and len(first.keys) == 60, "thirty seconds of it"
    left, counts = sized([1] * 400), list[int]()
    while left:
        stretch = left.next(one * 4.0, 4)
        assert stretch is not None
        counts.append(len(stretch.keys))
    assert counts[:3] == [50, 43, 38] and counts[-1] <= 12 and min(counts[:-1]) == 12, (
        "three seconds at least"
    )


def test_stretches_of_a_machine_that_has_two_at_once_are_half_as_long() -> None:
    one = weight_of(replace(partition_of("p", []), text_bytes=1))
    left = sized([1] * 1_000, at_once=2)
    both = [left.next(one * 2.0, 4), left.next(one * 2.0, 4, held=1)]
    assert [len(stretch.keys) for stretch in both if stretch] == [15, 30], (
        "they do not end at the same time"
    )


def test_machines_are_wanted_as_far_as_each_has_five_minutes_of_work() -> None:
    one = weight_of(replace(partition_of("p", []), text_bytes=1))
    left = sized([1] * 1_000)
    assert [left.machines_wanted(one * speed) for speed in (1.0, 3.0, 4.0)] == [4, 2, 1]
    stretch = left.next(one * 1_000.0, 1)
    assert stretch is not None and left.machines_wanted(one * 1.0) == 0
    assert left.put_back_lost(stretch)
    assert left.machines_wanted(one * 1.0) == 4, "also for what came back"


def test_stretch_that_was_lost_is_for_idle_machines() -> None:
    left = sized([1, 1])
    first = left.next(1.0, 1)
    assert first is not None
    assert left.put_back_lost(first)

    assert left.next(1.0, 1, held=1) is None
    again = left.next(1.0, 1)
    assert again is not None
    assert again.keys == first.keys


def test_stretch_that_a_machine_could_not_do_is_for_all_machines() -> None:
    left = sized([1, 1])
    first = left.next(1.0, 1)
    assert first is not None
    left.put_back(first)

    again = left.next(1.0, 1, held=1)
    assert again is not None
    assert again.keys == first.keys
    assert again.is_again


def test_stretch_is_given_up_when_it_was_lost_three_times() -> None:
    left, losses = sized([5, 4, 3]), 1
    stretch = left.next(None, 1)
    while stretch is not None and left.put_back_lost(stretch):
        losses += 1
        stretch = left.next(None, 1)

    assert losses == 3
    assert not left


def test_divided_partition_is_handed_out_whole_after_its_last_range_unless_it_was_told_of() -> None:
    def read(start: int, stop: int) -> Iterator[RowBatch]:
        raise AssertionError("nothing is read to divide it")

    large = replace(partition_of("large", []), rows=1_000, text_bytes=80 << 20, read_range=read)
    for told in (False, True):
        left = Stretches([large, replace(partition_of("small", []), rows=3)])
        given_ranges = list[tuple[int, int]]()
        stretch = left.next(None, 2)
        while stretch is not None and stretch.ranges:
            given_ranges += [(part.start, part.stop) for part in stretch.ranges]
            if told and len(given_ranges) == 3:
                left.drop("large")
            elif not told:
                left.end_range("large")
            stretch = left.next(None, 2)
        assert given_ranges[0][0] == 0 and all(
            one[1] == two[0] for one, two in pairwise(given_ranges)
        )
        rest = list[tuple[str, ...]]()
        while stretch is not None:
            rest.append(stretch.keys)
            stretch = left.next(None, 2)
        assert sorted(rest) == ([("small",)] if told else [("large",), ("small",)])
        assert told or given_ranges[-1][1] == 1_000
    unread = replace(large, read_range=None)
    for whole in (
        Stretches([unread]).next(None, 2),
        Stretches([large], divides=False).next(None, 2),
    ):
        assert whole is not None and not whole.ranges


@given(st.lists(st.integers(1, 3_000), min_size=1, max_size=12), st.data())
def test_every_row_is_in_one_stretch_and_one_partition_at_a_time_is_divided(
    sizes: list[int], data: st.DataObject
) -> None:
    def borders() -> list[int]:
        return [0, 500, 777]

    partitions = [
        replace(
            partition_of(f"p{n}", []),
            rows=size,
            text_bytes=size * 100,
            read_range=lambda start, stop: iter(()),
        )
        for n, size in enumerate(sizes)
    ]
    left, rows = (
        Stretches((replace(each, borders=borders) for each in partitions), at_once=2),
        Counter[str](),
    )
    while left:
        stretch = left.next(
            data.draw(st.floats(10, 100_000)),
            data.draw(st.integers(1, 9)),
            data.draw(st.integers(0, 1)),
        )
        assert stretch is not None
        for part in stretch.ranges:
            assert part.start == rows[part.key], "one after the other"
            assert all(
                rows[f"p{n}"] in (0, size) for n, size in enumerate(sizes) if f"p{n}" != part.key
            )
            rows[part.key] = part.stop
            if data.draw(st.booleans()):
                left.end_range(part.key)
        if not stretch.ranges:
            rows.update(
                {
                    key: sizes[int(key[1:])]
                    for key in stretch.keys
                    if rows[key] < sizes[int(key[1:])]
                }
            )
    assert rows == {f"p{n}": size for n, size in enumerate(sizes)}


def test_partition_that_is_published_is_not_handed_out_as_a_whole_after_its_ranges() -> None:
    large = replace(
        partition_of("large", []),
        rows=1_000,
        text_bytes=80 << 20,
        read_range=lambda start, stop: iter(()),
    )
    left = Stretches([large])
    while (stretch := left.next(1e6, 2)) is not None and stretch.ranges:
        left.end_range("large")
    assert stretch is not None and stretch.keys == ("large",), "no range completed it"
    left.put_back(stretch)
    assert left
    left.drop("large")
    assert not left
