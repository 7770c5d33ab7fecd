"""Ranges of a partition that is too large for one machine, so that several runs can encode it at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from surge_dagster.engine.sources.partition import Partition, PartitionRange

_NEAR = 4  # a border of row groups is taken within this part of a range


def divide(partition: Partition, count: int) -> list[PartitionRange]:
    """So many ranges of about equal size that have all rows of a partition, or fewer, for `EmbeddingRun(ranges=…)`.

    They begin where row groups do, as far as one begins near, so that few rows are read twice. [] for a partition that
    stays whole: one range is wanted, or its source cannot read rows without those in front of them.
    """
    rows = partition.rows or 0
    if partition.read_range is None or not 2 <= count <= rows:
        return []
    groups, borders = partition.borders(), [0]
    for number in range(1, count):
        border = near_border(groups, rows * number // count, rows // count)
        if borders[-1] < border < rows:
            borders.append(border)
    return [
        PartitionRange(partition.key, partition.source_version, start, stop)
        for start, stop in pairwise([*borders, rows])
    ]


def near_border(groups: Sequence[int], row: int, range_rows: int) -> int:
    """Where a row group begins that is near a row, for ranges of so many rows; else the row itself.

    Args:
        groups: see `Partition.borders`.
    """
    nearest = min(groups, key=lambda border: abs(border - row), default=row)
    return nearest if abs(nearest - row) <= range_rows // _NEAR else row
