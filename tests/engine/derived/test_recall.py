"""The recall of a derived space is measured as a comparison with every row would give it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from surge_dagster.engine.derived import parent_files
from surge_dagster.engine.derived.conversion import cut
from surge_dagster.engine.derived.parent_files import measure_recall, recall_of
from surge_dagster.engine.files.formats import usable_file
from surge_dagster.engine.model.spec import DerivedDtype, EncodingSpec, Space
from surge_dagster.engine.output.freshness import OutputState
from tests.spaces import KEYS, ROWS, Spaces

PARENT = EncodingSpec("hash://64").resolve()
QUERIES = np.arange(0, 2000, 20)


def clusters(rows: int = 2000) -> np.ndarray:
    """Rows near one of forty centres, in 64 dimensions, the first of which matter most."""
    draw = np.random.default_rng(11)
    weights = np.linspace(2.0, 0.1, 64, dtype=np.float32)
    centres = draw.standard_normal((40, 64), np.float32) * weights
    drawn = (
        centres[np.arange(rows) % 40]
        + 0.35 * draw.standard_normal((rows, 64), np.float32) * weights
    )
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def space(matrix: np.ndarray, dtype: DerivedDtype, dimension: int = 64) -> Space:
    derived = PARENT.derive(dtype, dimension)
    if dtype != "int8":
        return derived
    kept = cut(matrix, derived)
    return PARENT.derive(
        dtype, dimension, (tuple(kept.min(0).tolist()), tuple(kept.max(0).tolist()))
    )


def brute_force(matrix: np.ndarray, other: np.ndarray) -> float:
    """The share of the ten nearest rows of each query that are among the ten nearest by other
    vectors."""
    shares = []
    for query in QUERIES:
        near = [np.argsort(-(each @ each[query]), kind="stable") for each in (matrix, other)]
        one, two = ({row for row in rows[:11].tolist() if row != query} for rows in near)
        shares.append(len(one & two) / 10)
    return float(np.mean(shares))


def test_recall_of_fewer_dimensions_is_that_of_brute_force() -> None:
    matrix = clusters()
    for dimension in (48, 8):
        found, rescored = recall_of(matrix, QUERIES, space(matrix, "float32", dimension))
        assert rescored is None
        assert found == pytest.approx(
            brute_force(matrix, cut(matrix, space(matrix, "float32", dimension))), abs=0.002
        )


def test_recall_falls_with_what_a_conversion_loses() -> None:
    matrix = clusters()
    float16, _ = recall_of(matrix, QUERIES, space(matrix, "float16"))
    int8, _ = recall_of(matrix, QUERIES, space(matrix, "int8"))
    binary, rescored = recall_of(matrix, QUERIES, space(matrix, "binary"))
    assert rescored is not None
    assert float16 > 0.995
    assert 0.95 < int8 < float16
    assert binary < rescored < int8
    assert binary > 0.3, "ten random rows of a cluster of fifty are nearer to 0.2"


def test_wrong_ranges_are_seen_in_the_recall() -> None:
    matrix = clusters()
    right = space(matrix, "int8")
    assert right.derived
    narrow = replace(right, derived=replace(right.derived, ranges=((-0.01,) * 64, (0.01,) * 64)))
    assert recall_of(matrix, QUERIES, narrow)[0] < recall_of(matrix, QUERIES, right)[0] - 0.2


def test_rows_that_are_equally_near_count_equally() -> None:
    matrix = np.repeat(clusters(40), 50, axis=0)
    found, _ = recall_of(matrix, QUERIES, space(matrix, "float16"))
    assert found == 1.0


def test_sample_takes_from_many_files_and_says_what_it_took(
    three_spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = three_spaces.of("hash://16")
    store = three_spaces.store
    files = [
        usable_file(store, parent, *each)
        for each in OutputState(store, parent.name).files().items()
    ]
    int8 = parent.derive("int8", ranges=((-1.0,) * 16, (1.0,) * 16))
    whole = measure_recall(store, parent, int8, files)
    assert whole
    assert whole.queries == 120
    assert whole.rows == len(KEYS) * ROWS
    assert whole.partitions == len(KEYS)
    monkeypatch.setattr(parent_files, "_SAMPLE_BYTES", 80 * 16 * 4)
    part = measure_recall(store, parent, int8, files)
    assert part and (part.rows, part.partitions, part.total_rows) == (30, 3, 120), (
        "an eighth of 80 rows of each file"
    )
    assert part == measure_recall(store, parent, int8, files), "the same rows again"
    assert measure_recall(store, parent, int8, []) is None
