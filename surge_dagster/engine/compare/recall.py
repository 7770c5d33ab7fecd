"""How many of the nearest rows a search by an index finds, compared with an exact search.

Rows of a space are drawn as queries, and looked up by their own vectors. The exact search is that
of a comparison of spaces: one pass over all rows. A row that is as near as the last exact one
counts as found, since rows with one vector can stand for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pyarrow as pa

from surge_dagster.engine.compare.comparison import SAMPLE, blocks_of
from surge_dagster.engine.compare.metrics import DEPTH
from surge_dagster.engine.compare.queries import draw_queries
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.readers.search import Nearest, add_to_each, unit_vectors
from surge_dagster.engine.store.store import Store

Found = Sequence[tuple[Hashable, np.ndarray]]  # the key and id of each row, and its vector
Search = Callable[[np.ndarray, int], Sequence[Found]]
_COLUMNS = ["id", "truncated", "embedding"]  # a hit shows whether its text was truncated
_ROUNDING = 1e-5  # of cosines of float32 vectors that are summed up in another order


def recall_of(
    store: Store,
    space: Space,
    files: Sequence[PublishedFile],
    search: Search,
    *,
    queries: int = SAMPLE,
) -> float:
    """Return the share of the ten nearest rows by cosine that a search finds, from 0 to 1.

    Args:
        search: `search(vectors, count)` returns for each of the vectors, float32
            [queries, dimension], up to `count` rows, best first.
        queries: number of rows to draw. A drawn row is not one of its own nearest rows.

    Raises:
        ConfigError: no row can be drawn, because all texts are blank.
    """
    drawn = draw_queries(store, space, files, queries, _COLUMNS, _key_and_id)
    vectors = np.array([query.vector for query in drawn])
    units = unit_vectors(vectors, space)
    nearest_of_each = [Nearest(DEPTH + 1, _key_and_id) for _ in drawn]  # each finds itself
    for key, batch in blocks_of(store, space, files, _COLUMNS, len(drawn)):
        add_to_each(nearest_of_each, units, key, batch, space)

    found_of_each = search(vectors, DEPTH + 1)
    shares: list[float] = []
    for query, unit, nearest, found in zip(
        drawn, units, nearest_of_each, found_of_each, strict=True
    ):
        exact = [hit.score for row, hit in nearest.hits.items() if row != query.own][:DEPTH]
        others = [vector for row, vector in found if row != query.own][:DEPTH]
        if exact:
            shares.append(_share(unit, exact, others, space))
    return float(np.mean(shares)) if shares else 1.0


def _share(
    query: np.ndarray, exact: Sequence[float], found: Sequence[np.ndarray], space: Space
) -> float:
    if not found:
        return 0.0
    cosines = unit_vectors(np.array(found, np.float32), space) @ query
    return np.count_nonzero(cosines >= exact[-1] - _ROUNDING) / len(exact)


def _key_and_id(batch: pa.RecordBatch, row: int, key: str) -> Hashable:
    return key, batch.column("id")[row].as_py()
