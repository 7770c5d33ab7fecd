"""The judged rows of a comparison, and what they tell about the results of two spaces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import itemgetter

import numpy as np
import pyarrow as pa

from surge_dagster.engine.compare.metrics import DEPTH, paired_interval, quality
from surge_dagster.engine.compare.queries import Label, Query
from surge_dagster.engine.compare.report import Judged, JudgedQuery, Metric
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support.printable import id_text

_CHANGED = 5
Result = Sequence[Hashable]


class LabelPool:
    """Finds the rows that labels name: one pool for both spaces.

    Attributes:
        lines: of the file, by label.
    """

    def __init__(self, queries: Iterable[Query]) -> None:
        self.lines: dict[Label, int] = {}
        for query in queries:
            self.lines = query.labels | self.lines
        self._wanted = defaultdict[str, list[Label]](list)
        for label in self.lines:
            self._wanted[label.id].append(label)
        # by label, the partition of each row
        self._found: dict[Label, dict[Hashable, str]] = {}

    def find(
        self,
        key: str,
        batch: pa.RecordBatch,
        id_column: str,
        identify: Callable[[pa.RecordBatch, int, str], Hashable],
    ) -> None:
        """Look for labelled rows in a batch of a partition."""
        if not self._wanted:
            return
        for row, value in enumerate(batch.column(id_column).to_pylist()):
            for label in self._wanted.get(id_text(value), ()):
                if label.partition in (None, key):
                    found = self._found.setdefault(label, {})
                    found[identify(batch, row, key)] = key
                    self._require_one_partition(label, list(found.values()))

    def _require_one_partition(self, label: Label, keys: Sequence[str]) -> None:
        if keys[0] != keys[-1]:
            raise ConfigError(
                f"the queries, line {self.lines[label]}: the partitions {keys[0]!r} and "
                f"{keys[-1]!r} both have a row with the id {label.id!r}. Add the column partition."
            )

    def relevant(self, query: Query) -> set[Hashable]:
        """Return the rows that a query's labels name."""
        return set().union(*(self._found.get(label, ()) for label in query.labels))

    @property
    def rows(self) -> int:
        return len(set().union(*self._found.values()))

    @property
    def unknown(self) -> list[str]:
        """The line and id of each label that names no row of both spaces, in order."""
        return [
            f"line {line}: no row of both spaces has the id {label.id!r}"
            for label, line in sorted(self.lines.items(), key=itemgetter(1))
            if label not in self._found
        ]


def judge(
    queries: Sequence[Query], results: Sequence[Sequence[Result]], pool: LabelPool, k: int
) -> Judged | None:
    """Return which of two spaces gives better results; None if there are no labels.

    Args:
        results: of each space, for each query.
    """
    if not pool.lines:
        return None
    qualities = _qualities(queries, results, pool, k)
    if not qualities:
        raise ConfigError(
            f"the queries, {pool.unknown[0]}, nor any other id of the file. Give ids, and "
            "partitions, as the source has them."
        )

    unknown = pool.unknown
    texts, values = zip(*qualities, strict=True)
    of_queries = np.array(values)  # [queries, spaces, measures]
    interval = paired_interval(of_queries[:, 1] - of_queries[:, 0])
    first, second = of_queries.mean(0).tolist()
    low, high = interval.tolist()
    names = (f"recall@{k}", f"MRR@{k}", f"nDCG@{DEPTH}")  # the last measure is the share
    ndcg = of_queries[:, :, 2].T.tolist()
    ordered = sorted(map(JudgedQuery, texts, *ndcg), key=lambda query: query.difference)
    return Judged(
        queries=len(qualities),
        rows=pool.rows,
        labels=len(pool.lines),
        labels_unknown=len(unknown),
        first_unknown=next(iter(unknown), None),
        share_first=first[-1],
        share_second=second[-1],
        metrics=tuple(map(Metric, names, first, second, low, high)),
        gained=tuple(each for each in ordered[: -_CHANGED - 1 : -1] if each.difference > 0),
        lost=tuple(each for each in ordered[:_CHANGED] if each.difference < 0),
    )


def _qualities(
    queries: Sequence[Query], results: Sequence[Sequence[Result]], pool: LabelPool, k: int
) -> list[tuple[str, list[list[float]]]]:
    """Return the queries with relevant rows, each with the measures of its result in each space."""
    qualities: list[tuple[str, list[list[float]]]] = []
    for query, *both in zip(queries, *results, strict=True):
        relevant = pool.relevant(query)
        if relevant:
            measures = [quality(result, relevant, k) for result in both]
            qualities.append((query.text, measures))
    return qualities
