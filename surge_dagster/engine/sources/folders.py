"""A catalog whose partitions are named by folders and files, on a disk or in a bucket.

Everything is listed at once. What Parquet files declare about themselves (rows, key, version) is
read from their ends, once for each version of a file, and remembered by the process. What is
wrong with one partition is raised when that partition is read, so that the others are not affected.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError, StoreUnavailable, TransientError
from surge_dagster.engine.sources.ahead import AHEAD_BYTES, FilesAhead
from surge_dagster.engine.sources.bad_rows import REASON, FirstIds
from surge_dagster.engine.sources.casting import is_typeless
from surge_dagster.engine.sources.checked_rows import checked_rows
from surge_dagster.engine.sources.file_read import SourceFile
from surge_dagster.engine.sources.formats import ENDINGS_IN_WORDS, PARQUET_ENDINGS, batches
from surge_dagster.engine.sources.layouts import FileGroup, grouped
from surge_dagster.engine.sources.listing import FIRST_BYTES, SourceFiles, open_files
from surge_dagster.engine.sources.parquet_files import Footer
from surge_dagster.engine.sources.partition import (
    KEY_METADATA,
    Partition,
    RowBatch,
    row_in_words,
    within,
)
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.support.footer_memory import FooterMemory, Tag
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.engine.support.unreadable import is_systems

# In addition to pages: of an open object its end and the piece that is read, and the files that
# are opened ahead.
_BUCKET_BYTES = 2 * FIRST_BYTES + AHEAD_BYTES
_BLOCKS_BYTES = 48 * 1024 * 1024  # of a file without a footer: the blocks that its reader holds
# Time in which a folder with files of several partitions is not listed again for new files, because
# thousands are published one by one. Known files are looked up each time, so that of two writers
# the one with the newer source wins.
_LOOKED_SECONDS = 10.0
_Ends = dict[str, Footer | None]  # by a file's relative name; None for one without


class FolderCatalog:
    """Partitions in folders named by columns, in files named by a pattern, or one file each."""

    def __init__(
        self,
        files: SourceFiles,
        selection: Selection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self.selection = selection
        self._memory: FooterMemory[Footer | None] = FooterMemory(f"source\0{files.identity}")
        self._clock = clock
        self._looked = float("-inf")
        self._found: dict[str, list[SourceFile]] = {}  # then, by key, if a folder mixes them
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._files.url

    def __iter__(self) -> Iterator[Partition]:
        listed = self._files.list()
        self._require_partitions(listed)
        groups = grouped(listed, self._files.pattern, self.url)
        files = [file for group in groups for file in group.files]
        ahead = None
        if self._files.is_remote:
            ahead = FilesAhead(files)
        with contextlib.closing(self._footers(files, is_whole=True)) as each:
            for group in groups:
                ends = {file.relative: next(each) for file in group.files}
                if group.hashed is not None:
                    group.key = _declared_key(ends) or group.hashed
                yield self._partition(group, ends, ahead)

    def _require_partitions(self, listed: Sequence[SourceFile]) -> None:
        if not listed:
            raise ConfigError(
                f"the source {self.url!r} is empty. Expected files that end in {ENDINGS_IN_WORDS}, "
                "in folders named by a column (category=shoes) or one per partition."
            )
        own_name = self.url.rstrip("/").rpartition("/")[2]
        if self._files.pattern is None and [file.relative for file in listed] == [own_name]:
            raise ConfigError(
                f"the source {self.url!r} is one file. Name the column that divides it into "
                f"partitions: `surge-dagster embed {self.url} OUTPUT --partition-by COLUMN`."
            )

    def _partition(self, group: FileGroup, ends: _Ends, ahead: FilesAhead | None) -> Partition:
        footers = [end for end in ends.values() if end is not None]
        others = [file for file in group.files if ends[file.relative] is None]
        pages = [footer.group_bytes for footer in footers]
        pages += [min(8 * file.size, _BLOCKS_BYTES) for file in others]
        page_bytes = max(pages)
        if self._files.is_remote:
            page_bytes += _BUCKET_BYTES
        rows = None
        text_bytes = sum(file.size for file in group.files)
        read_range = None
        selection = self.selection
        if not others:
            rows = sum(footer.rows for footer in footers)
            text_bytes = sum(footer.row_bytes for footer in footers)
            if selection.missing_text != "skip" and selection.bad_rows == "refuse":
                read_range = partial(self._read, group, ends, None)
        return Partition(
            key=group.key,
            source_version=self._version(group.files, ends),
            read=partial(self._read, group, ends, ahead),
            current_source_version=partial(self._current_version, group),
            rows=rows,
            text_bytes=text_bytes,
            page_bytes=page_bytes,
            id_bytes=selection.id_bytes,
            read_range=read_range,
        )

    def _footers(
        self, files: Sequence[SourceFile], *, is_whole: bool = False
    ) -> Generator[Footer | None]:
        """Yield the footers of listed files in their order, None for files that have none; a
        bucket's are read ahead.

        Args:
            is_whole: whether these are all files of the place; others are then forgotten.
        """
        tags: dict[str, Tag] = {}
        for file in files:
            if not file.refusal and file.relative.lower().endswith(PARQUET_ENDINGS):
                tags[file.relative] = file.size, file.token
        known = self._memory.known(tags)
        # Decided once: another listing of the same place may remember more files during this one.
        unread = [file for file in files if file.relative in tags and file.relative not in known]
        try:
            with contextlib.closing(self._files.footers(unread)) as read:
                for file in files:
                    name = file.relative
                    if name not in tags:
                        yield None
                    elif name in known:
                        yield known[name]
                    else:
                        yield self._remembered(name, tags[name], next(read))
        finally:
            if is_whole:
                self._memory.forget_others({file.relative for file in files})

    def _remembered(self, name: str, tag: Tag, end: Footer | Exception) -> Footer | None:
        """Return the footer; None for a damaged file, and for one that the storage did not give,
        which reading it reports."""
        if isinstance(end, Footer):
            self._memory.remember(name, tag, end)
            return end
        if not isinstance(end, TransientError) and not is_systems(end):
            self._memory.remember(name, tag, None)
        return None

    def _version(self, files: Sequence[SourceFile], ends: _Ends) -> str:
        versions: list[str] = []
        for file in files:
            end = ends[file.relative]
            versions.append((end and end.version) or file.token)
        version = versions[0]
        if len(files) > 1:
            named = zip(files, versions, strict=True)
            lines = "".join(f"{file.relative}\0{each}\n" for file, each in named)
            version = hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return version + self.selection.version_suffix

    def _current_version(self, group: FileGroup) -> str | None:
        with _of_partition(group.key):
            files = self._current_files(group)
            footers = zip(files, self._footers(files), strict=True)
            ends = {file.relative: end for file, end in footers}
        if not files:
            return None
        return self._version(files, ends)

    def _current_files(self, group: FileGroup) -> list[SourceFile]:
        pattern = self._files.pattern
        if pattern is None or not pattern.mixes_partitions:
            return [file for scope, _ in group.scopes for file in self._files.list(scope)]
        known = {file.relative for file in group.files}
        files = [file for name in known for file in self._files.list(name)]
        files += [file for file in self._found_lately(group) if file.relative not in known]
        return sorted(files, key=lambda file: os.fsencode(file.relative))

    def _found_lately(self, group: FileGroup) -> Sequence[SourceFile]:
        with self._lock:
            if self._clock() - self._looked > _LOOKED_SECONDS:
                groups = grouped(self._files.list(), self._files.pattern, self.url)
                self._found = {each.hashed or each.key: each.files for each in groups}
                self._looked = self._clock()
            return self._found.get(group.hashed or group.key, [])

    def _read(
        self,
        group: FileGroup,
        ends: _Ends,
        ahead: FilesAhead | None,
        start: int = 0,
        stop: int | None = None,
    ) -> Iterator[RowBatch]:
        """Yield all rows, or of Parquet files those from `start` to before `stop`."""
        key = group.key
        if group.refusal is not None:
            raise DataError(key, *group.refusal)
        for file in group.files:
            _require_own(key, group, file, ends[file.relative])

        first_row = start
        first_ids = FirstIds()
        stated = cache(partial(self._stated_types, group))
        empty: pa.RecordBatch | None = None
        for file, rows in _parts(group.files, ends, start, stop):
            opened = file
            if ahead is not None:
                opened = replace(file, open=partial(ahead.open, file))
            begin = 0 if rows is None else rows[0]
            place = partial(_row_of_file, group, file, first_row - begin)
            with _of_partition(key):
                for columns in _typed(self._raw(key, opened, rows), stated):
                    if not len(columns):
                        empty = columns
                        continue
                    yield from checked_rows(
                        self.selection, key, [columns], first_row, place, first_ids
                    )
                    first_row += len(columns)
        if first_row == start and empty is not None:
            yield from checked_rows(self.selection, key, [empty])  # for the types of its columns

    def _raw(
        self, key: str, file: SourceFile, rows: tuple[int, int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        selection = self.selection
        return batches(
            file,
            selection.columns,
            key=key,
            encoding=selection.encoding,
            escape=selection.escape,
            rows=rows,
            sets_aside=selection.bad_rows == "set_aside",
        )

    def _stated_types(self, group: FileGroup) -> dict[str, pa.DataType]:
        """Return the first type that a file of the partition gives to each column."""
        types: dict[str, pa.DataType] = {}
        for file in group.files:
            if len(types) == len(self.selection.columns):
                break
            first = next((batch for batch in self._raw(group.key, file) if len(batch)), None)
            for field in () if first is None else first.schema:
                if field.name != REASON and not is_typeless(field.type):
                    types.setdefault(field.name, field.type)
        return types


def open_folders(
    url: str | Path,
    selection: Selection | None = None,
    storage_options: StorageOptions | None = None,
) -> FolderCatalog:
    """Open a catalog whose folders or files are its partitions."""
    return FolderCatalog(open_files(url, storage_options), selection or Selection())


def _typed(
    raw: Iterator[pa.RecordBatch], stated: Callable[[], dict[str, pa.DataType]]
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a file; columns without values get the type that another file of the
    partition states."""
    for batch in raw:
        for place, field in enumerate(batch.schema):
            if is_typeless(field.type) and field.name in (types := stated()):
                kind = types[field.name]
                column = batch.column(place).cast(kind)
                batch = batch.set_column(place, pa.field(field.name, kind), column)
        yield batch


@contextlib.contextmanager
def _of_partition(key: str) -> Iterator[None]:
    """Turn errors of the storage into those of a partition."""
    try:
        yield
    except StoreUnavailable:
        raise
    except (ConfigError, TransientError) as error:
        if isinstance(error, TransientError) and error.key is not None:
            raise
        raise TransientError(f"partition {key!r}: {error}", key) from error


def _parts(
    files: Sequence[SourceFile], ends: _Ends, start: int, stop: int | None
) -> Iterator[tuple[SourceFile, tuple[int, int] | None]]:
    """Yield the files to read, with the range of rows if not all are wanted."""

    def rows_of(file: SourceFile) -> int:
        footer = ends[file.relative]
        assert footer is not None  # only such partitions offer ranges
        return footer.rows

    if stop is None:
        for file in files:
            yield file, None
        return
    for file, begin, end in within(files, start, stop, rows_of):
        yield file, (begin, end)


def _row_of_file(group: FileGroup, file: SourceFile, first_row: int, row: int) -> str:
    shown = row_in_words(row - first_row)
    if len(group.files) > 1:
        shown += f" of {file.shown}"
    return shown


def _declared_key(ends: _Ends) -> str | None:
    """Return the key that all files declare."""
    keys = {end and end.key for end in ends.values()}
    return keys.pop() if len(keys) == 1 else None


def _require_own(key: str, group: FileGroup, file: SourceFile, end: Footer | None) -> None:
    """Raise `DataError` for a file that is refused or belongs to another partition."""
    if file.refusal:
        remedy = "Replace it by a regular folder or file, rename it, or remove it from the source."
        raise DataError(key, f"{file.shown} {file.refusal}", remedy)
    declared = end and end.key
    if declared is None:
        if group.hashed is None:
            return
        raise DataError(
            key,
            f"{group.hashed} is the hash of a key and {file.shown} does not declare the key",
            f"Write the key into the file's metadata as {KEY_METADATA.decode()}.",
        )
    is_named_so = group.hashed is None or encode_key(declared) == group.hashed
    if declared != key or not is_named_so:
        reason = f"{file.shown} declares that it belongs to partition {declared!r}"
        raise DataError(key, reason, "Move it to its own folder.")
