"""Stretches: the work of a run over many machines, cut as machines ask for it.

A machine gets what it does in about half a minute, by what it has done so far, in parts that it does at the same time;
the largest partitions go first, and towards the end stretches shrink, so that all machines end at about the same time.
A machine that is idle when nothing is left gets a copy of the oldest stretch under way: two writers of one file do no
harm, and who is first counts.

A partition of several stretches is divided into ranges of its rows, so that it keeps no other machine waiting. Which of
them stages the last one assembles the file; if none did, the partition is handed out whole, and its rows are staged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from surge_dagster.engine.plan.ranges import divide
from surge_dagster.engine.plan.weights import FILE_BYTES, weight_of
from surge_dagster.engine.sources.partition import Partition, PartitionRange

STRETCH_SECONDS = 30.0
_LEAST_SECONDS = 3.0  # each stretch costs a run's beginning and end
_FIRST_SPEED = 128 << 10  # of a machine whose speed is not known yet, in bytes of text per second
# Of the work that is left, what each machine gets at most, as `factoring` of parallel loops does.
_SHARES = 2
_WORTH_SECONDS = 300.0  # of work, for which a machine is started
_DIVIDED = 2  # a partition of so many stretches is divided
_MOST_ATTEMPTS = 3


@dataclass(eq=False, slots=True)
class Stretch:
    """Partitions that one machine embeds in one go.

    Attributes:
        weight: of all of them, in bytes of text.
        attempts: machines that were lost with it.
        ranges: of the only partition, the rows that are meant; () for all.
    """

    keys: tuple[str, ...]
    weight: int
    attempts: int = 0
    ranges: tuple[PartitionRange, ...] = ()
    is_done: bool = False


class Stretches:
    """The partitions that no machine has, the largest last.

    Args:
        divides: whether large partitions are divided.
    """

    def __init__(self, partitions: Iterable[Partition], *, divides: bool = True) -> None:
        self._partitions = {partition.key: partition for partition in partitions}
        self._weights = {key: weight_of(partition) for key, partition in self._partitions.items()}
        self._left = sorted(self._weights, key=lambda key: self._weights[key])
        self._left_weight = sum(self._weights.values())
        self._returned: list[Stretch] = []
        self._divides = divides
        self._ranges_left = Counter[str]()

    def __bool__(self) -> bool:
        return bool(self._left or self._returned)

    def next(
        self, bytes_per_second: float | None, machines: int, parts: int = 1, *, is_idle: bool = True
    ) -> Stretch | None:
        """What a machine of this speed does next; None when nothing is left for it.

        Args:
            parts: in which it does the work of half a minute; the stretch is one.
            is_idle: whether it has no other; only then it gets one that other machines were lost with.
        """
        stretch = self._take_returned(is_idle)
        if stretch is None and self._left:
            speed = bytes_per_second or _FIRST_SPEED
            all_parts = min(STRETCH_SECONDS * speed, self._left_weight / (_SHARES * machines))
            most = max(_LEAST_SECONDS * speed, all_parts) / parts
            if self._divides and machines > 1 and self._divide_largest(most):
                return self._take_returned(is_idle)
            return self._take(most)
        return stretch

    def machines_wanted(self, bytes_per_second: float) -> int:
        """Machines of this speed that have enough to do, at what is left, to be worth their start."""
        return math.ceil(self._left_weight / (_WORTH_SECONDS * bytes_per_second))

    def _take_returned(self, is_idle: bool) -> Stretch | None:
        for stretch in self._returned:
            if is_idle or not stretch.attempts:
                self._returned.remove(stretch)
                return stretch
        return None

    def _take(self, most: float) -> Stretch:
        keys, weight = list[str](), 0
        while self._left and (not keys or weight + self._weights[self._left[-1]] <= most):
            keys.append(self._left.pop())
            weight += self._weights[keys[-1]]
        self._left_weight -= weight
        return Stretch(tuple(keys), weight)

    def _divide_largest(self, most: float) -> bool:
        key = self._left[-1]
        partition, weight = self._partitions[key], self._weights[key]
        if weight < _DIVIDED * most or not partition.rows:
            return False
        ranges = divide(partition, round(weight / max(most, 1)))
        if ranges:
            self._left.pop()
            self._left_weight -= weight
            self._ranges_left[key] = len(ranges)
            self._returned += [
                Stretch((key,), weight * (each.stop - each.start) // partition.rows, ranges=(each,)) for each in ranges
            ]
        return bool(ranges)

    def end_range(self, key: str) -> None:
        """A range of a partition is staged; after the last one the partition is handed out as a whole."""
        self._ranges_left[key] -= 1
        if not self._ranges_left[key]:
            self._returned.append(Stretch((key,), FILE_BYTES))

    def drop(self, key: str) -> None:
        """Hand out no more ranges of a partition."""
        self._returned = [stretch for stretch in self._returned if not (stretch.ranges and stretch.keys == (key,))]
        self._ranges_left[key] = 0

    def put_back(self, stretch: Stretch) -> str | None:
        """Take back a stretch whose machine was lost.

        One that has ended three machines is divided, until it holds the partition that ends them.

        Returns:
            The key of this partition, which is given up; else None.
        """
        if stretch.attempts + 1 < _MOST_ATTEMPTS:
            self._returned.append(replace(stretch, attempts=stretch.attempts + 1))
        elif len(stretch.keys) == 1:
            return stretch.keys[0]
        else:
            half = len(stretch.keys) // 2
            for keys in (stretch.keys[:half], stretch.keys[half:]):
                self._returned.append(Stretch(keys, sum(self._weights[key] for key in keys), _MOST_ATTEMPTS - 1))
        return None


def oldest_copy(running: Sequence[tuple[Stretch, float]]) -> Stretch | None:
    """The stretch that is under way for longest, at one machine alone, and longer than the shortest takes.

    Args:
        running: with the seconds since it was begun.
    """
    alone = Counter(id(stretch) for stretch, _ in running)
    slow = [each for each in running if alone[id(each[0])] == 1 and not each[0].is_done and each[1] >= _LEAST_SECONDS]
    return max(slow, key=lambda each: each[1], default=(None, 0.0))[0]
