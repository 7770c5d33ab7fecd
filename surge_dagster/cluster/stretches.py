"""Work for the machines of a cluster, cut as machines ask for it.

A machine gets what it does in about half a minute, at its speed so far, in parts that it does at
the same time. The largest partitions go first, and towards the end stretches shrink, so that all
machines end at about the same time.

A partition of several stretches is handed out in ranges of its rows, so that it keeps no other
machine waiting. The machine that stages the last range assembles the file. If no machine did, the
partition is handed out whole, and its rows are staged already.
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
_LEAST_SECONDS = 3.0  # each stretch costs a run's beginning and end
_FIRST_SPEED = 16 << 10  # of a machine whose speed is not known yet, in bytes of text per second
# Of the work that is left, what each machine gets at most, as `factoring` of parallel loops does.
_SHARES = 2
_WORTH_SECONDS = 300.0  # of work, for which a machine is started
_DIVIDED = 2  # a partition of this many stretches is divided
_MOST_LOSSES = 3


@dataclass(frozen=True, eq=False, slots=True)
class Stretch:
    """Partitions that one machine embeds in one go.

    Attributes:
        weight: of all of them, in bytes of text.
        ranges: of the only partition, the rows that are meant; () for all.
        is_again: another machine had it, and may have published some of it.
        losses: machines that were lost with it.
    """

    keys: tuple[str, ...]
    weight: int
    ranges: tuple[PartitionRange, ...] = ()
    is_again: bool = False
    losses: int = 0


class Stretches:
    """The partitions that no machine has, the largest last, or the one of which machines have the
    first rows.

    All ranges of a partition are handed out before another one is, since it is assembled after the
    last of them.

    Args:
        divides: whether large partitions are divided.
        at_once: stretches that a machine has at the same time.
    """

    def __init__(
        self, partitions: Iterable[Partition], *, divides: bool = True, at_once: int = 1
    ) -> None:
        self._partitions = {partition.key: partition for partition in partitions}
        # not handed out yet
        self._weights = {key: weight_of(partition) for key, partition in self._partitions.items()}
        self._left = sorted(self._weights, key=self._weights.__getitem__)
        self._left_weight = sum(self._weights.values())
        self._returned: list[Stretch] = []
        self._divides, self._at_once = divides, at_once
        # The next row, and the row groups, of partitions whose first rows are handed out and whose
        # last are not.
        self._in_part: dict[str, tuple[int, Sequence[int]]] = {}
        self._ranges_under_way = Counter[str]()

    def __bool__(self) -> bool:
        return bool(self._left or self._returned)

    def next(self, bytes_per_second: float | None, machines: int, held: int = 0) -> Stretch | None:
        """Return what a machine of this speed does next; None if there is nothing for it.

        A stretch that was lost with a machine is done alone, so that its neighbour is not lost with
        the next machine too.

        Args:
            held: stretches that the machine has.
        """
        if self._returned:
            if held and self._returned[0].losses:
                return None
            return self._returned.pop(0)
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
        partition, weight, (start, groups) = (
            self._partitions[key],
            self._weights[key],
            self._in_part.get(key, (0, ())),
        )
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
        """A range of a partition is staged; after the last one the partition is handed out as a
        whole."""
        self._ranges_under_way[key] -= 1
        if not self._ranges_under_way[key] and key not in self._in_part:
            self._returned.append(Stretch((key,), FILE_BYTES, is_again=True))

    def drop(self, key: str) -> None:
        """Hand a partition out no more."""
        self._returned = [stretch for stretch in self._returned if stretch.keys != (key,)]
        self._ranges_under_way.pop(key, None)
        if self._in_part.pop(key, None):
            self._left.remove(key)
            self._left_weight -= self._weights[key]

    def put_back(self, stretch: Stretch) -> None:
        """Take back a stretch that a machine could not do."""
        self._returned.append(replace(stretch, is_again=True))

    def put_back_lost(self, stretch: Stretch) -> bool:
        """Take back a stretch that was lost with a machine; return False if it is given up."""
        losses = stretch.losses + 1
        if losses < _MOST_LOSSES:
            self._returned.append(replace(stretch, is_again=True, losses=losses))
        return losses < _MOST_LOSSES
