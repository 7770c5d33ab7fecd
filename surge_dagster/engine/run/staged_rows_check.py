"""Separates a partition's staged rows from the others while they stream by, and proves that they
are the same. If they are not, what is staged of the partition is removed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.run.staging import Staging
from surge_dagster.engine.run.superbatch import StagedRows
from surge_dagster.engine.sources.partition import ContentDigest, RowBatch


class StagedRowsCheck:
    """Cuts the rows of a partition where its staged rows begin and end, and compares their digests.

    Args:
        staged: ascending, none empty, no two overlapping.
        row: the first row that is read; no staged row is before it.

    Attributes:
        row: the first row after the last piece.
    """

    def __init__(
        self, staging: Staging, key: str, staged: Sequence[StagedRows], row: int = 0
    ) -> None:
        self._staging = staging
        self._key = key
        self.row = row
        self._coming = deque(staged)
        self._digest = ContentDigest()

    def cut(self, batch: RowBatch) -> Iterator[tuple[RowBatch, StagedRows | None]]:
        """Yield the next rows in order, in pieces, each with the staged rows that it is part of.

        Raises:
            TransientError: staged rows ended here and were not these.
        """
        done = 0
        while done < len(batch):
            staged = self._coming[0] if self._coming else None
            is_staged = staged is not None and staged.start <= self.row
            stop = len(batch)
            if staged is not None:
                border = staged.stop if is_staged else staged.start
                stop = min(stop, done + border - self.row)
            piece = batch if stop - done == len(batch) else batch.rows(done, stop)
            self.row += len(piece)
            done = stop
            if staged is not None and is_staged:
                self._digest.update(piece)
                if self.row == staged.stop:
                    self._end(staged)
            yield piece, staged if is_staged else None

    def _end(self, staged: StagedRows) -> None:
        if self._digest.hexdigest() != staged.digest:
            rows = f"{staged.start:,} to {staged.stop:,}"
            self._refuse(f"its rows {rows} are not those that were staged")
        self._coming.popleft()
        self._digest = ContentDigest()

    def finish(self) -> None:
        """Check the end of the partition; raises `TransientError` if it ends before its staged rows
        do."""
        if self._coming:
            last = self._coming[-1].stop
            self._refuse(f"it has {self.row:,} rows, and {last:,} were there when it was staged")

    def _refuse(self, reason: str) -> None:
        self._staging.remove(self._key)
        raise TransientError(
            f"partition {self._key!r}: {reason}. What an earlier run staged of it is removed; run "
            "again.",
            self._key,
        )
