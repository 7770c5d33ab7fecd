"""A hand-over that kills its own process with SIGKILL at its n-th point.

    python -m tests.consumers.killed_hand_over KIND PLACE OUTPUT N

Points are before and after each batch that is applied, each write to a table, the comparison, and
the confirmation.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from surge_dagster.consumers import lance, qdrant
from surge_dagster.consumers.comparison import compare
from surge_dagster.consumers.lance import LanceTable, _Pending
from surge_dagster.consumers.postgres import PgVectorTable
from surge_dagster.consumers.qdrant import QdrantTable, _Deletions
from surge_dagster.consumers.target import Target
from surge_dagster.engine.feed.changes import Changes, PartitionChanges, changes

CONSUMER = "shop"


def open_target(kind: str, place: str) -> Target:
    kinds = {"lancedb": LanceTable, "pgvector": PgVectorTable, "qdrant": QdrantTable}
    return kinds[kind](place, "products")


class Points:
    """Kills the process at the n-th point that it passes."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._passed = 0

    def pass_one(self) -> None:
        self._passed += 1
        if self._passed == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def marked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method with a point before and after it."""

        def step(*given: Any, **named: Any) -> Any:
            self.pass_one()
            result = method(*given, **named)
            self.pass_one()
            return result

        return step

    def each(self, steps: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """An iterator with a point before and after each item."""

        def marked_steps(*given: Any) -> Iterator[Any]:
            for step in steps(*given):
                self.pass_one()
                yield step
                self.pass_one()

        return marked_steps


def judge(feed: Changes, target: Target) -> dict[str, str]:
    compared = compare(feed, target)
    assert not compared.wrong and not compared.interrupted, compared
    return {}


def main(kind: str, place: str, output: str, at: int) -> None:
    points = Points(at)
    PartitionChanges.__iter__ = points.each(PartitionChanges.__iter__)
    Changes.confirm = points.marked(Changes.confirm)
    _Pending.flush = points.marked(_Pending.flush)
    _Pending._merge = points.marked(_Pending._merge)
    PgVectorTable._write_versions = points.marked(PgVectorTable._write_versions)
    PgVectorTable._index_vectors = points.marked(PgVectorTable._index_vectors)
    qdrant._put = points.marked(qdrant._put)
    _Deletions.flush = points.marked(_Deletions.flush)
    QdrantTable._make = points.marked(QdrantTable._make)
    QdrantTable._switch = points.marked(QdrantTable._switch)
    lance._MERGED_BYTES = 10_000  # so that a hand-over of a hundred partitions is several commits
    open_target(kind, place).apply(partial(changes, output, CONSUMER), points.marked(judge))


if __name__ == "__main__":
    _, kind, place, output, at = sys.argv
    main(kind, place, output, int(at))
