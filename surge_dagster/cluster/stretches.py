"""The queue of a cluster run: stretches of work, cut when a machine asks for one.

A stretch takes a machine some seconds at the mean speed of all machines, and stretches shrink
towards the end, so that all machines end at about the same time. The largest partitions go first.

A partition of several stretches is handed out in ranges of its rows. The machine that stages the
last range assembles the file. If no machine did, the partition is handed out as a whole, and its
rows are staged already.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from surge_dagster.cluster.machine import STRETCHES_AT_ONCE, Stretch
from surge_dagster.engine.plan.dividing import FILE_BYTES, Divider, Piece, weight_of
from surge_dagster.engine.sources.partition import Partition

_SHARES = 2  # each of a machine's stretches is at most this part of its share of the remaining work


@dataclass(frozen=True, slots=True)
class StretchSizes:
    """How much a machine gets.

    Attributes:
        least_seconds: of a stretch, because each costs a run's beginning and end.
        first_bytes_per_second: of a machine, before any stretch has ended.
        worth_seconds: of work, for which a machine is started.
    """

    seconds: float = 15.0
    least_seconds: float = 1.5
    first_bytes_per_second: float = 16 << 10
    worth_seconds: float = 300.0


SIZES = StretchSizes()


class Stretches:
    """Work that no machine has."""

    def __init__(
        self, partitions: Iterable[Partition], *, divides_rows: bool, sizes: StretchSizes = SIZES
    ) -> None:
        largest_first = sorted(partitions, key=weight_of, reverse=True)
        self._divider = Divider(largest_first, divides_rows=divides_rows)
        self._sizes = sizes
        self._returned: deque[Stretch] = deque()
        self._ranges_under_way = Counter[str]()

    def __bool__(self) -> bool:
        return bool(self._divider or self._returned)

    def next(
        self,
        machine: str,
        machines: int,
        bytes_per_second: float | None = None,
        held: int = 0,
    ) -> Stretch | None:
        """Return what a machine does next; None if there is nothing for it.

        A stretch that was lost with a machine is done alone, so that its neighbour is not lost with
        the next machine too.

        Args:
            machines: how many there are.
            bytes_per_second: their mean speed.
            held: stretches that the machine has.
        """
        for stretch in self._returned:
            if stretch.avoids == machine and machines > 1:
                continue
            if held and stretch.losses:
                return None
            self._returned.remove(stretch)
            return stretch
        if not self._divider:
            return None

        speed = bytes_per_second or self._sizes.first_bytes_per_second
        share = self._divider.weight / (_SHARES * STRETCHES_AT_ONCE * machines)
        weight = max(self._sizes.least_seconds * speed, min(self._sizes.seconds * speed, share))
        if not held:  # the two stretches of a machine should not end at the same time
            weight /= 2
        piece = self._divider.take(weight)
        if piece.rows is not None:
            self._ranges_under_way[piece.keys[0]] += 1
        return Stretch(piece)

    def machines_wanted(self, bytes_per_second: float) -> int:
        """Return how many machines have enough to do to be worth their start."""
        weight = self._divider.weight + sum(stretch.piece.weight for stretch in self._returned)
        return math.ceil(weight / (self._sizes.worth_seconds * bytes_per_second))

    def end_range(self, key: str) -> bool:
        """Record a staged range; return whether the whole partition is staged and has no file."""
        self._ranges_under_way[key] -= 1
        return not self._ranges_under_way[key] and not self._divider.has_rows_of(key)

    def add_staged(self, key: str) -> None:
        """Hand out a partition as a whole whose rows are staged."""
        self._returned.append(Stretch(Piece((key,), FILE_BYTES)))

    def drop(self, key: str) -> None:
        """Hand out no more of a partition that is published or has failed."""
        self._divider.drop(key)
        self._ranges_under_way.pop(key, None)
        kept = [stretch for stretch in self._returned if stretch.piece.keys != (key,)]
        self._returned = deque(kept)

    def put_back(self, stretch: Stretch) -> None:
        """Take back a stretch that a machine could not do."""
        self._returned.append(stretch)
