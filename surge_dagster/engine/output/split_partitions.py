"""Books on the partitions whose segments are staged: which are there, and what follows from the last one.

A partition is complete when its end was seen and its segments, those of an earlier run included, hold all its rows. One
that was refused is forgotten when nothing of it is being written any more, and what was staged of it may go.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from surge_dagster.engine.superbatch import OpenPartition, Segment, StagedRows


@dataclass(frozen=True, slots=True)
class Complete:
    """A partition whose file can be written.

    Attributes:
        segments: cover its rows, ascending.
        superbatch, texts_per_second: of the SuperBatch in which it ended.
    """

    partition: OpenPartition
    segments: tuple[StagedRows, ...]
    superbatch: int
    texts_per_second: float | None


@dataclass(frozen=True, slots=True)
class Spoilt:
    """A partition of which nothing staged is of use, and nothing is being written."""

    partition: OpenPartition


@dataclass(slots=True)
class _Books:
    under_way: int = 0  # segments whose SuperBatch is being published
    staged: list[StagedRows] = field(default_factory=list)
    end: tuple[int, float | None] | None = None
    spoilt: bool = False


class SplitPartitions:
    """Used by all publishing threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._books: dict[OpenPartition, _Books] = {}

    def begin(self, partition: OpenPartition) -> None:
        """A segment of the partition is going to be written."""
        with self._lock:
            self._books.setdefault(partition, _Books()).under_way += 1

    def spoil(self, partition: OpenPartition) -> Spoilt | None:
        """Its rows are refused: what is staged is to go, now or when the last of its segments has ended."""
        with self._lock:
            books = self._books.setdefault(partition, _Books())
            books.spoilt = True
            return self._refused(partition, books)

    def end(
        self, segment: Segment, staged: StagedRows | None, superbatch: int, texts_per_second: float | None
    ) -> Complete | Spoilt | None:
        """A segment's SuperBatch is out; `staged` is None when the segment is not, or has no rows."""
        partition = segment.partition
        with self._lock:
            books = self._books[partition]
            books.under_way -= 1
            if staged is not None:
                books.staged.append(staged)
            if segment.last:
                books.end = superbatch, texts_per_second
            if partition.refused:
                return self._refused(partition, books)
            segments = sorted([*partition.reused, *books.staged], key=lambda rows: rows.start)
            if books.end is None or sum(rows.stop - rows.start for rows in segments) < partition.rows:
                return None
            del self._books[partition]
            return Complete(partition, tuple(segments), *books.end)

    def _refused(self, partition: OpenPartition, books: _Books) -> Spoilt | None:
        if books.under_way:
            return None
        del self._books[partition]
        return Spoilt(partition) if books.spoilt else None
