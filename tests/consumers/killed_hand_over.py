"""A hand-over that kills its own process with SIGKILL, or tells the one that started it, at its
n-th point.

    python -m tests.consumers.killed_hand_over KIND PLACE OUTPUT N [writes] [told]

Points are before and after each batch that is applied, each write to a table, the comparison, and
the confirmation; with `writes`, batches do not count. With `told`, it prints a line at the point
and goes on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from surge_dagster.consumers import lance
from surge_dagster.consumers.comparison import compare
from surge_dagster.consumers.lance import LanceTable, _Pending
from surge_dagster.consumers.postgres import PgVectorTable
from surge_dagster.consumers.target import HandOver, Target
from surge_dagster.engine.feed.changes import Changes, changes

CONSUMER = "shop"


def open_target(kind: str, place: str) -> Target:
    return LanceTable(place, "products") if kind == "lancedb" else PgVectorTable(place, "products")


def main(kind: str, place: str, output: str, at: int, *modes: str) -> None:
    passed = 0

    def point() -> None:
        nonlocal passed
        passed += 1
        if passed == at and "told" in modes:
            print("passed", flush=True)
        elif passed == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def marked(method: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **named: Any) -> Any:
            point()
            result = method(*given, **named)
            point()
            return result

        return step

    steps = HandOver.steps

    def each(self: HandOver, conform: Any) -> Iterator[Any]:
        for step in steps(self, conform):
            point()
            yield step
            point()

    def judge(feed: Changes, target: Target) -> dict[str, str]:
        compared = compare(feed, target)
        assert not compared.wrong and not compared.interrupted, compared
        return {}

    if "writes" not in modes:
        HandOver.steps = each
    Changes.confirm = marked(Changes.confirm)
    _Pending.flush = marked(_Pending.flush)
    _Pending._merge = marked(_Pending._merge)
    PgVectorTable._write_versions = marked(PgVectorTable._write_versions)
    PgVectorTable._build_index = marked(PgVectorTable._build_index)
    lance._MERGED_BYTES = 10_000  # so that a hand-over of a hundred partitions is several commits
    open_target(kind, place).apply(partial(changes, output, CONSUMER), marked(judge))


if __name__ == "__main__":
    _, kind, place, output, at, *modes = sys.argv
    main(kind, place, output, int(at), *modes)
