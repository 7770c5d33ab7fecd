"""How many of the exact nearest rows a search finds."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import pytest

from surge_dagster.engine.compare.recall import Found, recall_of
from surge_dagster.engine.readers.loading import Embeddings
from surge_dagster.engine.readers.search import rows_of
from tests.spaces import Spaces

MODEL = "hash://16"


def vectors_of(made: Spaces) -> tuple[list[Hashable], np.ndarray]:
    """Keys and ids of all rows, and their vectors."""
    space = made.of(MODEL)
    names: list[Hashable] = []
    vectors: list[list[float]] = []
    for key, batch in rows_of(made.store, space, Embeddings(made.store, space).files()):
        names += [(key, row) for row in batch.column("id").to_pylist()]
        vectors += batch.column("embedding").to_pylist()
    return names, np.array(vectors, np.float32)


def measured(made: Spaces, search: Callable[[np.ndarray, int], list[Found]]) -> float:
    space = made.of(MODEL)
    files = list(Embeddings(made.store, space).files())
    return recall_of(made.store, space, files, search, queries=20)


def search_of(
    names: list[Hashable], vectors: np.ndarray, skipped: int = 0
) -> Callable[[np.ndarray, int], list[Found]]:
    """An exact search that leaves out the nearest rows after the query's own."""

    def search(queries: np.ndarray, k: int) -> list[Found]:
        found: list[Found] = []
        for query in queries:
            order = np.argsort(-(vectors @ query), kind="stable")
            places = [order[0], *order[1 + skipped : k + skipped]]
            found.append([(names[place], vectors[place]) for place in places])
        return found

    return search


@pytest.mark.parametrize(("skipped", "share"), [(0, 1.0), (1, 0.9), (4, 0.6), (10, 0.0)])
def test_recall_is_the_share_of_exact_rows_that_are_found(
    three_spaces: Spaces, skipped: int, share: float
) -> None:
    names, vectors = vectors_of(three_spaces)

    assert measured(three_spaces, search_of(names, vectors, skipped)) == pytest.approx(share)


def test_search_that_finds_nothing_has_no_recall(three_spaces: Spaces) -> None:
    assert measured(three_spaces, lambda queries, k: [[] for _ in queries]) == 0


def test_rows_with_one_vector_stand_for_each_other(three_spaces: Spaces) -> None:
    names, vectors = vectors_of(three_spaces)
    others = [("copy", name) for name in names]

    def search(queries: np.ndarray, k: int) -> list[Found]:
        copies = search_of(list(others), vectors)(queries, k + 1)
        return [found[1:] for found in copies]

    assert measured(three_spaces, search) == 1
