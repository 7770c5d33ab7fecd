"""A catalog on disk: a folder of hive-style partition folders, each with one or more Parquet files.

Partitions come in bytewise order of their folder names and the files of one partition in bytewise order of their
relative paths, so that the same folder always gives the same rows in the same order. A listing reads footers only.
What is wrong with one folder becomes that partition's own error, raised when it is read, so that it never hides other
partitions. The same holds for a disk or mount that does not give a folder or file; that error is transient.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.sources.parquet_files import (
    OTHER_FORMAT,
    PartitionFile,
    partition_files,
    read_columns,
    source_version,
)
from surge_dagster.engine.sources.partition import KEY_METADATA, UNREADABLE_VERSION, Partition, RowBatch
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support.keys import decode_key, encode_key, is_text, printable
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line, is_systems, not_given

PREFIX = "partition="
_CONVERT = (
    "Write it as Parquet, or name the folders by a column, such as category=…, of which every format is read. A name "
    "that begins with _ is left out."
)
_decoded = lru_cache(maxsize=1 << 16)(decode_key)  # each listing asks for the same names


@dataclass(frozen=True, slots=True)
class _Folder:
    """A partition's folder.

    Attributes:
        files: only where the key had to be read from them: the files, or why they could not be listed.
    """

    name: str
    key: str
    files: list[PartitionFile] | OSError | None = None


class ParquetCatalog:
    """A local catalog folder as a `Source`; iterating lists the folder anew.

    Args:
        root: the folder that holds `partition=…` folders. Names that start with `_` or `.` are ignored.
        selection: the columns that become ids and texts.
    """

    def __init__(self, root: Path, selection: Selection) -> None:
        self.root = root
        self.selection = selection
        self._suffix = selection.version_suffix

    @property
    def url(self) -> str:
        return str(self.root)

    def __iter__(self) -> Iterator[Partition]:
        """Yield every partition; one that cannot be read raises its `DataError` when it is read.

        Raises:
            ConfigError: the folder is unreadable or holds no partition folder.
        """
        by_key: dict[str, list[_Folder]] = {}
        for name in self._folder_names():
            folder = self._folder(name)
            by_key.setdefault(folder.key, []).append(folder)
        for key, folders in by_key.items():
            yield self._partition(key, folders)

    def _folder_names(self) -> list[str]:
        try:
            names = os.listdir(self.root)  # noqa: PTH208, a Path for each folder costs more than listing it
        except OSError as error:
            raise ConfigError(f"cannot list the catalog {self.url!r}: {error.strerror}.") from error
        folders = [name for name in names if name.startswith(PREFIX)]
        if not folders:
            raise ConfigError(
                f"the catalog {self.url!r} is empty: expected folders named partition=<key> with Parquet files in "
                "them, or files of another layout, found none. Write its files, or give another path."
            )
        return sorted(folders, key=None if "".join(folders).isascii() else os.fsencode)

    def _folder(self, name: str) -> _Folder:
        in_name = name.removeprefix(PREFIX)
        try:
            key = _decoded(in_name)
        except ValueError:
            return _Folder(name, printable(in_name or name))  # refused when it is read, under its name on disk
        if key is not None:
            return _Folder(name, key or in_name)
        try:  # the name is the hash of a long key, which the files declare
            files = partition_files(self.url, name)
        except OSError as error:
            return _Folder(name, in_name, error)
        declared = {file.declared_key for file in files}
        key = declared.pop() if len(declared) == 1 else None
        return _Folder(name, key or in_name, files)

    def _partition(self, key: str, folders: Sequence[_Folder]) -> Partition:
        names = [folder.name for folder in folders]
        current = partial(self._current_version, key, names)
        files: list[PartitionFile] = []
        for folder in folders:
            found = folder.files
            try:
                found = partition_files(self.url, folder.name) if found is None else found
            except OSError as error:
                found = error
            if isinstance(found, OSError):
                return Partition(key, UNREADABLE_VERSION, partial(_raise, _not_given(key, folder.name, found)), current)
            files += found
        is_counted = bool(files) and all(file.rows is not None for file in files)
        return Partition(
            key=key,
            source_version=source_version(_tokens(files), self._suffix),
            read=partial(self._read, key, names, files),
            current_source_version=current,
            rows=sum(file.rows or 0 for file in files) if is_counted else None,
            text_bytes=sum(file.text_bytes for file in files) if files else None,
            page_bytes=max((file.page_bytes for file in files), default=0),
        )

    def _current_version(self, key: str, folders: Sequence[str]) -> str | None:
        with _system_errors(key, folders[0]):
            if not any(os.path.lexists(self.root / folder) for folder in folders):
                return None
            files = [file for folder in folders for file in partition_files(self.url, folder)]
            return source_version(_tokens(files), self._suffix)

    def _read(self, key: str, folders: Sequence[str], files: Sequence[PartitionFile]) -> Iterator[RowBatch]:
        if len(folders) > 1:
            named = ", ".join(map(printable, folders))
            raise DataError(key, f"the folders {named} all stand for this key", "Keep one of them.")
        _require_own_key(key, folders[0], files)
        first_row = 0
        id_type: pa.DataType | None = None
        for file in files:
            for batch in self._batches(key, file, first_row):
                if id_type is not None and batch.ids.type != id_type:
                    raise DataError(
                        key,
                        f"ids are {id_type} in {files[0].shown} but {batch.ids.type} in {file.shown}",
                        "Use one type.",
                    )
                id_type = batch.ids.type
                first_row += len(batch) + batch.skipped
                yield batch

    def _batches(self, key: str, file: PartitionFile, first_row: int) -> Iterator[RowBatch]:
        try:
            for raw in read_columns(key, file, self.selection):
                yield from self.selection.row_batches(key, raw, first_row)
                first_row += len(raw)
        except FileNotFoundError as error:
            raise TransientError(
                f"partition {key!r}: {file.shown} was removed while the partition was read. Run again.", key
            ) from error
        except UNREADABLE as error:
            if is_systems(error):
                raise _not_given(key, file.relative, error) from error
            raise DataError(
                key,
                f"{file.shown} cannot be read as Parquet ({first_line(error)})",
                "Write the file again, then run again.",
            ) from error


def _tokens(files: Sequence[PartitionFile]) -> list[tuple[str, str]]:
    return [(file.relative, file.token) for file in files]


def _require_own_key(key: str, folder: str, files: Sequence[PartitionFile]) -> None:
    """Raise `DataError` where a folder has no file, or one that is refused or belongs to another partition."""
    if not files:
        raise DataError(
            key, f"its folder {folder} holds no .parquet file", "Write its rows there, or remove the folder."
        )
    name = folder.removeprefix(PREFIX)
    try:
        in_name = decode_key(name)
    except ValueError as error:
        raise DataError(key, str(error), "Rename the folder: percent-encode the key's UTF-8 bytes.") from error
    for file in files:
        if not is_text(file.relative):
            raise DataError(key, f"the file name {printable(file.relative)} is not UTF-8", "Rename the file.")
        if file.refusal:
            remedy = "Replace it by a regular folder or file, or remove it from the catalog."
            raise DataError(key, f"{file.shown} {file.refusal}", _CONVERT if file.refusal == OTHER_FORMAT else remedy)
        declared = file.declared_key
        if in_name is None and declared is None:
            raise DataError(
                key,
                f"the folder name {folder} is a hash and {file.shown} does not declare the key",
                f"Write the key into the file's metadata as {KEY_METADATA.decode()}.",
            )
        belongs = encode_key(declared) == name if in_name is None and declared else declared in (None, in_name)
        if not belongs:
            raise DataError(
                key,
                f"{file.shown} declares that it belongs to partition {declared!r}, and lies in the folder {folder}",
                "Move it to its own folder.",
            )


def _not_given(key: str, what: str, error: OSError) -> TransientError:
    named = error.filename if isinstance(error.filename, str) else what
    return not_given(printable(named), error, key)


@contextmanager
def _system_errors(key: str, what: str) -> Iterator[None]:
    """Raise a `TransientError` that names the partition where the system does not give its files."""
    try:
        yield
    except OSError as error:
        raise _not_given(key, what, error) from error


def _raise(error: Exception) -> Iterator[RowBatch]:
    raise error
