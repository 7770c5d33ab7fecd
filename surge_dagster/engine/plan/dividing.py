"""Divides work by weight: partitions, and the rows of a partition that is too large for one piece.

Dagster's `max_runs` cuts a worklist into equal pieces. A cluster takes pieces as its machines ask
for them. What a partition costs is not known beforehand, so it weighs as much as its text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from surge_dagster.engine.sources.partition import Partition, PartitionRange

FILE_BYTES = 4096  # what publishing a file costs in addition to its texts
_ROW_BYTES = 64  # of a row whose partition has only a row count
_DIVIDED = 2  # a partition of this many pieces is divided
_LAST = 1.25  # a rest of this many ranges is one range


@dataclass(frozen=True, slots=True)
class Piece:
    """Partitions that are embedded together.

    Attributes:
        weight: in bytes of text.
        rows: of the only partition, the rows that are meant; None for all.
    """

    keys: tuple[str, ...]
    weight: int
    rows: PartitionRange | None = None


class Divider:
    """Partitions that are not given out yet, in the given order.

    All ranges of a partition are given out before the next partition, because its file is assembled
    after the last of them.
    """

    def __init__(self, partitions: Iterable[Partition], *, divides_rows: bool) -> None:
        self._pending = deque(partitions)
        self._divides_rows = divides_rows
        self._start = 0  # the first row of the first partition that is not given out
        self._given = 0  # the weight of the rows before it
        self.weight = sum(map(weight_of, self._pending))

    def __bool__(self) -> bool:
        return bool(self._pending)

    def take(self, weight: float) -> Piece:
        """Return the next piece of about this weight; at least a partition, or a row."""
        partition = self._pending[0]
        remaining = weight_of(partition) - self._given
        count = round(((partition.rows or 0) - self._start) * weight / remaining)
        can_divide = self._divides_rows and partition.read_range is not None
        is_large = remaining >= _DIVIDED * weight and (partition.rows or 0) > 1
        if self._start or (can_divide and is_large):
            return self._take_rows(max(1, count))

        keys: list[str] = []
        taken = 0
        while self._pending:
            next_weight = weight_of(self._pending[0])
            if keys and taken + next_weight / 2 > weight:
                break
            keys.append(self._pending.popleft().key)
            taken += next_weight
        self.weight -= taken
        return Piece(tuple(keys), taken)

    def drop(self, key: str) -> None:
        """Give out no further rows of a divided partition."""
        if self._start and self._pending[0].key == key:
            self.weight -= weight_of(self._pending[0]) - self._given
            self._end_partition()

    def has_rows_of(self, key: str) -> bool:
        """Return whether some rows of a divided partition are not given out yet."""
        return self._start > 0 and self._pending[0].key == key

    def _take_rows(self, count: int) -> Piece:
        partition = self._pending[0]
        rows = range_from(partition, self._start, count)

        given = weight_of(partition) * rows.stop // (partition.rows or 1)
        taken = given - self._given
        self.weight -= taken
        self._start = rows.stop
        self._given = given
        if rows.stop == partition.rows:
            self._end_partition()
        return Piece((partition.key,), taken, rows)

    def _end_partition(self) -> None:
        self._pending.popleft()
        self._start = 0
        self._given = 0


def cut(partitions: Sequence[Partition], most: int, least_weight: int) -> list[Piece]:
    """Divide partitions, in their order, into at most `most` pieces of about equal weight.

    Args:
        least_weight: of a piece, on average.
    """
    divider = Divider(partitions, divides_rows=False)
    total = divider.weight
    count = min(most, max(1, total // least_weight))

    pieces: list[Piece] = []
    for number in range(1, count + 1):
        given = total - divider.weight
        weight = total * number // count - given
        if weight > 0:
            pieces.append(divider.take(weight))
    return pieces


def weight_of(partition: Partition) -> int:
    """Return the cost of a partition, in bytes of text; one of unknown size counts as small."""
    if partition.text_bytes is not None:
        return FILE_BYTES + partition.text_bytes
    return FILE_BYTES + (partition.rows or 0) * _ROW_BYTES


def range_from(partition: Partition, start: int, wanted: int) -> PartitionRange:
    """Return the next rows of a partition, as many as wanted, or all if few more remain.

    Args:
        partition: a partition whose number of rows is known.
    """
    stop = partition.rows or 0
    if stop - start > _LAST * wanted:
        stop = start + wanted
    return PartitionRange(partition.key, partition.source_version, start, stop)
