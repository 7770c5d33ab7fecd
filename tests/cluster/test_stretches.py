"""Stretches shrink towards the end, and come back when a machine is lost."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.cluster.machine import Stretch
from surge_dagster.cluster.stretches import Stretches
from surge_dagster.engine.plan.dividing import weight_of
from surge_dagster.engine.sources.partition import Partition
from tests.small_catalogs import partition_of

# the weight of a byte of text
ONE = weight_of(replace(partition_of("p", []), text_bytes=1))


def sized(sizes: list[int]) -> Stretches:
    """Of partitions with this number of bytes of text."""
    partitions = []
    for number, size in enumerate(sizes):
        partitions.append(replace(partition_of(f"p{number}", []), text_bytes=size))
    return Stretches(partitions, divides_rows=True)


def large() -> Partition:
    return replace(
        partition_of("large", []),
        rows=1_000,
        text_bytes=80 << 20,
        read_range=lambda start, stop: iter(()),
    )


def next_of(stretches: Stretches) -> Stretch:
    stretch = stretches.next("a", 1)
    assert stretch is not None
    return stretch


@given(st.lists(st.integers(0, 400), min_size=1, max_size=40), st.integers(1, 8))
def test_every_partition_is_in_one_stretch_and_larger_ones_come_first(
    sizes: list[int], machines: int
) -> None:
    stretches = sized(sizes)
    keys: list[str] = []
    while stretches:
        stretch = stretches.next("a", machines, 100.0)
        assert stretch is not None
        keys += stretch.piece.keys

    given_sizes = [sizes[int(key[1:])] for key in keys]
    assert given_sizes == sorted(sizes, reverse=True)
    assert stretches.next("a", machines, 100.0) is None


def test_stretches_shrink_as_less_work_remains() -> None:
    stretches = sized([1] * 1_000)
    counts: list[int] = []
    while stretches:
        stretch = stretches.next("a", 4, ONE * 4.0, held=1)
        assert stretch is not None
        counts.append(len(stretch.piece.keys))
    assert counts[:2] == [60, 59], "fifteen seconds of a machine, then a sixteenth of what remains"
    assert counts == sorted(counts, reverse=True)
    assert min(counts[:-1]) == 6, "a second and a half at least"


def test_two_stretches_of_a_machine_do_not_end_at_the_same_time() -> None:
    stretches = sized([1] * 1_000)
    both = [stretches.next("a", 1, ONE * 2.0), stretches.next("a", 1, ONE * 2.0, held=1)]
    assert [len(stretch.piece.keys) for stretch in both if stretch] == [15, 30]


def test_machines_are_wanted_if_each_has_five_minutes_of_work() -> None:
    stretches = sized([1] * 1_000)
    assert [stretches.machines_wanted(ONE * speed) for speed in (1.0, 3.0, 4.0)] == [4, 2, 1]

    taken = []
    while stretches:
        taken.append(next_of(stretches))
    assert stretches.machines_wanted(ONE * 1.0) == 0

    for stretch in taken:
        stretches.put_back(stretch)
    assert stretches.machines_wanted(ONE * 1.0) == 4


def test_stretch_that_was_lost_is_for_idle_machines() -> None:
    stretches = sized([1, 1])
    first = next_of(stretches)
    stretches.put_back(replace(first, losses=1))

    assert stretches.next("a", 1, held=1) is None
    assert next_of(stretches).piece == first.piece


def test_stretch_that_was_put_back_comes_first() -> None:
    stretches = sized([1, 1])
    first = next_of(stretches)
    stretches.put_back(first)

    assert stretches.next("a", 1, held=1) is first


def test_stretch_is_for_others_than_the_machine_that_it_avoids() -> None:
    stretches = sized([1])
    stretches.put_back(replace(next_of(stretches), avoids="a"))

    assert stretches.next("a", 2) is None
    assert stretches.next("a", 1) is not None


def test_divided_partition_is_staged_when_its_last_range_is() -> None:
    stretches = Stretches([large()], divides_rows=True)
    while stretches:
        rows = next_of(stretches).piece.rows
        assert rows is not None
        assert stretches.end_range("large") == (rows.stop == 1_000)

    stretches.add_staged("large")
    assert next_of(stretches).piece.rows is None


def test_no_more_rows_of_a_partition_are_handed_out_that_has_ended() -> None:
    small = replace(partition_of("small", []), rows=3)
    stretches = Stretches([large(), small], divides_rows=True)
    first = next_of(stretches)
    assert first.piece.rows is not None
    stretches.put_back(first)
    stretches.drop("large")

    assert next_of(stretches).piece.keys == ("small",)
    assert not stretches
