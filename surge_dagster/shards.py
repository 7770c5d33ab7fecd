"""Cutting the work of a refresh into runs of about equal size.

A shard is a stretch of partitions in Dagster's order, so that the ranges which the runs carry in their tags do not
overlap. The cuts are the best ones there are for stretches: no others make the largest shard smaller. Partitions dealt
out one by one could come a little closer, for a handful of large ones; with more shards than machines the queue evens
that out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from surge_dagster.engine.sources.partition import Partition

# What a file costs beside its texts (publishing, its event), as bytes of text.
_FILE_BYTES = 4096
_ROW_BYTES = 64


def weight(partition: Partition, usual: int) -> int:
    """The cost of a partition in bytes of text; `usual` where its source knows nothing of its size."""
    if partition.text_bytes is not None:
        return _FILE_BYTES + partition.text_bytes
    if partition.rows is not None:
        return _FILE_BYTES + partition.rows * _ROW_BYTES
    return _FILE_BYTES + usual


@dataclass(frozen=True, slots=True)
class Sharding:
    """How work is divided among runs.

    Attributes:
        shards: runs to make of it, at most, as long as `most_each` allows it.
        shard_bytes: text that is worth a run of its own: less of it makes fewer shards.
        most_each: partitions of one shard.
    """

    shards: int
    shard_bytes: int
    most_each: int

    @property
    def most(self) -> int:
        """Partitions of all shards together, where each is filled."""
        return self.shards * self.most_each

    def cut(self, keys: Sequence[str], partitions: Mapping[str, Partition]) -> Iterator[list[str]]:
        """Yield the keys in stretches of about equal weight, in their order.

        Args:
            keys: what is to be embedded.
            partitions: the same and perhaps more, by key.
        """
        if not keys:
            return
        sizes = [size for key in keys if (size := partitions[key].text_bytes) is not None]
        usual = sum(sizes) // len(sizes) if sizes else 0
        weights = [weight(partitions[key], usual) for key in keys]
        wanted = min(self.shards, max(1, -(-sum(weights) // self.shard_bytes)), len(weights))
        wanted = max(wanted, -(-len(weights) // self.most_each))
        low, high = max(weights), sum(weights)
        while low < high:
            middle = (low + high) // 2
            if len(_filled(weights, middle, self.most_each)) <= wanted:
                high = middle
            else:
                low = middle + 1
        start = 0
        for length in _filled(weights, low, self.most_each):
            yield list(keys[start : start + length])
            start += length


def _filled(weights: Sequence[int], capacity: int, most: int) -> list[int]:
    """Lengths of stretches that each weigh `capacity` at most."""
    lengths = [0]
    filled = 0
    for each in weights:
        if lengths[-1] and (filled + each > capacity or lengths[-1] == most):
            lengths.append(0)
            filled = 0
        lengths[-1] += 1
        filled += each
    return lengths
