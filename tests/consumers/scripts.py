"""What is done to an output while a target follows it; the same for every kind of target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from surge_dagster.consumers.comparison import compare
from surge_dagster.consumers.target import HandOver, Stored, Target
from surge_dagster.engine.feed.changes import Changes, changes
from tests.consumers.tables import table_of
from tests.engine.feeds import Applied, Output

TEXTS = {f"id-{row}": f"text {row}" for row in range(10)}


@dataclass(frozen=True, slots=True)
class Follower:
    """A target that follows an output."""

    output: Output
    target: Target
    consumer: str = "shop"
    space: str | None = None

    def hand_over(self, *, judged: bool = False) -> HandOver:
        def judge(feed: Changes, stored: Stored) -> dict[str, str]:
            return compare(feed, stored).wrong

        opened = partial(changes, self.output.store, self.consumer, space=self.space)
        return self.target.apply(opened, judge if judged else None)

    def assert_equal(self) -> None:
        """The target has the rows of the files, each once, with its own text and vector, and no
        others."""
        expected = self.output.expected()
        assert self.target.counts() == {key: len(rows) for key, rows in expected.items()}
        assert stored_rows(self.target) == expected


def stored_rows(target: Target) -> Applied:
    """Text and vector of every row that the table of a target has."""
    found: Applied = {}
    for partition, row, text, vector in table_of(target).rows(
        "partition", "id", "text", "embedding"
    ):
        numbers = np.array(vector, np.float32)
        found.setdefault(partition, {})[row] = (text, numbers.tobytes())
    return found


def follow_a_script(follower: Follower) -> Mapping[str, HandOver]:
    """Hand over after each of these steps; gives what was done by step."""
    output = follower.output
    done = {}

    def hand_over(step: str) -> None:
        done[step] = follower.hand_over()
        follower.assert_equal()
        found = compare(done[step].feed, follower.target)
        assert found.wrong == {}
        assert found.rows_expected == found.rows_found

    for key in ("a", 'it\'s, 50% "ü"', "b"):
        output.write(key, TEXTS)
    output.write("empty", {})
    hand_over("first")
    hand_over("nothing")
    edited = {**TEXTS, "id-3": "edited", "it's new": "added"}
    del edited["id-7"]
    output.write("a", edited)
    output.write("b", edited, with_changes=False)
    hand_over("changed")
    output.remove('it\'s, 50% "ü"')
    output.write("new", {"1": "one"})
    output.write("b", {})
    hand_over("removed and new")
    assert [done[step].rows_sent for step in done] == [30, 0, 12, 1]
    return done
