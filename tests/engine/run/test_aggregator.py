"""The aggregator's rule against a second, row-by-row telling of it, on the real arena, for any
sizes and order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.encoder.arena import Arena
from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.output.rejected import RejectedRowsBuilder
from surge_dagster.engine.run.aggregator import Aggregator
from surge_dagster.engine.run.superbatch import PartitionToRead, SuperBatch
from surge_dagster.engine.run.thresholds import PARTITION_OVERHEAD_BYTES, Bounds, Thresholds
from surge_dagster.engine.sources.partition import RejectedRow
from tests.engine.runs import read_of
from tests.small_catalogs import Rows, numbered_rows, partition_of, row_batch_of


@dataclass(frozen=True)
class Incoming:
    """A partition as it will arrive: its rows, how they are cut, and whether it is refused after
    the last of them.

    Attributes:
        skipped: numbers of the batches of rows that are staged already.
    """

    key: str
    rows: Rows
    batch_rows: int
    refused: bool = False
    skipped: frozenset[int] = frozenset()


def row_cost(row: tuple[str, str]) -> int:
    return len(row[0].encode()) + len(row[1].encode())


Piece = tuple[str, int, int]  # key, first row, last row + 1


def told_row_by_row(partitions: list[Incoming], bounds: Bounds) -> list[list[Piece]]:
    """The rule of the architecture, without slots, batches or speed: which pieces make up which
    SuperBatch."""
    emitted: list[list[Piece]] = []
    pending: list[Piece] = []
    texts = size = 0  # of pending

    def flush() -> None:
        nonlocal pending, texts, size
        emitted.append(pending)
        pending = []
        texts = 0
        size = 0

    for partition in partitions:
        first = 0
        held = 0
        held_bytes = PARTITION_OVERHEAD_BYTES
        for number, row in enumerate(partition.rows):
            cost = row_cost(row)
            while texts + held + 1 > bounds.b_max or size + held_bytes + cost > bounds.b_max_bytes:
                if pending:
                    flush()
                else:
                    emitted.append([(partition.key, first, number)])
                    first = number
                    held = 0
                    held_bytes = 0
            held, held_bytes = held + 1, held_bytes + cost
        if partition.refused:
            continue
        if size + held_bytes > bounds.b_max_bytes and pending:
            flush()
        pending.append((partition.key, first, first + held))
        texts, size = texts + held, size + held_bytes
        if texts >= bounds.b_min or size >= bounds.b_min_bytes:
            flush()
    if pending:
        flush()
    return emitted


@dataclass
class Gathering:
    """An aggregator fed from a real arena, and what came out of it.

    Attributes:
        rows: ids and texts of what was emitted, by key and number of the row.
        ended: keys and numbers of rows of the partitions whose last segment was emitted.
        booked: bytes that are held.
        reserved: bytes that were ever booked.
    """

    bounds: Bounds
    emitted: list[list[Piece]] = field(default_factory=list)
    rows: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    ended: list[tuple[str, int]] = field(default_factory=list)
    booked: int = 0
    reserved: int = 0

    def run(self, partitions: list[Incoming]) -> None:
        bounds = self.bounds
        with Arena(
            slots=2,
            max_texts=bounds.b_max,
            max_bytes=bounds.b_max_bytes,
            dimension=1,
            dtype="float32",
        ) as arena:
            # `acquire` raises when no slot is free: two must be enough.
            aggregator = Aggregator(
                bounds, lambda: arena.acquire(cancelled=lambda: True), self.reserve
            )
            for partition in partitions:
                self.feed(aggregator, partition)
            self.take(aggregator.finish())
            assert aggregator.held_texts == self.booked == 0

    def reserve(self, size: int) -> None:
        self.booked += size
        self.reserved += size

    def feed(self, aggregator: Aggregator, partition: Incoming) -> None:
        aggregator.open(PartitionToRead(partition_of(partition.key, partition.rows)))
        for number, start in enumerate(range(0, len(partition.rows), partition.batch_rows)):
            batch = row_batch_of(partition.rows[start : start + partition.batch_rows])
            if number in partition.skipped:
                aggregator.skip(batch)
            else:
                self.take(aggregator.add(batch))
            assert aggregator.held_texts <= self.bounds.b_max
            assert aggregator.held_bytes <= self.bounds.b_max_bytes
        if partition.refused:
            self.booked -= aggregator.discard()[1]
        else:
            self.take(aggregator.close(read_of(partition.rows)))
        assert aggregator.held_texts < self.bounds.b_min

    def take(self, batches: Iterator[SuperBatch]) -> None:
        for batch in batches:
            self.look_at(batch)
            self.booked -= batch.held_bytes
            batch.slot.release()

    def look_at(self, batch: SuperBatch) -> None:
        assert batch.index == len(self.emitted)
        assert batch.texts <= self.bounds.b_max
        row = size = 0
        pieces: list[Piece] = []
        for segment in batch.segments:
            assert segment.start == row, "segments cover the slot without a gap"
            row = segment.stop
            key = segment.partition.key
            ids = pa.chunked_array(segment.ids, pa.string()).to_pylist()
            found = list(zip(ids, batch.slot.texts(segment.start, row).to_pylist(), strict=True))
            size += sum(map(row_cost, found)) + (
                PARTITION_OVERHEAD_BYTES if segment.first_row == 0 else 0
            )
            for number, value in enumerate(found, segment.first_row):
                assert (key, number) not in self.rows, "no row comes twice"
                self.rows[key, number] = value
            pieces.append((key, segment.first_row, segment.first_row + len(found)))
            if segment.read is not None:
                self.ended.append((key, pieces[-1][2]))
        assert row == batch.texts
        assert size <= self.bounds.b_max_bytes
        assert size <= batch.held_bytes <= 2 * self.bounds.b_max_bytes
        self.emitted.append(pieces)


def numbered(partition: Incoming) -> dict[tuple[str, int], tuple[str, str]]:
    """Ids and texts of the rows that are to be encoded, by key and number of the row."""
    rows: dict[tuple[str, int], tuple[str, str]] = {}
    for number, row in enumerate(partition.rows):
        if number // partition.batch_rows not in partition.skipped:
            rows[partition.key, number] = row
    return rows


@st.composite
def bounds_of(draw: st.DrawFn) -> Bounds:
    b_max = draw(st.integers(1, 20))
    b_max_bytes = draw(st.integers(PARTITION_OVERHEAD_BYTES + 500, 6 * PARTITION_OVERHEAD_BYTES))
    return Bounds(
        draw(st.integers(1, b_max)), b_max, draw(st.integers(1, b_max_bytes)), b_max_bytes
    )


@st.composite
def arrivals(draw: st.DrawFn, *, staged: bool = False) -> list[Incoming]:
    """Partitions; with `staged`, some of their rows are staged already and none is refused."""
    partitions = []
    for number in range(draw(st.integers(0, 10))):
        sizes = draw(
            st.lists(
                st.integers(0, 400) | st.integers(0, 5), max_size=draw(st.sampled_from([1, 5, 70]))
            )
        )
        rows: list[tuple[str, str]] = []
        for row, size in enumerate(sizes):
            rows.append((f"{number}.{row}", "ß" * (size // 2) + "x" * (size % 2)))
        refused = not staged and draw(st.sampled_from([False] * 4 + [True]))
        skipped = draw(st.frozensets(st.integers(0, 70))) if staged else frozenset[int]()
        partitions.append(Incoming(f"p{number}", rows, draw(st.integers(1, 30)), refused, skipped))
    return partitions


@settings(max_examples=100)
@given(arrivals(), bounds_of())
def test_any_stream_is_gathered_by_the_rule_and_within_its_bounds(
    partitions: list[Incoming], bounds: Bounds
) -> None:
    gathering = Gathering(bounds)
    gathering.run(partitions)
    assert gathering.emitted == told_row_by_row(partitions, bounds)
    ended: list[tuple[str, int]] = []
    for partition in partitions:
        if not partition.refused:
            ended.append((partition.key, len(partition.rows)))
            assert numbered(partition).items() <= gathering.rows.items()
    assert gathering.ended == ended


@given(arrivals(staged=True), bounds_of())
def test_skipped_rows_do_not_move_the_other_rows(
    partitions: list[Incoming], bounds: Bounds
) -> None:
    """Every partition is closed once, and its segments hold exactly the rows that were added, under
    their numbers."""
    gathering = Gathering(bounds)
    gathering.run(partitions)
    rows: dict[tuple[str, int], tuple[str, str]] = {}
    ended: list[tuple[str, int]] = []
    for partition in partitions:
        rows |= numbered(partition)
        ended.append((partition.key, len(partition.rows)))
    assert gathering.rows == rows
    assert gathering.ended == ended


def test_derived_b_min_is_reached_in_doubling_steps() -> None:
    derived = Thresholds().resolve(5_000)
    steps = [*map(derived.b_min_of, (0, 1, 2, 3, 4, 1_000_000))]
    assert steps == [312, 624, 1248, 2496, 4992, 5000]
    assert Thresholds(b_min=5_000).resolve(5_000).b_min_of(0) == 5_000
    gathering = Gathering(Bounds(8, 100, 100_000, 100_000, first_b_min=1))
    gathering.run([Incoming(f"p{n}", numbered_rows(f"p{n}", 1), 1) for n in range(30)])
    assert [*map(len, gathering.emitted)] == [1, 2, 4, 8, 8, 7]


def test_moved_rows_count_twice_until_the_first_slot_is_released() -> None:
    gathering = Gathering(Bounds(50, 50, 100_000, 100_000))
    first = numbered_rows("a", 30)
    second = numbered_rows("b", 50)
    gathering.run([Incoming("a", first, 30), Incoming("b", second, 20)])
    moved = second[:20]
    expected = 3 * PARTITION_OVERHEAD_BYTES + sum(map(row_cost, [*first, *second, *moved]))
    assert gathering.reserved == expected


def test_partitions_without_rows_end_a_superbatch_too() -> None:
    gathering = Gathering(
        Bounds(10, 10, 4 * PARTITION_OVERHEAD_BYTES, 5 * PARTITION_OVERHEAD_BYTES)
    )
    gathering.run([Incoming(f"p{n}", [], 1) for n in range(10)])
    assert [*map(len, gathering.emitted)] == [4, 4, 2]


def test_lists_of_rejected_rows_count_as_bytes_of_a_superbatch() -> None:
    builder = RejectedRowsBuilder()
    builder.add([RejectedRow(0, "row 0", "id", "x" * 10_000)])
    read = replace(read_of([]), rejected=builder.rejected())
    size = PARTITION_OVERHEAD_BYTES + read.rejected.table.nbytes
    gathering = Gathering(Bounds(10, 10, 3 * size, 3 * size))

    with Arena(slots=2, max_texts=10, max_bytes=100, dimension=1, dtype="float32") as arena:
        aggregator = Aggregator(gathering.bounds, arena.acquire, gathering.reserve)
        for key in "abcd":
            aggregator.open(PartitionToRead(partition_of(key, [])))
            gathering.take(aggregator.close(read))
        gathering.take(aggregator.finish())

    assert [*map(len, gathering.emitted)] == [3, 1]
    assert gathering.reserved == 4 * size
    assert gathering.booked == 0


def test_row_larger_than_b_max_is_refused_before_its_batch_is_taken() -> None:
    bounds = Bounds(10, 10, 2000, 2000)
    with Arena(slots=1, max_texts=10, max_bytes=2000, dimension=1, dtype="float32") as arena:
        aggregator = Aggregator(bounds, arena.acquire)
        aggregator.open(PartitionToRead(partition_of("k", [])))
        assert list(aggregator.add(row_batch_of([("0", "short")]))) == []
        with pytest.raises(
            DataError, match=r"row 2: the row has 1,001 bytes and a SuperBatch holds at most 2,000"
        ):
            aggregator.add(row_batch_of([("1", "short"), ("2", "x" * 1000)]))
        assert aggregator.held_texts == 1


@pytest.mark.parametrize(("b_min", "b_max"), [(1_000, 5_000), (2_000, 5_000), (100_000, 200_000)])
def test_b_max_is_twice_the_derived_b_min_and_not_tiny(b_min: int, b_max: int) -> None:
    bounds = Thresholds().resolve(b_min)
    assert bounds.b_min == b_min
    assert bounds.b_max == b_max


def test_given_thresholds_are_kept_and_the_others_are_derived() -> None:
    assert Thresholds(b_min=7).resolve(1).b_max == 5_000
    assert Thresholds(b_max=100).resolve(1_000_000_000).b_min == 50
    assert Thresholds(b_max=2).resolve(1_000_000_000).b_min == 1
    assert Thresholds(first_b_min=500).resolve(3_200).first_b_min == 500
    assert Thresholds(first_b_min=9_000).resolve(3_200).first_b_min == 3_200
    assert Thresholds(b_min=4_000, first_b_min=10).resolve(3_200).b_min_of(2) == 40
    bounds = Thresholds(max_text_bytes=10**9).resolve(1_000_000)
    assert bounds.b_max_bytes == 2 * 10**9 + PARTITION_OVERHEAD_BYTES
    assert bounds.b_min_bytes < bounds.b_max_bytes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Thresholds(b_min=0), "b_min must be at least 1; 0 was given"),
        (Thresholds(first_b_min=-1), "first_b_min must be at least 1"),
        (Thresholds(b_min=11, b_max=10), r"b_min \(11 texts\) must not exceed b_max \(10\)"),
    ],
)
def test_thresholds_that_cannot_work_are_refused(wrong: Thresholds, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong.resolve(1000)
