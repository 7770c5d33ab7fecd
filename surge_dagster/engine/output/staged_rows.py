"""Tells the rows of a partition that are staged from those that are not, and proves that they are the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from surge_dagster.engine.sources.content import ContentDigest
from surge_dagster.engine.sources.partition import RowBatch
from surge_dagster.engine.superbatch import StagedRows


class OtherRows(Exception):
    """What is staged of a partition was made from other rows than those that are read; the text says which."""


class StagedRowsCheck:
    """Follows a partition's rows while they stream by.

    Args:
        staged: ascending, none empty, no two overlapping.
    """

    def __init__(self, staged: Sequence[StagedRows]) -> None:
        self._left = list(staged)[::-1]
        self._row = 0
        self._digest = ContentDigest()

    def cut(self, batch: RowBatch) -> Iterator[tuple[RowBatch, bool]]:
        """The next rows in order, in pieces of which each is staged or is not; a batch without rows is one that is not.

        Raises:
            OtherRows: staged rows came to their end and were not these.
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
        """The partition has no more rows.

        Raises:
            OtherRows: staged ones are missing.
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
