"""A table with rows in any order: each key of its columns is a partition.

The first listing reads the table once and groups its rows on the disk of the cache. What it finds
is kept in the cache too, so that later listings of the same version read nothing. A process that
reads partitions it did not list groups the table again. The version of a partition is the digest
of its rows.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Protocol

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.sources.formats import ENDINGS_IN_WORDS
from surge_dagster.engine.sources.partition import Partition, row_in_words
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support import disk_cache
from surge_dagster.engine.tables.grouping import Block, Group, GroupedRows, grouped_partition

# Time in which a table is not looked at again: thousands of partitions are published one by one.
_LOOKED_SECONDS = 1.0


class TableContent(Protocol):
    """What the rows of a table are read from.

    Attributes:
        identity: distinguishes this table from every other one, without secrets.
        parts: name and rows of each file that was read last, if rows are known by their files.
    """

    url: str
    identity: str
    parts: list[tuple[str, int]]

    def version(self) -> str | None:
        """Look at the table, and return its version now; None if there is no such table."""
        ...

    def blocks(self) -> Iterator[Block]:
        """Yield the rows of the version that was looked at last."""
        ...


@dataclass(frozen=True, slots=True)
class _Index:
    """The partitions of one version of a table."""

    version: str
    groups: Sequence[Group]
    parts: Sequence[tuple[str, int]]

    def shown(self, row: int) -> str:
        """Return a row of the table for messages."""
        begin = 0
        for name, rows in self.parts:
            if row < begin + rows:
                return f"{row_in_words(row - begin)} of {name}"
            begin += rows
        return row_in_words(row)


class TableSource:
    """A table as a `Source`: a partition per key, in the order of the encoded keys."""

    def __init__(
        self,
        content: TableContent,
        partition_by: Sequence[str],
        selection: Selection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = content.url
        self._content = content
        self._partition_by = partition_by
        self._selection = selection
        self._clock = clock
        dialect = (selection.encoding, selection.escape)
        identity = [content.identity, partition_by, selection.columns, dialect]
        described = json.dumps(identity).encode("utf-8", "surrogatepass")
        self._cached_as = f"tables/{hashlib.sha256(described).hexdigest()[:24]}.json"
        self._looked: tuple[float, str | None] = (float("-inf"), None)
        self._known: _Index | None = None
        self._grouped: tuple[_Index, GroupedRows] | None = None
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Partition]:
        """Yield the partitions; read the table unless this version of it is known."""
        index = self._index()
        for group in index.groups:
            yield grouped_partition(
                group,
                partial(self._rows, index),
                self._selection,
                self._partition_by,
                partial(self._current_version, index),
                index.shown,
            )

    def close(self) -> None:
        """Free the grouped rows; a later reading groups the table again."""
        self._grouped = None

    def _index(self) -> _Index:
        with self._lock:
            version = self._look()
            if version is None:
                raise ConfigError(
                    f"the table {self.url!r} has no file that ends in {ENDINGS_IN_WORDS}. Give the "
                    "path of one, of a folder, or a pattern such as 'tables/*.parquet'."
                )
            known = self._known
            if known is None or known.version != version:
                known = self._cached(version) or self._group(version)[0]
                self._known = known
            return known

    def _rows(self, index: _Index) -> GroupedRows:
        """Return the rows of the partitions that were listed."""
        with self._lock:
            grouped = self._grouped
            if grouped is None or grouped[0].version != index.version:
                if self._look() != index.version:
                    raise self._changed("after it was listed")
                grouped = self._group(index.version)
            return grouped[1]

    def _group(self, version: str) -> tuple[_Index, GroupedRows]:
        """Read the table, group its rows, and cache its index."""
        grouped = GroupedRows(self._content.blocks())
        index = _Index(version, list(grouped.groups.values()), self._content.parts)
        if self._look() != version:
            raise self._changed("while it was read")

        disk_cache.write_json(self._cached_as, asdict(index))
        self._grouped = index, grouped
        return self._grouped

    def _cached(self, version: str) -> _Index | None:
        document = disk_cache.read_json(self._cached_as)
        try:
            index = _Index(**(document or {}))
            groups = [Group(*values) for values in index.groups]
        except TypeError:  # there is none, or it is damaged
            return None
        if index.version != version:
            return None
        return replace(index, groups=groups)

    def _look(self) -> str | None:
        version = self._content.version()
        self._looked = (self._clock(), version)
        return version

    def _current_version(self, index: _Index, version: str) -> str | None:
        with self._lock:
            if self._clock() - self._looked[0] > _LOOKED_SECONDS:
                self._look()
            now = self._looked[1]
        if now is None or now == index.version:
            return now and version
        return f"unknown, since the table changed ({now})"

    def _changed(self, when: str) -> TransientError:
        return TransientError(f"the table {self.url!r} changed {when}. Run again.")
