"""Rows that have vectors when they are gathered: they keep their places and fill a SuperBatch
without being encoded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.encoder.arena import Arena, KnownVectors
from surge_dagster.engine.run.aggregator import Aggregator
from surge_dagster.engine.run.superbatch import PartitionToRead, Segment, SuperBatch
from surge_dagster.engine.run.thresholds import Bounds
from tests.engine.runs import read_of
from tests.small_catalogs import Rows, numbered_rows, partition_of, row_batch_of

DIMENSION = 700  # so that a few rows fill a page


def known_vectors(rows: list[int], values: list[int]) -> KnownVectors:
    """Vectors that say which row of all they belong to."""
    matrix = np.repeat(np.array(values, np.float32)[:, None], DIMENSION, axis=1)
    truncated = np.array(values) % 2 == 1
    return KnownVectors(np.array(rows, np.intp), matrix, truncated)


def arena_of(max_texts: int) -> Arena:
    return Arena(
        slots=2, max_texts=max_texts, max_bytes=1 << 20, dimension=DIMENSION, dtype="float32"
    )


class Gathering:
    """An aggregator fed with rows some of which have vectors.

    Attributes:
        booked: bytes that are held.
        known: what each row that was given a vector has in it, by key and row.
        found: what the emitted rows with a vector have in it.
        segments: their number in each SuperBatch.
    """

    def __init__(self) -> None:
        self.booked = 0
        self.known: dict[tuple[str, int], int] = {}
        self.found: dict[tuple[str, int], int] = {}
        self.segments: list[int] = []

    def reserve(self, size: int) -> None:
        self.booked += size

    def take(self, batches: Iterator[SuperBatch]) -> None:
        for batch in batches:
            held = sum(map(partial(self._look_at, batch), batch.segments))
            assert batch.vector_bytes == 4 * DIMENSION * held
            self.booked -= batch.held_bytes + batch.vector_bytes
            self.segments.append(len(batch.segments))
            batch.slot.release()

    def _look_at(self, batch: SuperBatch, segment: Segment) -> int:
        """Note the vectors of a segment; returns how many rows have one."""
        rows = np.flatnonzero(batch.slot.is_known(segment.start, segment.stop)).tolist()
        vectors = batch.slot.matrix(segment.start, segment.stop)
        truncated = batch.slot.truncation(segment.start, segment.stop)
        for row in rows:
            value = int(vectors[row, 0])
            assert (vectors[row] == value).all()
            assert truncated[row] == value % 2
            self.found[segment.partition.key, segment.first_row + row] = value
        return len(rows)

    def give(
        self, aggregator: Aggregator, key: str, rows: Rows, first: int, random: Random
    ) -> None:
        """Add rows of a partition, most of them with a vector."""
        places: list[int] = []
        values: list[int] = []
        for row in range(first, first + len(rows)):
            if random.random() < 0.6:
                places.append(row - first)
                values.append(1000 * int(key) + row)
                self.known[key, row] = values[-1]
        vectors = known_vectors(places, values) if places else None
        self.take(aggregator.add(row_batch_of(rows), vectors))

    def discard(self, aggregator: Aggregator, key: str) -> None:
        self.booked -= aggregator.discard()[1]
        self.known = {row: value for row, value in self.known.items() if row[0] != key}


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 60), max_size=8),
    st.integers(1, 20),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_known_vectors_keep_their_rows_and_stay_booked(
    sizes: list[int], batch_rows: int, b_max: int, random: Random
) -> None:
    bounds = Bounds(max(1, b_max // 4), b_max, 1 << 20, 1 << 20)
    gathering = Gathering()
    with arena_of(b_max) as arena:
        acquire = partial(arena.acquire, cancelled=lambda: True)
        aggregator = Aggregator(bounds, acquire, gathering.reserve)
        for number, size in enumerate(sizes):
            key = str(number)
            rows = numbered_rows(key, size)
            aggregator.open(PartitionToRead(partition_of(key, rows)))
            for start in range(0, size, batch_rows):
                gathering.give(aggregator, key, rows[start : start + batch_rows], start, random)
            was_emitted = any(row[0] == key for row in gathering.found)
            if random.random() < 0.2 and not was_emitted:
                gathering.discard(aggregator, key)
            else:
                gathering.take(aggregator.close(read_of(rows)))
        gathering.take(aggregator.finish())

    assert gathering.found == gathering.known
    assert gathering.booked == 0


def gathered(bounds: Bounds, partitions: int, *, new: int) -> list[int]:
    """Partitions in each SuperBatch, where each of ten rows has `new` rows without a vector."""
    gathering = Gathering()
    with arena_of(bounds.b_max) as arena:
        aggregator = Aggregator(
            bounds, partial(arena.acquire, cancelled=lambda: True), gathering.reserve
        )
        for number in range(partitions):
            rows = numbered_rows(f"p{number}", 10)
            aggregator.open(PartitionToRead(partition_of(f"p{number}", rows)))
            known = known_vectors(list(range(10 - new)), list(range(10 - new)))
            gathering.take(aggregator.add(row_batch_of(rows), known))
            gathering.take(aggregator.close(read_of(rows)))
        gathering.take(aggregator.finish())
    return gathering.segments


def test_b_min_counts_the_rows_to_encode_and_b_max_all_rows() -> None:
    bounds = Bounds(10, 100, 1 << 20, 1 << 20)
    assert gathered(bounds, 20, new=5) == [2] * 10
    assert gathered(bounds, 20, new=1) == [10, 10]
    assert gathered(bounds, 20, new=0) == [10, 10], "it is full"


def test_first_superbatches_of_a_run_with_few_new_rows_are_small() -> None:
    bounds = Bounds(40, 200, 1 << 20, 1 << 20, first_b_min=5)
    assert gathered(bounds, 60, new=0) == [3, 5, 10, 20, 20, 2]
