"""A table of one or many files with rows in any order: each key of its columns is a partition.

The first listing reads the table once and groups its rows on the disk of the cache. What it finds
is kept in the cache too, so that later listings of the same files read nothing. A process that
reads partitions it did not list groups the table again. The version of a partition is the digest
of its rows.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.sources.formats import ENDINGS_IN_WORDS
from surge_dagster.engine.sources.listing import SourceFile, SourceFiles
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support import disk_cache
from surge_dagster.engine.tables.grouped_partitions import grouped_partition
from surge_dagster.engine.tables.grouping import Group, GroupedRows
from surge_dagster.engine.tables.table_rows import TableRows

# Time in which files are not listed again: thousands of partitions are published one by one.
_LOOKED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Index:
    """The partitions of one version of a table."""

    version: str
    groups: Sequence[Group]
    files: Sequence[str]
    file_rows: Sequence[int]

    def shown(self, row: int) -> str:
        """Return a row of the table for messages."""
        ends = list(accumulate(self.file_rows))
        place = bisect_right(ends, row)
        begin = ends[place] - self.file_rows[place]
        return f"row {row - begin:,} of {self.files[place]}"


class TableSource:
    """A table as a `Source`: a partition per key, in the order of the encoded keys."""

    def __init__(
        self,
        files: SourceFiles,
        partition_by: Sequence[str],
        selection: Selection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._partition_by = tuple(partition_by)
        self._selection = selection
        self._clock = clock
        identity = [files.identity, self._partition_by, selection.columns, selection.encoding]
        described = json.dumps(identity).encode("utf-8", "surrogatepass")
        self._cached_as = f"tables/{hashlib.sha256(described).hexdigest()[:24]}.json"
        self._looked: tuple[float, str] = (float("-inf"), "")
        self._known: _Index | None = None
        self._grouped: tuple[_Index, GroupedRows] | None = None
        self._lock = threading.RLock()

    @property
    def url(self) -> str:
        return self._files.url

    def __iter__(self) -> Iterator[Partition]:
        """Yield the partitions; read the table unless these versions of its files are known."""
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
            files, version = self._listed()
            if not files:
                raise ConfigError(
                    f"the table {self.url!r} has no file that ends in {ENDINGS_IN_WORDS}. Give the "
                    "path of one, of a folder, or a pattern such as 'tables/*.parquet'."
                )
            known = self._known
            if known is None or known.version != version:
                known = self._cached(version) or self._group(files, version)[0]
                self._known = known
            return known

    def _rows(self, index: _Index) -> GroupedRows:
        """Return the rows of the partitions that were listed."""
        with self._lock:
            grouped = self._grouped
            if grouped is None or grouped[0].version != index.version:
                files, version = self._listed()
                if version != index.version:
                    raise self._changed("after they were listed")
                grouped = self._group(files, version)
            return grouped[1]

    def _group(self, files: Sequence[SourceFile], version: str) -> tuple[_Index, GroupedRows]:
        """Read the table, group its rows, and cache its index."""
        rows = TableRows(files, self._partition_by, self._selection)
        grouped = GroupedRows(rows.blocks())
        if self._listed()[1] != version:
            raise self._changed("while they were read")

        groups = list(grouped.groups.values())
        index = _Index(version, groups, [file.shown for file in files], rows.file_rows)
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

    def _listed(self) -> tuple[list[SourceFile], str]:
        files = self._files.list()
        lines = "".join(f"{file.relative}\0{file.size}\0{file.token}\n" for file in files)
        version = hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:24]
        self._looked = (self._clock(), version if files else "")
        return files, version

    def _current_version(self, index: _Index, version: str) -> str | None:
        if self._clock() - self._looked[0] > _LOOKED_SECONDS:
            self._listed()
        now = self._looked[1]
        if now == index.version:
            return version
        if not now:
            return None
        return f"unknown, since files of the table changed ({now})"

    def _changed(self, when: str) -> TransientError:
        return TransientError(f"the files of the table {self.url!r} changed {when}. Run again.")
