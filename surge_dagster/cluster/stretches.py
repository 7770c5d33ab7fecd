"""Stretches: the work of a run over many machines, cut as machines ask for it.

A machine gets what it does in about half a minute, by what it has done so far, in parts that it does at the same time;
the largest partitions go first, and towards the end stretches shrink, so that all machines end at about the same time.
A machine that is idle when nothing is left gets a copy of the oldest stretch under way: two writers of one file do no
harm, and who is first counts.

A partition of several stretches is handed out in ranges of its rows, so that it keeps no other machine waiting. Who
stages the last one assembles the file; if nobody did, the partition is handed out whole, and its rows are staged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from surge_dagster.engine.plan.ranges import range_from
from surge_dagster.engine.plan.weights import FILE_BYTES, weight_of
from surge_dagster.engine.sources.partition import Partition, PartitionRange

STRETCH_SECONDS = 30.0
STUCK_SECONDS = 300.0  # after which a machine will hardly end its stretch
_LEAST_SECONDS = 3.0  # each stretch costs a run's beginning and end
_FIRST_SPEED = 16 << 10  # of a machine whose speed is not known yet, in bytes of text per second
# Of the work that is left, what each machine gets at most, as `factoring` of parallel loops does.
_SHARES = 2
_WORTH_SECONDS = 300.0  # of work, for which a machine is started
_DIVIDED = 2  # a partition of so many stretches is divided
_BLAME, _MOST_BLAME = 10, 30  # of a machine that was lost alone, and of a stretch that is divided or given up


@dataclass(eq=False, slots=True)
class Stretch:
    """Partitions that one machine embeds in one go.

    Attributes:
        weight: of all of them, in bytes of text.
        blame: how much machines were lost with it, see `Stretches.put_back`.
        lost_on: these machines.
        ranges: of the only partition, the rows that are meant; () for all.
    """

    keys: tuple[str, ...]
    weight: int
    blame: int = 0
    lost_on: frozenset[str] = frozenset()
    ranges: tuple[PartitionRange, ...] = ()
    is_done: bool = False

    @property
    def is_suspect(self) -> bool:
        """Whether it may end the machine that has it, which therefore has no other meanwhile."""
        return self.blame >= _BLAME

    def is_for(self, machine: str, machines: int) -> bool:
        """Whether a machine is to have it: it may be the machine that is broken, so others come first."""
        return machine not in self.lost_on or machines <= len(self.lost_on)


class Stretches:
    """The partitions that no machine has, the largest last, or the one of which machines have the first rows.

    All ranges of a partition are handed out before another one is, since it is assembled after the last of them.

    Args:
        divides: whether large partitions are divided.
        at_once: stretches that a machine has at the same time.
    """

    def __init__(self, partitions: Iterable[Partition], *, divides: bool = True, at_once: int = 1) -> None:
        self._partitions = {partition.key: partition for partition in partitions}
        self._weights = {key: weight_of(partition) for key, partition in self._partitions.items()}  # not handed out yet
        self._left = sorted(self._weights, key=self._weights.__getitem__)
        self._left_weight = sum(self._weights.values())
        self._returned: list[Stretch] = []
        self._divides, self._at_once = divides, at_once
        # The next row, and the row groups, of partitions whose first rows are handed out and whose last are not.
        self._in_part: dict[str, tuple[int, Sequence[int]]] = {}
        self._ranges_under_way = Counter[str]()

    def __bool__(self) -> bool:
        return bool(self._left or self._returned)

    def next(
        self, bytes_per_second: float | None, machines: int, held: int = 0, *, machine: str = ""
    ) -> Stretch | None:
        """What a machine of this speed, which has so many others, does next; None when there is nothing for it."""
        for stretch in self._returned:
            if stretch.is_for(machine, machines):
                if held and stretch.is_suspect:
                    return None  # until it has no other
                self._returned.remove(stretch)
                return stretch
        if not self._left:
            return None
        speed = bytes_per_second or _FIRST_SPEED
        of_all = min(STRETCH_SECONDS * speed, self._left_weight / (_SHARES * machines))
        # The first one of several is half as long, so that they do not end at the same time.
        parts = self._at_once if held or self._at_once == 1 else 2 * self._at_once
        most = max(_LEAST_SECONDS * speed, of_all) / parts
        return self._take_range(most) or self._take(most)

    def machines_wanted(self, bytes_per_second: float) -> int:
        """Machines of this speed that have enough to do, at what is left, to be worth their start."""
        weight = self._left_weight + sum(stretch.weight for stretch in self._returned)
        return math.ceil(weight / (_WORTH_SECONDS * bytes_per_second))

    def _take(self, most: float) -> Stretch:
        keys, weight = list[str](), 0
        while self._left and (not keys or weight + self._weights[self._left[-1]] <= most):
            keys.append(self._left.pop())
            weight += self._weights[keys[-1]]
        self._left_weight -= weight
        return Stretch(tuple(keys), weight)

    def _take_range(self, most: float) -> Stretch | None:
        """The next rows of the largest partition; None where it is done as a whole."""
        key = self._left[-1]
        partition, weight, (start, groups) = self._partitions[key], self._weights[key], self._in_part.get(key, (0, ()))
        is_long = weight >= _DIVIDED * most
        rows, can_divide = partition.rows or 0, self._divides and partition.read_range is not None
        count = max(1, round((rows - start) * most / weight))
        if not start and not (is_long and can_divide and count < rows):
            return None
        groups = groups if start else partition.borders()
        part = range_from(partition, start, count if is_long else rows - start, groups)
        taken = weight if part.stop == rows else weight * (part.stop - start) // (rows - start)
        self._left.pop()
        self._left_weight -= taken
        self._ranges_under_way[key] += 1
        if part.stop < rows:
            self._weights[key], self._in_part[key] = weight - taken, (part.stop, groups)
            self._left.append(key)
        else:
            self._in_part.pop(key, None)
        return Stretch((key,), taken, ranges=(part,))

    def end_range(self, key: str) -> None:
        """A range of a partition is staged; after the last one the partition is handed out as a whole."""
        self._ranges_under_way[key] -= 1
        if not self._ranges_under_way[key] and key not in self._in_part:
            self._returned.append(Stretch((key,), FILE_BYTES, blame=1))  # a lost machine may have published it

    def drop(self, key: str) -> None:
        """Hand a partition out no more."""
        self._returned = [stretch for stretch in self._returned if stretch.keys != (key,)]
        self._ranges_under_way.pop(key, None)
        if self._in_part.pop(key, None):
            self._left.remove(key)
            self._left_weight -= self._weights[key]

    def put_back_one(self, stretch: Stretch, key: str, machine: str) -> None:
        """Take back one partition of a stretch, or the rows of it that the stretch has; the others are done."""
        weight = stretch.weight if stretch.ranges else self._weights[key]
        self._returned.append(Stretch((key,), weight, 1, stretch.lost_on | {machine}, stretch.ranges))

    def put_back(self, stretch: Stretch, machine: str, *, is_innocent: bool = False) -> str | None:
        """Take back a stretch whose machine was lost.

        One with which three machines have ended is divided, until it holds the partition that ends them.

        Args:
            is_innocent: the cause is another one, such as a spot machine that was taken away: that counts a tenth.

        Returns:
            The key of this partition, which is given up; else None.
        """
        blame, lost_on = stretch.blame + (1 if is_innocent else _BLAME), stretch.lost_on | {machine}
        if blame < _MOST_BLAME:
            self._returned.append(replace(stretch, blame=blame, lost_on=lost_on))
        elif len(stretch.keys) == 1:
            return stretch.keys[0]
        else:
            half = len(stretch.keys) // 2
            for keys in (stretch.keys[:half], stretch.keys[half:]):
                self._returned.append(Stretch(keys, sum(self._weights[key] for key in keys), _MOST_BLAME - _BLAME))
        return None


def oldest_copy(running: Sequence[tuple[Stretch, float]], machine: str = "", machines: int = 1) -> Stretch | None:
    """The stretch that is under way for longest, at one machine alone, and longer than the shortest takes.

    One that may end this machine, or that failed on it, is copied where its machine seems to be stuck.

    Args:
        running: with the seconds since it was begun.
    """
    alone = Counter(id(stretch) for stretch, _ in running)
    slow = [
        (stretch, seconds)
        for stretch, seconds in running
        if alone[id(stretch)] == 1 and not stretch.is_done and seconds >= _LEAST_SECONDS
        if seconds >= STUCK_SECONDS or (stretch.is_for(machine, machines) and not stretch.is_suspect)
    ]
    return max(slow, key=lambda each: each[1], default=(None, 0.0))[0]
