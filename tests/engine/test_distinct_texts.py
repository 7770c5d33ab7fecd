"""Duplicates among any number of texts: exact where they fit, close where they do not, in bounded memory."""

from __future__ import annotations

import pyarrow as pa
import pytest

from surge_dagster.engine.distinct_texts import DistinctTexts


def texts(first: int, stop: int) -> pa.LargeStringArray:
    return pa.array([f"text {number}" for number in range(first, stop)], pa.large_string())


def test_nothing_has_no_duplicates() -> None:
    assert (DistinctTexts().distinct, DistinctTexts().duplicate_share) == (0, 0.0)


def test_it_is_exact_for_as_many_as_are_kept() -> None:
    counted = DistinctTexts(most_kept=1000)
    for _ in range(4):
        counted.add(texts(0, 600))
        counted.add(texts(600, 1000))
    assert (counted.texts, counted.distinct, counted.duplicate_share) == (4000, 1000, 0.75)


def test_beyond_that_it_estimates_without_growing() -> None:
    counted = DistinctTexts(most_kept=4096)
    for start in range(0, 60_000, 1000):
        counted.add(texts(start, start + 1000))
        counted.add(texts(start, start + 500))
        assert len(counted._kept) <= 4096 and counted._new_texts <= 4096
    assert counted.texts == 90_000
    assert counted.duplicate_share == pytest.approx(1 / 3, abs=0.03)


def test_parts_counted_apart_give_what_all_of_them_give() -> None:
    whole, joined = DistinctTexts(most_kept=512), DistinctTexts(most_kept=512)
    for start in range(0, 8000, 400):
        part = DistinctTexts(most_kept=512)
        for count in (whole, part):
            count.add(texts(start, start + 800))
        joined.join(part)
    assert joined.texts == whole.texts == 16_000
    assert joined.distinct == whole.distinct == pytest.approx(8400, rel=0.15)


def test_slices_of_a_column_count_only_what_they_show() -> None:
    counted = DistinctTexts()
    column = texts(0, 10)
    counted.add(column[2:4])  # pyright: ignore[reportArgumentType]
    counted.add(column[3:5])  # pyright: ignore[reportArgumentType]
    assert (counted.texts, counted.distinct) == (4, 3)
