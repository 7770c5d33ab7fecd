"""A catalog whose partitions are told apart by the names of folders and files, on a disk or in a
bucket.

Everything is listed in one go. What Parquet files declare about themselves (rows, key, version) is
read from their ends, once for each version of a file; for a bucket it is kept on the local disk.
What is wrong with one partition is its own error, raised when it is read, so that it hides no other
one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NoReturn

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError, StoreUnavailable, TransientError
from surge_dagster.engine.sources.ahead import AHEAD_BYTES, FilesAhead
from surge_dagster.engine.sources.footers import End, SourceFooters
from surge_dagster.engine.sources.formats import batches
from surge_dagster.engine.sources.layouts import FileGroup, grouped
from surge_dagster.engine.sources.listing import (
    FIRST_BYTES,
    UNREADABLE_FOLDER,
    SourceFile,
    SourceFiles,
)
from surge_dagster.engine.sources.parquet_files import Footer, row_group_rows
from surge_dagster.engine.sources.partition import (
    KEY_METADATA,
    UNREADABLE_VERSION,
    Partition,
    Place,
    RowBatch,
    within,
)
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.engine.support.unreadable import not_given

# Beside the pages: of an open object its end, the piece that is read and two that are requested,
# and the files that are opened ahead.
_BUCKET_BYTES = 4 * FIRST_BYTES + AHEAD_BYTES
_BLOCKS_BYTES = 48 * 1024 * 1024  # of a file without a footer: the blocks that its reader holds


class FolderCatalog:
    """Partitions in folders named by columns, in files named by a pattern, or one file each, as a
    `Source`."""

    def __init__(self, files: SourceFiles, selection: Selection) -> None:
        self._files = files
        self.selection = selection
        self._footers = SourceFooters(files)

    @property
    def url(self) -> str:
        return self._files.url

    def __iter__(self) -> Iterator[Partition]:
        listed = self._files.list()
        self._require_partitions(listed)
        groups = grouped(listed, self._files.pattern, self.url)
        files = [file for group in groups for file in group.files]
        ahead = FilesAhead(files) if self._files.is_remote else None
        with contextlib.closing(self._footers.each(files, is_whole=True)) as each:
            for group in groups:
                ends = {file.relative: next(each) for file in group.files}
                if group.hashed is not None:
                    declared = {
                        end.key if isinstance(end, Footer) else None for end in ends.values()
                    }
                    group.key = (declared.pop() if len(declared) == 1 else None) or group.hashed
                yield self._partition(group, ends, ahead)

    def _require_partitions(self, listed: Sequence[SourceFile]) -> None:
        if not listed:
            raise ConfigError(
                f"the source {self.url!r} is empty: expected files whose names end in .parquet, .arrow, .csv or "
                ".jsonl, in folders named by a column (category=shoes) or one per partition; found none."
            )
        own_name = self.url.rstrip("/").rpartition("/")[2]
        if self._files.pattern is None and [file.relative for file in listed] == [own_name]:
            raise ConfigError(
                f"the source {self.url!r} is one file: name with partition_by which of its columns divides it "
                f"into partitions: `surge-dagster embed {self.url} OUTPUT --partition-by COLUMN`."
            )

    def _partition(
        self, group: FileGroup, ends: dict[str, End], ahead: FilesAhead | None
    ) -> Partition:
        current = partial(self._current_version, group)
        for file in group.files:
            if (
                isinstance(end := ends[file.relative], OSError | TransientError)
                or file.token == UNREADABLE_FOLDER
            ):
                return Partition(
                    group.key, UNREADABLE_VERSION, partial(_raise, group.key, file, end), current
                )
        footers = [end for end in ends.values() if isinstance(end, Footer)]
        is_counted = len(footers) == len(group.files)
        are_places_known = is_counted and self.selection.missing_text != "skip"
        pages = [footer.group_bytes for footer in footers]
        pages += [
            min(8 * file.size, _BLOCKS_BYTES)
            for file in group.files
            if not isinstance(ends[file.relative], Footer)
        ]
        text_bytes = (
            sum(footer.row_bytes for footer in footers)
            if is_counted
            else sum(f.size for f in group.files)
        )
        return Partition(
            key=group.key,
            source_version=self._version(group.files, ends),
            read=partial(self._read, group, ends, ahead),
            current_source_version=current,
            rows=sum(footer.rows for footer in footers) if is_counted else None,
            text_bytes=text_bytes,
            page_bytes=max(pages) + (_BUCKET_BYTES if self._files.is_remote else 0),
            read_range=partial(self._read, group, ends, None) if are_places_known else None,
            borders=partial(self._borders, group.files, footers) if is_counted else tuple,
        )

    def _borders(self, files: Sequence[SourceFile], footers: Sequence[Footer]) -> list[int]:
        """Where row groups begin and end; of a file that is not given now, where it does."""
        sizes = [0]
        for rows, footer in zip(self._files.ends(files, row_group_rows), footers, strict=True):
            sizes += [footer.rows] if isinstance(rows, Exception) else rows
        return list(accumulate(sizes))

    def _version(self, files: Sequence[SourceFile], ends: dict[str, End]) -> str:
        declared = [
            end.version if isinstance(end := ends[file.relative], Footer) else None
            for file in files
        ]
        version = declared[0] or files[0].token
        if len(files) > 1:
            tokens = zip(files, declared, strict=True)
            lines = "".join(
                f"{file.relative}\0{version or file.token}\n" for file, version in tokens
            )
            version = hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return version + self.selection.version_suffix

    def _current_version(self, group: FileGroup) -> str | None:
        try:
            names = {file.relative for file in group.files}
            files = [file for scope in group.scopes for file in self._files.list(*scope)]
            if self._files.pattern is not None:
                files = [
                    file for file in files if file.relative in names or self._is_of(group, file)
                ]
            if not files:
                return None
            ends = {
                file.relative: end
                for file, end in zip(files, self._footers.each(files), strict=True)
            }
        except (ConfigError, TransientError) as error:
            raise TransientError(f"partition {group.key!r}: {error}", group.key) from error
        for file in files:
            if (
                isinstance(end := ends[file.relative], OSError | TransientError)
                or file.token == UNREADABLE_FOLDER
            ):
                _raise(group.key, file, end)
        return self._version(files, ends)

    def _is_of(self, group: FileGroup, file: SourceFile) -> bool:
        """Whether a file that is new matches the pattern with the values of this partition."""
        [own] = grouped([file], self._files.pattern, self.url)
        return (own.hashed or own.key) == (group.hashed or group.key)

    def _read(
        self,
        group: FileGroup,
        ends: dict[str, End],
        ahead: FilesAhead | None,
        start: int = 0,
        stop: int | None = None,
    ) -> Iterator[RowBatch]:
        """All rows, or of Parquet files those from one to before another."""
        key = group.key
        if group.refusal is not None:
            raise DataError(key, *group.refusal)
        for file in group.files:
            _require_own(key, group, file, ends[file.relative])
        footers = {name: end for name, end in ends.items() if isinstance(end, Footer)}
        read = (
            ((file, 0, None) for file in group.files)
            if stop is None
            else within(group.files, start, stop, lambda file: footers[file.relative].rows)
        )
        first_row = start
        id_type: pa.DataType | None = None
        for file, begin, end in read:
            opened = file if ahead is None else replace(file, open=partial(ahead.open, file))
            of_file = f" of {file.shown}" if len(group.files) > 1 else ""
            place = partial(
                lambda first, of, row: f"row {row - first:,}{of}", first_row - begin, of_file
            )
            for batch in self._batches(
                key, opened, first_row, place, None if end is None else (begin, end)
            ):
                if id_type is not None and batch.ids.type != id_type:
                    first = group.files[0].shown
                    raise DataError(
                        key,
                        f"ids are {id_type} in {first} but {batch.ids.type} in {file.shown}",
                        "Use one type.",
                    )
                id_type = batch.ids.type
                first_row += len(batch) + batch.skipped
                yield batch

    def _batches(
        self, key: str, file: SourceFile, first_row: int, place: Place, rows: tuple[int, int] | None
    ) -> Iterator[RowBatch]:
        try:
            read = batches(
                file, self.selection.columns, key=key, encoding=self.selection.encoding, rows=rows
            )
            yield from self.selection.rows(key, read, first_row, place)
        except TransientError as error:
            if error.key is not None or isinstance(error, StoreUnavailable):
                raise
            raise TransientError(f"partition {key!r}: {error}", key) from error


def _require_own(key: str, group: FileGroup, file: SourceFile, end: End) -> None:
    """Raise `DataError` for a file that is refused or belongs to another partition."""
    if file.refusal:
        remedy = "Replace it by a regular folder or file, rename it, or remove it from the source."
        raise DataError(key, f"{file.shown} {file.refusal}", remedy)
    declared = end.key if isinstance(end, Footer) else None
    if group.hashed is not None and declared is None:
        raise DataError(
            key,
            f"{group.hashed} is the hash of a key and {file.shown} does not declare the key",
            f"Write the key into the file's metadata as {KEY_METADATA.decode()}.",
        )
    hashed = None if group.hashed is None or declared is None else encode_key(declared)
    if declared not in (None, key) or hashed != group.hashed:
        raise DataError(
            key,
            f"{file.shown} declares that it belongs to partition {declared!r}",
            "Move it to its own folder.",
        )


def _raise(key: str, file: SourceFile, end: End) -> NoReturn:
    if isinstance(end, TransientError):
        raise TransientError(f"partition {key!r}: {end}", key) from end
    error = end
    if not isinstance(error, OSError):
        try:
            file.open()
        except OSError as unreadable:
            error = unreadable
    raise not_given(
        file.shown, error if isinstance(error, OSError) else OSError(errno.EIO, ""), key
    )
