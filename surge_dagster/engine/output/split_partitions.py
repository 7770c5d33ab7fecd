"""Partitions that are larger than a SuperBatch: which of their rows are staged, and when they are complete."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from surge_dagster.engine.sources.content import ContentDigest
from surge_dagster.engine.sources.partition import RowBatch
from surge_dagster.engine.superbatch import EncodedSuperBatch, OpenPartition, Segment, StagedRows


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


@dataclass(slots=True)
class _Parts:
    staged: list[StagedRows] = field(default_factory=list)
    end: EncodedSuperBatch | None = None


class SplitPartitions:
    """Follows the segments of split partitions; used by all publishing threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[OpenPartition, _Parts] = {}

    def end(self, segment: Segment, staged: StagedRows | None, encoded: EncodedSuperBatch) -> Complete | None:
        """Enter a segment whose SuperBatch was written; gives the partition when this completes it.

        A partition is complete when its end was seen and its segments, those of an earlier run included, hold all its
        rows.

        Args:
            staged: None where the segment was not staged, or has no rows.
        """
        partition = segment.partition
        with self._lock:
            if partition.refused:
                self._parts.pop(partition, None)
                return None
            parts = self._parts.setdefault(partition, _Parts())
            if staged is not None:
                parts.staged.append(staged)
            if segment.last:
                parts.end = encoded
            segments = sorted([*partition.reused, *parts.staged], key=lambda rows: rows.start)
            if parts.end is None or sum(rows.stop - rows.start for rows in segments) < partition.rows:
                return None
            del self._parts[partition]
            return Complete(partition, tuple(segments), parts.end.batch.index, parts.end.texts_per_second)


class OtherRows(Exception):
    """A partition's staged rows are not the rows that its source has now; the text says which."""


class StagedRowsCheck:
    """Separates a partition's staged rows from the others while they stream by, and proves that they are the same.

    Args:
        staged: ascending, none empty, no two overlapping.
    """

    def __init__(self, staged: Sequence[StagedRows]) -> None:
        self._left = list(staged)[::-1]
        self._row = 0
        self._digest = ContentDigest()

    def cut(self, batch: RowBatch) -> Iterator[tuple[RowBatch, bool]]:
        """The next rows in order, in pieces that are staged (True) or not; an empty batch is not.

        Raises:
            OtherRows: staged rows ended here and were not these.
        """
        if not len(batch):
            yield batch, False
        done = 0
        while done < len(batch):
            next_one = self._left[-1] if self._left else None
            inside = next_one if next_one is not None and next_one.start <= self._row else None
            border = inside.stop if inside else next_one.start if next_one else self._row + len(batch)
            stop = min(len(batch), done + border - self._row)
            piece = batch.rows(done, stop)
            self._row += stop - done
            done = stop
            if inside is not None:
                self._follow(piece, inside)
            yield piece, inside is not None

    def finish(self) -> None:
        """Check the end of the partition.

        Raises:
            OtherRows: the partition ends before its staged rows do.
        """
        if self._left:
            raise OtherRows(f"it has {self._row:,} rows, and {self._left[0].stop:,} were there when it was staged")

    def _follow(self, piece: RowBatch, staged: StagedRows) -> None:
        self._digest.update(piece)
        if self._row < staged.stop:
            return
        if self._digest.hexdigest() != staged.digest:
            raise OtherRows(f"its rows {staged.start:,} to {staged.stop:,} are not those that were staged")
        self._left.pop()
        self._digest = ContentDigest()
