"""A table of one or many files, whose rows stand in any order: each key of its columns is a
partition.

The first listing of a table reads it once, and groups its rows in a folder where equal keys do not
stand together. What was found is kept in the cache, so that later listings of the same files, in
this process or another one, read nothing. The version of a partition is the digest of its rows, and
so is what is compared when it is read: rows that came from a file that has changed, or from a
damaged folder, are never published.

The folder lies in the cache, because processes share it and other users must not read it. One
process makes it while the others wait for its lock, and `TableSource.close` removes it: a process
that has its files open reads on, one that comes later groups the table again. What a crash left is
removed by the next that groups the table.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
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

# in which the files are not listed again: thousands of partitions are published one by one
_LOOKED_SECONDS = 1.0
# columns, and what says which row of the table each of them is
_Rows = tuple[pa.RecordBatch, Callable[[int], int]]
_READ_BYTES = 8 * 1024 * 1024  # that reading a partition may take beside its rows


@dataclass(frozen=True, slots=True)
class _Index:
    """What is known of one version of a table."""

    version: str
    groups: Sequence[Group]
    files: Sequence[str]
    file_rows: Sequence[int]

    def file_of(self, row: int) -> int:
        """The place of the file that has a row of the table."""
        return bisect_right(list(accumulate(self.file_rows)), row)

    def shown(self, row: int) -> str:
        """A row of the table, for messages."""
        place = self.file_of(row)
        return f"row {row - sum(self.file_rows[:place]):,} of {self.files[place]}"


class TableSource:
    """A table as a `Source`: a partition per key, in the order of the encoded keys, or as they
    stand in the table."""

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
        described = json.dumps(
            [files.identity, self._partition_by, selection.columns, selection.encoding]
        )
        self._name = (
            f"tables/{hashlib.sha256(described.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}"
        )
        self._known: _Index | None = None
        self._looked: tuple[float, str] = (float("-inf"), "")
        # the grouped rows of a version
        self._opened: tuple[str, list[pa.ipc.RecordBatchFileReader]] = ("", [])
        self._cursor: _Cursor | None = None
        self._lock = threading.RLock()

    @property
    def url(self) -> str:
        return self._files.url

    def __iter__(self) -> Iterator[Partition]:
        """Yield the partitions; reads the table where these versions of its files were not read
        before."""
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
        with self._lock, contextlib.suppress(OSError):
            self._opened, self._cursor = ("", []), None
            if self._known is not None and (folder := self._folder(self._known.version)).exists():
                # whoever holds it makes the rows of a newer version
                with FileLock(self._lock_path, timeout=0):
                    unfinished = folder.with_suffix(".unfinished")
                    shutil.rmtree(unfinished, ignore_errors=True)
                    # a process that is killed meanwhile leaves no folder with a part of them
                    folder.rename(unfinished)
                    shutil.rmtree(unfinished)

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
        if not now:
            return None
        return (
            version
            if now == index.version
            else f"unknown, since files of the table changed ({now})"
        )

    def _folder(self, version: str) -> Path:
        return disk_cache.place(f"{self._name}/rows/{version}")

    @property
    def _lock_path(self) -> Path:
        return disk_cache.place(f"{self._name}/rows.lock")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread or process makes or removes grouped rows of this table in here."""
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
                    f"the table {self.url!r} has no file: expected .parquet, .arrow, .csv or .jsonl, the last two also "
                    "with .gz or .zst. Give the path of one, of a folder, or a pattern such as 'tables/*.parquet'."
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
        """Read the table, and cache what is known of it."""
        with self._alone():
            if (index := self._cached(version)) is not None:  # another process was first
                return index
            # rows of earlier versions
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
        self._opened = version, [open_groups(self._folder(version), file) for file in files]

    def _grouped_rows(self, index: _Index) -> list[pa.ipc.RecordBatchFileReader]:
        """The files with the grouped rows, which are made again where they were removed."""
        with self._lock:
            if self._opened[0] != index.version:
                with self._alone():
                    try:
                        self._open(index.version, index.groups)
                    except (*UNREADABLE, ValueError):  # there are none, or a part of them
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
        digest, row = ContentDigest(), 0
        with contextlib.closing(
            self._in_order(index, group) if group.file < 0 else self._in_folder(index, group)
        ) as read:
            for columns, table_row in read:
                digest.update_raw(columns)
                try:
                    yield from self._selection.row_batches(
                        group.key,
                        columns,
                        row,
                        lambda row, *, first=row, of=table_row: index.shown(of(row - first)),
                    )
                except DataError:
                    for rest, _ in read:
                        digest.update_raw(rest)
                    # what is refused is a row of the table, and no damage of a copy
                    self._require(group, digest)
                    raise
                row += len(columns)
        self._require(group, digest)

    def _require(self, group: Group, digest: ContentDigest) -> None:
        if digest.hexdigest() != group.digest:
            self.close()  # what is damaged is made again
            self._known = None
            disk_cache.write_json(f"{self._name}/index.json", {"version": ""})
            raise TransientError(
                f"partition {group.key!r}: its rows are not those that were listed. The table {self.url!r} changed "
                "while it was read; run again.",
                group.key,
            )

    def _in_folder(self, index: _Index, group: Group) -> Generator[_Rows]:
        try:
            reader = self._grouped_rows(index)[group.file]
            for place in range(group.first_batch, group.first_batch + group.batches):
                columns, rows = rows_of(reader.get_batch(place))
                yield (
                    columns.select(self._selection.columns),
                    lambda row, rows=rows: rows[row].as_py(),
                )
        except (*UNREADABLE, KeyError, ValueError) as error:
            self.close()  # what is damaged is made again
            raise TransientError(
                f"partition {group.key!r}: the grouped rows of the table {self.url!r} cannot be read ({error}). "
                "Run again.",
                group.key,
            ) from error

    def _in_order(self, index: _Index, group: Group) -> Generator[_Rows]:
        # a partition that is read after the one before it goes on where that one ended
        with self._lock:
            cursor, self._cursor = self._cursor, None
        if cursor is None or cursor.index is not index or cursor.row > group.first_row:
            cursor = _Cursor(index, self._rows(index), group.first_row)
        # the next partition goes on here, where a part was read
        with contextlib.suppress(GeneratorExit):
            for first_row, columns in cursor.read(group.first_row, group.first_row + group.rows):
                yield columns, lambda row, first=first_row: first + row
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
            f"the rows of the table cannot be grouped in {str(folder)!r}: {error.strerror or error}. It needs as much "
            "room as the columns that are read; set SURGE_CACHE_DIR to a folder on a disk that has it."
        ) from error


class _Cursor:
    """Reads a table whose equal keys stand together, forwards."""

    def __init__(self, index: _Index, rows: TableRows, row: int) -> None:
        self.index = index
        first_file = index.file_of(row)
        self.row = sum(index.file_rows[:first_file])  # the next one that is read
        self._batches = rows.columns(first_file)
        self._held: pa.RecordBatch | None = None

    def read(self, start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Rows start..stop of the table, each batch with the row that it begins with."""
        while self.row < stop:
            held = self._held if self._held is not None else next(self._batches, None)
            if held is None:
                return  # the digest finds that rows are missing
            begin = min(len(held), max(0, start - self.row))
            end = min(len(held), stop - self.row)
            self._held = held.slice(end) if end < len(held) else None
            first, self.row = self.row + begin, self.row + end
            if end > begin:
                yield first, held.slice(begin, end - begin)
