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
        self._failed: set[PartitionToRead] = set()
        self._again: dict[PartitionToRead, PartitionToRead] = {}  # this reading and the next one

    def __contains__(self, partition: PartitionToRead) -> bool:
        return partition in self._dropped

    def fail(self, partition: PartitionToRead, *, drop: bool = True) -> bool:
        """Read a partition no more; whether its failure is to be reported, since it was not dropped before.

        Args:
            drop: what was read of it is not staged either.
        """
        with self._lock:
            is_new = partition not in self._dropped
            self._failed.add(partition)
            if drop:
                self._dropped.add(partition)
            return is_new

    def read_again(self, partition: PartitionToRead, cosines: Sequence[float] = ()) -> None:
        """Drop this reading of a partition, and keep the partition for another one without old vectors.

        Args:
            cosines: of new vectors to the old ones, as far as they were compared.
        """
        with self._lock:
            if partition not in self._dropped and partition not in self._failed:
                self._again[partition] = replace(partition, reuse=False, cosines=(*partition.cosines, *cosines))
            self._dropped.add(partition)

    def comes_again(self, partition: PartitionToRead) -> bool:
        return partition in self._again

    def to_read_again(self) -> list[PartitionToRead]:
        """The partitions to read once more."""
        with self._lock:
            return list(self._again.values())
