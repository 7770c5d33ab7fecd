"""A table of one or many files with rows in any order: each key of its columns is a partition.

The first listing reads the table once. If equal keys are not next to each other, it groups the rows
in a folder of the cache. What it finds is kept in the cache too, so that later listings of the same
files read nothing. The version of a partition is the digest of its rows, which is compared whenever
they are read: rows of a changed file or of a damaged folder are never published.

One process makes the folder while others wait for its lock, and `TableSource.close` removes it. A
process that has its files open reads on; one that comes later groups the table again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import shutil
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
from filelock import FileLock

from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.sources.content import ContentDigest
from surge_dagster.engine.sources.formats import ENDINGS_IN_WORDS
from surge_dagster.engine.sources.listing import SourceFile, SourceFiles
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support import disk_cache
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.engine.support.unreadable import UNREADABLE
from surge_dagster.engine.tables.grouping import (
    Group,
    grouped,
    groups_in_order,
    open_groups,
    rows_of,
)
from surge_dagster.engine.tables.table_rows import NO_KEY, NO_KEY_NAME, TableRows, without_key

# Time in which files are not listed again: thousands of partitions are published one by one.
_LOOKED_SECONDS = 1.0
# Columns, and a function that returns the row of the table for each of their rows.
_Rows = tuple[pa.RecordBatch, Callable[[int], int]]
_READ_BYTES = 8 * 1024 * 1024  # of reading a partition, in addition to its rows


@dataclass(frozen=True, slots=True)
class _Index:
    """The partitions of one version of a table."""

    version: str
    groups: Sequence[Group]
    files: Sequence[str]
    file_rows: Sequence[int]

    def file_of(self, row: int) -> int:
        """Return the place of the file that has a row of the table."""
        return bisect_right(list(accumulate(self.file_rows)), row)

    def shown(self, row: int) -> str:
        """Return a row of the table for messages."""
        place = self.file_of(row)
        return f"row {row - sum(self.file_rows[:place]):,} of {self.files[place]}"


class TableSource:
    """A table as a `Source`: a partition per key, in the order of the encoded keys.

    A table in which equal keys are next to each other keeps its own order.
    """

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
        self._name = f"tables/{hashlib.sha256(described).hexdigest()[:24]}"
        self._known: _Index | None = None
        self._looked: tuple[float, str] = (float("-inf"), "")
        # The grouped rows of a version.
        self._opened: tuple[str, list[pa.ipc.RecordBatchFileReader]] = ("", [])
        self._cursor: _Cursor | None = None
        self._lock = threading.RLock()

    @property
    def url(self) -> str:
        return self._files.url

    def __iter__(self) -> Iterator[Partition]:
        """Yield the partitions; read the table unless these versions of its files are known."""
        index = self._index()
        suffix = self._selection.version_suffix
        for group in index.groups:
            version = f"{group.digest}{suffix}"
            yield Partition(
                key=group.key or NO_KEY_NAME,
                source_version=version,
                read=partial(self._read if group.key != NO_KEY else self._refuse, index, group),
                current_source_version=partial(self._current_version, index, version),
                rows=group.rows,
                text_bytes=group.value_bytes,
                page_bytes=_READ_BYTES,
            )

    def close(self) -> None:
        """Remove the grouped rows; a later reading groups the table again."""
        with self._lock:
            self._opened = ("", [])
            self._cursor = None
            if self._known is not None:
                # A part that is left behind cannot be opened, and is grouped again.
                shutil.rmtree(self._folder(self._known.version), ignore_errors=True)

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
        return f"unknown, since files of the table changed ({now})" if now else None

    def _folder(self, version: str) -> Path:
        return disk_cache.place(f"{self._name}/rows/{version}")

    @property
    def _lock_path(self) -> Path:
        return disk_cache.place(f"{self._name}/rows.lock")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads and processes from grouping this table."""
        path = self._lock_path
        with self._lock, _write_errors(path.parent):
            disk_cache.make_folder(path.parent)
            with FileLock(path):
                yield

    def _index(self) -> _Index:
        with self._lock:
            files, version = self._listed()
            if not files:
                raise ConfigError(
                    f"the table {self.url!r} has no file that ends in {ENDINGS_IN_WORDS}. Give the "
                    "path of one, of a folder, or a pattern such as 'tables/*.parquet'."
                )
            if self._known is None or self._known.version != version:
                self._known = self._cached(version) or self._made(files, version)
            return self._known

    def _cached(self, version: str) -> _Index | None:
        document = disk_cache.read_json(f"{self._name}/index.json")
        try:
            if document is None or document["version"] != version:
                return None
            groups = [Group(*values) for values in document["groups"]]
            return _Index(version, groups, document["files"], document["file_rows"])
        except (KeyError, TypeError):  # damaged
            return None

    def _made(self, files: Sequence[SourceFile], version: str) -> _Index:
        """Read the table, and cache its index."""
        with self._alone():
            if (index := self._cached(version)) is not None:  # another process was first
                return index
            # Rows of earlier versions.
            shutil.rmtree(self._folder(version).parent, ignore_errors=True)
            rows = TableRows(files, self._partition_by, self._selection)
            groups = groups_in_order(rows.blocks())
            if groups is None:
                groups = self._group(rows, version)
                # A table in order is read as it stands.
                groups.sort(key=lambda group: encode_key(group.key or NO_KEY_NAME))
            if self._listed()[1] != version:
                raise TransientError(
                    f"the files of the table {self.url!r} changed while they were read. Run again."
                )
            index = _Index(version, groups, [file.shown for file in files], rows.file_rows)
            document = {"groups": groups, "files": index.files, "file_rows": rows.file_rows}
            disk_cache.write_json(f"{self._name}/index.json", {"version": version, **document})
            return index

    def _group(self, rows: TableRows, version: str) -> list[Group]:
        folder = self._folder(version)
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        groups = grouped(rows.blocks(), unfinished)
        unfinished.rename(folder)
        self._open(version, groups)
        return groups

    def _open(self, version: str, groups: Sequence[Group]) -> None:
        files = range(1 + max(group.file for group in groups))
        folder = self._folder(version)
        self._opened = (version, [open_groups(folder, file) for file in files])

    def _grouped_rows(self, index: _Index) -> list[pa.ipc.RecordBatchFileReader]:
        """Return the files with the grouped rows; make them again if they were removed."""
        with self._lock:
            if self._opened[0] != index.version:
                with self._alone():
                    try:
                        self._open(index.version, index.groups)
                    except (*UNREADABLE, ValueError):  # all or some of them are missing
                        shutil.rmtree(self._folder(index.version), ignore_errors=True)
                        self._group(self._rows(index), index.version)
            return self._opened[1]

    def _rows(self, index: _Index) -> TableRows:
        files, version = self._listed()
        if version != index.version:
            raise TransientError(
                f"the files of the table {self.url!r} changed after they were listed. Run again."
            )
        return TableRows(files, self._partition_by, self._selection)

    def _read(self, index: _Index, group: Group) -> Iterator[RowBatch]:
        def place(first: int, table_row: Callable[[int], int], row: int) -> str:
            return index.shown(table_row(row - first))

        digest = ContentDigest()
        first = 0
        read_rows = self._in_order if group.file < 0 else self._in_folder
        with contextlib.closing(read_rows(index, group)) as read:
            for columns, table_row in read:
                digest.update_raw(columns)
                shown = partial(place, first, table_row)
                try:
                    yield from self._selection.row_batches(group.key, columns, first, shown)
                except DataError:
                    for rest, _ in read:
                        digest.update_raw(rest)
                    # A row of the table is refused, and not a damaged copy of it.
                    self._require(group, digest)
                    raise
                first += len(columns)
        self._require(group, digest)

    def _require(self, group: Group, digest: ContentDigest) -> None:
        if digest.hexdigest() != group.digest:
            self.close()  # what is damaged is made again
            self._known = None
            disk_cache.write_json(f"{self._name}/index.json", {"version": ""})
            raise TransientError(
                f"partition {group.key!r}: its rows are not those that were listed. The table "
                f"{self.url!r} changed while it was read; run again.",
                group.key,
            )

    def _in_folder(self, index: _Index, group: Group) -> Generator[_Rows]:
        try:
            reader = self._grouped_rows(index)[group.file]
            for place in range(group.first_batch, group.first_batch + group.batches):
                columns, rows = rows_of(reader.get_batch(place))
                yield columns.select(self._selection.columns), partial(_table_row, rows)
        except (*UNREADABLE, KeyError, ValueError) as error:
            self.close()  # what is damaged is made again
            raise TransientError(
                f"partition {group.key!r}: the grouped rows of the table {self.url!r} cannot be "
                f"read ({error}). Run again.",
                group.key,
            ) from error

    def _in_order(self, index: _Index, group: Group) -> Generator[_Rows]:
        # Partitions that are read one after the other share a cursor.
        with self._lock:
            cursor = self._cursor
            self._cursor = None
        if cursor is None or cursor.index is not index or cursor.row > group.first_row:
            cursor = _Cursor(index, self._rows(index), group.first_row)
        # After a part was read, the next partition goes on here too.
        with contextlib.suppress(GeneratorExit):
            for first_row, columns in cursor.read(group.first_row, group.first_row + group.rows):
                yield columns, partial(operator.add, first_row)
        with self._lock:
            self._cursor = cursor

    def _refuse(self, index: _Index, group: Group) -> Iterator[RowBatch]:
        raise without_key(NO_KEY_NAME, group.rows, self._partition_by, index.shown(group.first_row))


@contextlib.contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the rows of the table cannot be grouped in {str(folder)!r}: "
            f"{error.strerror or error}. Set SURGE_CACHE_DIR to a folder on a disk with as much "
            "room as the columns that are read."
        ) from error


def _table_row(rows: pa.Array, row: int) -> int:
    return rows[row].as_py()


class _Cursor:
    """Reads a table whose equal keys stand together, forwards."""

    def __init__(self, index: _Index, rows: TableRows, row: int) -> None:
        self.index = index
        first_file = index.file_of(row)
        self.row = sum(index.file_rows[:first_file])  # the next one that is read
        self._batches = rows.columns(first_file)
        self._held: pa.RecordBatch | None = None

    def read(self, start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield rows start..stop of the table, each batch with its first row."""
        while self.row < stop:
            held = self._held if self._held is not None else next(self._batches, None)
            if held is None:
                return  # the digest finds that rows are missing
            begin = min(len(held), max(0, start - self.row))
            end = min(len(held), stop - self.row)
            self._held = held.slice(end) if end < len(held) else None
            first = self.row + begin
            self.row += end
            if end > begin:
                yield first, held.slice(begin, end - begin)
