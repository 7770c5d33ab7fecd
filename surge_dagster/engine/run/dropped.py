"""Partitions that a run no longer works on: refused ones, and those that it reads once more at its end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from surge_dagster.engine.run.superbatch import PartitionToRead


class DroppedPartitions:
    """Told by the stage that finds the error, and asked by all: each drops what it holds of such a partition.

    Vectors of an old file, or rows that an earlier run staged, may turn out to be wrong after some of them were taken.
    Such a partition is read once more, after all others, and all of its rows are encoded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dropped: set[PartitionToRead] = set()
        self._again: list[PartitionToRead] = []

    def __contains__(self, partition: PartitionToRead) -> bool:
        return partition in self._dropped

    def refuse(self, partition: PartitionToRead) -> bool:
        """Drop a partition for good; False where it was dropped before."""
        with self._lock:
            is_new = partition not in self._dropped
            self._dropped.add(partition)
            return is_new

    def read_again(self, partition: PartitionToRead, cosines: Sequence[float] = ()) -> None:
        """Drop this reading of a partition, and keep the partition for another one without old vectors.

        Args:
            cosines: of new vectors to the old ones, as far as they were compared.
        """
        if self.refuse(partition):
            again = replace(partition, reuse=False, cosines=(*partition.cosines, *cosines))
            with self._lock:
                self._again.append(again)

    def take_again(self) -> list[PartitionToRead]:
        """The partitions to read once more, which are then no longer kept."""
        with self._lock:
            again, self._again = self._again, []
        return again
