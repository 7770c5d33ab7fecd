"""Ranges of a partition that is too large for one machine, so that several can encode it at the
same time."""

from __future__ import annotations

from collections.abc import Sequence

from surge_dagster.engine.sources.partition import Partition, PartitionRange

_NEAR = 4  # a border of row groups is taken within this part of a range
_LAST = 1.25  # so many ranges stay one at the end


def range_from(
    partition: Partition, start: int, wanted: int, groups: Sequence[int]
) -> PartitionRange:
    """The next rows of a partition: about so many, and all that are left where those are few more.

    They end where a row group does, as far as one ends near, so that few rows are read twice.

    Args:
        partition: its rows are known and can be read without those in front of them.
        start: the first row, which the partition has.
        groups: see `Partition.borders`.
    """
    stop = partition.rows or 0
    if stop - start > _LAST * wanted:
        stop = start + wanted
        nearest = min(groups, key=lambda border: abs(border - stop), default=stop)
        if abs(nearest - stop) <= wanted // _NEAR:
            stop = nearest
    return PartitionRange(partition.key, partition.source_version, start, stop)
