"""Stretches hold every partition once, the largest first, and shrink towards the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.cluster.stretches import Stretch, Stretches, oldest_copy
from surge_dagster.engine.plan.weights import weight_of
from surge_dagster.engine.sources.partition import RowBatch
from tests.small_catalogs import partition_of


def sized(sizes: list[int]) -> Stretches:
    """Of partitions with so many bytes of text."""
    return Stretches(replace(partition_of(f"p{row}", []), text_bytes=size) for row, size in enumerate(sizes))


@given(st.lists(st.integers(0, 400), min_size=1, max_size=40), st.integers(1, 8))
def test_every_partition_is_in_one_stretch_and_larger_ones_come_first(sizes: list[int], machines: int) -> None:
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
    assert counts[:3] == [50, 43, 38] and counts[-1] <= 12 and min(counts[:-1]) == 12, "three seconds at least"


def test_part_of_a_stretch_is_as_much_smaller() -> None:
    one = weight_of(replace(partition_of("p", []), text_bytes=1))
    left = sized([1] * 1_000)
    halves = [left.next(one * 2.0, 4, parts=2), left.next(one * 2.0, 4, parts=4)]
    assert [len(stretch.keys) for stretch in halves if stretch] == [30, 15]


def test_machines_are_wanted_as_far_as_each_has_five_minutes_of_work() -> None:
    one = weight_of(replace(partition_of("p", []), text_bytes=1))
    left = sized([1] * 1_000)
    assert [left.machines_wanted(one * speed) for speed in (1.0, 3.0, 4.0)] == [4, 2, 1]


def test_stretch_that_machines_were_lost_with_is_for_idle_machines_alone() -> None:
    left = sized([1, 1])
    first = left.next(1.0, 1)
    assert first is not None and left.put_back(first) is None
    second = left.next(1.0, 1, is_idle=False)
    assert second is not None and second.keys != first.keys
    assert left.next(1.0, 1, is_idle=False) is None
    again = left.next(1.0, 1)
    assert again is not None and (again.keys, again.attempts) == (first.keys, 1)


def test_stretch_that_ends_every_machine_is_divided_until_one_partition_is_left() -> None:
    left = sized([5, 4, 3])
    stretch = left.next(None, 1)
    assert stretch is not None and len(stretch.keys) == 3
    tries, given_up = list[tuple[str, ...]](), list[str]()
    while stretch is not None:
        tries.append(stretch.keys)
        if "p1" in stretch.keys and (key := left.put_back(stretch)):
            given_up.append(key)
        stretch = left.next(None, 1)
    assert tries[:3] == [("p0", "p1", "p2")] * 3
    assert tries[3:] == [("p0",), ("p1", "p2"), ("p1",), ("p2",)]
    assert given_up == ["p1"]


def test_copies_are_of_the_oldest_stretch_that_one_machine_has_alone() -> None:
    first, second, third = (Stretch((key,), 1) for key in "abc")
    assert oldest_copy([(second, 8.0), (first, 9.0), (third, 5.0)]) is first
    assert oldest_copy([(first, 9.0), (second, 8.0), (first, 1.0)]) is second
    assert oldest_copy([(first, 2.9)]) is None, "as long as any stretch takes"
    first.is_done = True
    assert oldest_copy([(first, 9.0)]) is None


def test_divided_partition_is_handed_out_whole_after_its_last_range_unless_it_was_told_of() -> None:
    def read(start: int, stop: int) -> Iterator[RowBatch]:
        raise AssertionError("nothing is read to divide it")

    large = replace(partition_of("large", []), rows=1_000, text_bytes=80 << 20, read_range=read)
    for told in (False, True):
        left = Stretches([large, partition_of("small", [])])
        given_ranges = list[tuple[int, int]]()
        stretch = left.next(None, 2)
        while stretch is not None and stretch.ranges:
            given_ranges += [(part.start, part.stop) for part in stretch.ranges]
            if told and len(given_ranges) == 3:
                left.drop("large")
            elif not told:
                left.end_range("large")
            stretch = left.next(None, 2)
        assert given_ranges[0][0] == 0 and all(one[1] == two[0] for one, two in pairwise(given_ranges))
        rest = list[tuple[str, ...]]()
        while stretch is not None:
            rest.append(stretch.keys)
            stretch = left.next(None, 2)
        assert sorted(rest) == ([("small",)] if told else [("large",), ("small",)])
        assert told or given_ranges[-1][1] == 1_000
    for whole in (Stretches([large]).next(None, 1), Stretches([large], divides=False).next(None, 2)):
        assert whole is not None and not whole.ranges, "one machine gains nothing, and rows encoded anew are not staged"
