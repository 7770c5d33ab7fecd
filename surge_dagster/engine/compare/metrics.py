"""How good a result is, how alike two are, and how far a mean difference may come from chance.

A result is a list of rows, best first. A row is relevant or not; what is not labelled counts as not
relevant. The interval of a mean difference is a paired bootstrap: the same queries are drawn for
both spaces, so that queries which are hard for both do not widen it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from math import log2

import numpy as np

DEPTH = 10
_DRAWS = 10_000


def quality(result: Sequence[Hashable], relevant: Collection[Hashable], k: int) -> list[float]:
    """Return recall@k, the reciprocal rank within k (0 if no row there is relevant), nDCG@10, and
    the share of the ten nearest rows that is relevant."""
    ranks = [rank for rank, row in enumerate(result, 1) if row in relevant]
    within_k = [rank for rank in ranks if rank <= k]
    within_ten = [rank for rank in ranks if rank <= DEPTH]
    ideal = _gain(range(1, min(DEPTH, len(relevant)) + 1))
    return [
        len(within_k) / len(relevant),
        1 / within_k[0] if within_k else 0.0,
        _gain(within_ten) / ideal,
        len(within_ten) / min(DEPTH, max(1, len(result))),
    ]


def _gain(ranks: Iterable[int]) -> float:
    return sum(1 / log2(rank + 1) for rank in ranks)


def paired_interval(differences: np.ndarray) -> np.ndarray:
    """Return the 95% interval of the mean of each column, [2, columns].

    Args:
        differences: [queries, columns].
    """
    draw = np.random.default_rng(0)
    queries = len(differences)
    means = [differences[draw.integers(0, queries, queries)].mean(0) for _ in range(_DRAWS)]
    return np.percentile(means, (2.5, 97.5), axis=0)


def overlap(one: Sequence[Hashable], other: Sequence[Hashable]) -> float:
    """Return the share of rows that both results have."""
    return len(set(one) & set(other)) / max(len(one), len(other), 1)


def rank_correlation(one: Sequence[Hashable], other: Sequence[Hashable]) -> float:
    """Return the correlation of the ranks of all rows that either result has, from -1 to 1.

    A row that a result lacks has the rank after its last one. Both results have the same length.
    """
    if list(one) == list(other):
        return 1.0
    rows = list(dict.fromkeys([*one, *other]))
    ranks = np.array([_ranks(rows, one), _ranks(rows, other)], np.float64)
    return float(np.asarray(np.corrcoef(ranks)).item(1))


def _ranks(rows: Sequence[Hashable], result: Sequence[Hashable]) -> list[int]:
    places = {row: place for place, row in enumerate(result)}
    return [places.get(row, len(result)) for row in rows]
