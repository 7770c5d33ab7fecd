"""What may watch a run: how the rows of partitions differ from those of the files that they
replace.

A run depends on no other part that consumes its output. The change feed is such an observer.
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
    """Follows the rows of one partition in their order. Only the reader uses it."""

    def old_rows(self, ids: pa.Array) -> np.ndarray | None:
        """Return the row that each of the next ids has in the old file, -1 for none; None if that
        is unknown."""
        ...

    def add(
        self, old_rows: np.ndarray, is_same: np.ndarray, carried: pa.RecordBatch | None
    ) -> None:
        """Take the next rows with their `old_rows`; `is_same`, bool [n]: text and vector are those
        of the old row."""
        ...

    def result(self) -> ObservedRows | None:
        """Return what became of all rows, after the last one; None if that is unknown."""
        ...


class ObservedRows(Protocol):
    """What a `RowObserver` made of the rows of a partition. Nobody changes it."""

    def wanted_ids(self, first_row: int, ids: pa.Array) -> pa.Array:
        """Return the ids of consecutive rows that `publishing` needs."""
        ...


class PublicationObserver(Protocol):
    """Watches the publications of one run into one space. Threads call it concurrently."""

    def begin(self, store: Store, space: str, *, include_text: bool) -> bool:
        """The run begins to write to the space; return False to get only its end reported.

        Args:
            include_text: whether its files have a text column.
        """
        ...

    def follow(self, old_file: OutputFile, reserve: Callable[[int], bool]) -> RowObserver:
        """Return an observer of the rows of a partition whose old file is open.

        Args:
            reserve: books bytes before they are held; False if they do not fit.
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
