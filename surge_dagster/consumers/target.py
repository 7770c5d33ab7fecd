"""What every target of the change feed does, and helpers that targets share.

A target applies what changed since its last confirmation, and confirms it. It keeps the rows of the
files in one table with the columns partition, id, the other columns of the files, and embedding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from filelock import FileLock

from surge_dagster.engine.compare.recall import Found
from surge_dagster.engine.errors import ConfigError, DataError, StoreUnavailable, SurgeError
from surge_dagster.engine.feed.changes import Changes, PartitionChanges
from surge_dagster.engine.support.urls import expanded

Distance = Literal["cosine", "l2", "ip"]
KindOf = Callable[[pa.Field], str | None]
Judge = Callable[[Changes, "Stored"], Collection[str]]


class OpenFeed(Protocol):
    """Opens the change feed; `since` is for a consumer that keeps its versions itself."""

    def __call__(self, *, since: Mapping[str, str] | None = None) -> Changes: ...


@dataclass(slots=True)
class HandOver:
    """What one hand-over did.

    Attributes:
        rows_sent: to insert or replace.
        rows_deleted: ids to delete; rows of cleared partitions are not counted.
        failures: by partition; the next hand-over tries again.
    """

    feed: Changes
    rows_sent: int = 0
    rows_deleted: int = 0
    commits: int = 0
    partitions: int = 0
    failures: dict[str, SurgeError] = field(default_factory=dict)

    @contextmanager
    def applying(self, partition: PartitionChanges) -> Iterator[None]:
        """Record the error of a partition, so that it does not stop the others."""
        try:
            yield
            self.partitions += 1
        except StoreUnavailable:
            raise
        except SurgeError as error:
            self.failures[partition.partition] = error

    def read_only(self) -> None:
        """Find the files that cannot be read; nothing is applied."""
        for partition in self.feed:
            with self.applying(partition):
                deque(partition, maxlen=0)


class Stored(Protocol):
    """What a table has."""

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each partition in the table."""
        ...

    def vectors(self, partition: str, ids: Sequence[object]) -> dict[object, np.ndarray]:
        """Return the vectors of those of some rows that the table has, by id."""
        ...


class Target(Stored, Protocol):
    """A table that has the rows of the files.

    Attributes:
        index_distance: of the index of the vectors; None if the settings name no index.
    """

    index_distance: Distance | None

    @property
    def place(self) -> str: ...  # for people; without secrets

    def apply(self, open_feed: OpenFeed, judge: Judge | None = None) -> HandOver:
        """Bring the table up to date and confirm what it has, under one lock.

        Args:
            judge: called after the changes are stored and confirmed; returns wrong partitions,
                which the next hand-over loads whole.

        Raises:
            ConfigError: the table has the rows of another consumer, output or program.
            TransientError: the database does not answer.
        """
        ...

    def nearest(self, queries: np.ndarray, k: int) -> list[Found]:
        """Return what the index finds for each query with the database's own defaults.

        Args:
            queries: float32 [queries, dimension].
        """
        ...


def owner_of(feed: Changes) -> str:
    """Return the owner of a table's rows, which it records and compares."""
    return f"{feed.consumer!r} of {feed.store.identity}"


def other_owner(place: str, owner: str | None, feed: Changes) -> ConfigError:
    """Return the error for a table of another owner; None if no hand-over made it."""
    if owner is None:
        return ConfigError(
            f"{place} has rows that no hand-over put there. Name another table, or drop this one."
        )
    return ConfigError(
        f"{place} has the rows of {owner}, and would lose them to {owner_of(feed)}. Name another "
        "table; or, if the output has moved, drop this one, and it is loaded again."
    )


def require_columns(
    batch: pa.RecordBatch, known: Mapping[str, str], kind: KindOf, place: str
) -> None:
    """Refuse a batch with a column that the table does not have or has with another type."""
    for column in batch.schema:
        expected = kind(column)
        actual = known.get(column.name)
        if column.name != "op" and (actual is None or actual != expected):
            in_table = "missing" if actual is None else f"of type {actual}"
            raise DataError(
                batch.column("partition")[0].as_py(),
                f"its column {column.name!r} is of type {expected} and {in_table} in {place}",
                "If all files have it so, drop that table: the next hand-over makes it again. "
                "Otherwise give the column one type in the source.",
            )


def local_folder(uri: str) -> Path | None:
    """Return the folder of an embedded database; None for a URL."""
    path = uri.removeprefix("file://")
    return None if "://" in path else expanded(path)


def lock_of_folder(folder: Path | None, name: str) -> AbstractContextManager[Any]:
    """Return a lock for one hand-over at a time in a folder, which is made; None has no lock."""
    if folder is None:
        return nullcontext()
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f".{name}.lock")


def missing_extra(extra: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{extra} needs packages that are not installed ({error}). Run: pip install "
        f"'surge-dagster[{extra}]'"
    )
