"""What may watch a run: how the rows of partitions differ from those of the files that they
replace.

A run knows nothing else of who consumes its output. The change feed is such an observer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.parquet import OutputFile
from surge_dagster.engine.store.store import Store


class RowObserver(Protocol):
    """Follows the rows of one partition in their order. Used by the reader alone."""

    def old_rows(self, ids: pa.Array, first_row: int) -> np.ndarray | None:
        """The row that each of the next ids has in the old file, -1 where it has none; None where
        that is unknown."""
        ...

    def add(
        self, old_rows: np.ndarray, is_same: np.ndarray, carried: pa.RecordBatch | None
    ) -> None:
        """Take the next rows with their `old_rows`; `is_same`, bool [n], where text and vector are
        the old row's."""
        ...

    def result(self) -> ObservedRows | None:
        """What became of all rows, after the last one; None where that is unknown."""
        ...


class ObservedRows(Protocol):
    """What a `RowObserver` made of the rows of a partition. Nobody changes it."""

    def wanted_ids(self, first_row: int, ids: pa.Array) -> pa.Array:
        """Those ids of consecutive rows that `publishing` needs."""
        ...


class PublicationObserver(Protocol):
    """Watches the publications of one run into one space. Publishing threads call it concurrently."""

    def begin(self, store: Store, space: str) -> bool:
        """The run begins to write to the space; where this returns False, only its end is reported."""
        ...

    def follow(self, replaced: OutputFile, reserve: Callable[[int], bool]) -> RowObserver:
        """An observer of the rows of a partition whose old file is open.

        Args:
            reserve: books bytes before they are held; False where they do not fit.
        """
        ...

    def publishing(self, facts: FileFacts, rows: Any, ids: Sequence[pa.Array]) -> None:
        """The file with these facts is complete and about to be published.

        Args:
            rows: the result of its `RowObserver`, which the observer made itself.
            ids: all `wanted_ids`, in pieces, in order.
        """
        ...

    def end(self) -> None:
        """Everything that the run had to do was published."""
        ...
