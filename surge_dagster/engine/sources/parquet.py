"""A catalog on disk: a folder of hive-style partition folders, each with one or more Parquet files.

Partitions come in bytewise order of their folder names and the files of one partition in bytewise order of their
relative paths, so that the same folder always gives the same rows in the same order. Only footers are read to list
the catalog; rows are streamed in batches of about two megabytes, whatever the row groups look like. What is wrong with
one folder becomes that partition's own error, raised when it is read, so that it never hides the others. So does a
disk or mount that does not give a folder or file; that is nobody's data's fault, and worth another try.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from urllib.parse import urlencode

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.sources.footers import Footer, KnownFooters
from surge_dagster.engine.sources.partition import KEY_METADATA, SOURCE_VERSION_METADATA, Partition, RowBatch
from surge_dagster.engine.sources.rows import row_batch, without_dictionary
from surge_dagster.engine.support.keys import decode_key, encode_key, is_hashed, is_text, printable
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line, is_systems, not_given

_PREFIX = "partition="
# What source versions do not name. Were it other columns, the files of every catalog would be stale.
_UNNAMED_COLUMNS = {"id_column": "id", "text_column": "text"}
_NOT_SEEN = "unreadable"  # the source version of what the system did not show when it was listed
_BATCH_BYTES = 2 * 1024 * 1024
_BATCH_ROWS = 8192
_decoded = lru_cache(maxsize=1 << 16)(decode_key)  # the same names, listing after listing
_VERSION_BYTES = 250  # a database keeps versions in an index, which has room for little
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # some databases take no NUL
_READ_ROWS = 256  # at a time from the file: half as fast as thousands, and it bounds what the footer cannot tell


@dataclass(frozen=True, slots=True)
class _File:
    relative: str
    path: str  # neither is text where a name on the disk is not UTF-8
    token: str  # what the file declares as its source version, or its size and mtime
    declared_key: str | None
    rows: int | None
    text_bytes: int  # the file's own size where its footer cannot be read


class ParquetCatalog:
    """A local catalog folder as a `Source`; iterating lists the folder anew.

    Args:
        root: the folder that holds `partition=…` folders. Names that start with `_` or `.` are ignored.
        id_column, text_column: column names; part of the source versions, since others are another content.
        max_text_bytes: a longer text refuses its partition.
    """

    def __init__(self, root: Path, *, id_column: str, text_column: str, max_text_bytes: int) -> None:
        self.root = root
        self.id_column = id_column
        self.text_column = text_column
        self.max_text_bytes = max_text_bytes
        self._columns = _named_columns(id_column=id_column, text_column=text_column)

    @property
    def url(self) -> str:
        return str(self.root)

    def __iter__(self) -> Iterator[Partition]:
        """Yield every partition; one that cannot be read raises its `DataError` when it is read.

        Raises:
            ConfigError: the folder is unreadable or holds no partition folder.
        """
        reading = (self.url, self.id_column, self.text_column, self.max_text_bytes)
        known = KnownFooters(str(self.root.absolute()), reading)
        folders = self._folders()
        made = known.unchanged(self.url, folders)
        for key, alike in self._by_key(folders, known, made).items():
            partition = made.get(alike[0]) if len(alike) == 1 else None
            yield partition or self._partition(key, alike, known)
        known.forget_others()

    def partition(self, key: str) -> Partition | None:
        """The partition of one key, or None when the catalog has none."""
        folders = self._by_key(self._folders()).get(key)
        return self._partition(key, folders) if folders else None

    def _by_key(
        self, folders: list[str], known: KnownFooters | None = None, made: Mapping[str, Partition] | None = None
    ) -> dict[str, tuple[str, ...]]:
        """The folders of each key, in their order.

        Args:
            made: partitions that are known to be as they were, by folder.
        """
        made = made or {}
        by_key: dict[str, tuple[str, ...]] = {}
        for folder in folders:
            key = made[folder].key if folder in made else self._key_of(folder, known)
            by_key[key] = (*by_key[key], folder) if key in by_key else (folder,)
        return by_key

    def _folders(self) -> list[str]:
        # Always listed: one pass over it costs little, and a mounted bucket gives its root a time that never moves.
        try:
            names = os.listdir(self.root)  # noqa: PTH208, a Path for each folder costs more than listing it
        except OSError as error:
            raise ConfigError(f"cannot list the catalog {self.url!r}: {error.strerror}.") from error
        folders = [name for name in names if name.startswith(_PREFIX)]
        if not folders:
            loose = [name for name in names if name.endswith(".parquet") and not name.startswith(("_", "."))]
            found = f"{len(loose)} Parquet file(s) outside such folders" if loose else "none"
            raise ConfigError(
                f"the catalog {self.url!r} is empty: expected folders named partition=<key> with Parquet files "
                f"in them, found {found}. Write one folder per partition, or give another path."
            )
        return sorted(folders, key=None if "".join(folders).isascii() else os.fsencode)

    def _key_of(self, folder: str, known: KnownFooters | None) -> str:
        name = folder.removeprefix(_PREFIX)
        try:
            key = _decoded(name)
        except ValueError:
            return printable(name or folder)  # refused when it is read, under the name that can be seen on disk
        if key is None:
            try:
                declared = {file.declared_key for file in self._files(folder, known)}
            except OSError:
                return name  # as which it is listed until its files can be read
            key = declared.pop() if len(declared) == 1 else None
        return key or name

    def _partition(self, key: str, folders: Sequence[str], known: KnownFooters | None = None) -> Partition:
        current = partial(self._current_version, key, folders)
        try:
            files = [file for folder in folders for file in self._files(folder, known)]
        except OSError as error:
            return Partition(key, _NOT_SEEN, partial(_raise, _not_given(key, folders[0], error)), current)
        if _was_hidden(key, folders[0], files):
            hidden = f"partition {key!r}: its files could not be read when it was listed. Run again."
            return Partition(key, _NOT_SEEN, partial(_raise, TransientError(hidden, key)), current)
        is_counted = bool(files) and all(file.rows is not None for file in files)
        partition = Partition(
            key=key,
            source_version=_version(files, self._columns),
            read=partial(self._read, key, folders),
            current_source_version=current,
            rows=sum(file.rows or 0 for file in files) if is_counted else None,
            text_bytes=sum(file.text_bytes for file in files) if files else None,
        )
        if known and len(folders) == 1:
            known.keep_partition(f"{self.url}/{folders[0]}", [file.path for file in files], partition)
        return partition

    def _current_version(self, key: str, folders: Sequence[str]) -> str | None:
        with _blaming_system(key, folders[0]):
            if not any((self.root / folder).is_dir() for folder in folders):
                return None
            return _version([file for folder in folders for file in self._files(folder)], self._columns)

    def _files(self, folder: str, known: KnownFooters | None = None) -> list[_File]:
        """The files of a folder; `OSError` where the system does not show them."""
        path = f"{self.root}/{folder}"
        names = known.names(path) if known else None
        if names is None:
            names, is_flat = _parquet_files(path)
            names.sort(key=os.fsencode)
            if known and is_flat:
                known.keep_names(path, names)
        return [_file(name, f"{path}/{name}", known) for name in names]

    def _read(self, key: str, folders: Sequence[str]) -> Iterator[RowBatch]:
        if len(folders) > 1:
            named = ", ".join(map(printable, folders))
            raise DataError(key, f"the folders {named} all stand for this key", "Keep one of them.")
        with _blaming_system(key, folders[0]):
            files = self._files(folders[0])
        self._require_own_key(key, folders[0], files)
        first_row = 0
        id_type: pa.DataType | None = None
        for file in files:
            for batch in self._batches(key, file, first_row):
                if id_type is not None and batch.ids.type != id_type:
                    raise DataError(
                        key,
                        f"ids are {id_type} in {files[0].relative} but {batch.ids.type} in {file.relative}",
                        "Use one type.",
                    )
                id_type = batch.ids.type
                first_row += len(batch)
                yield batch

    def _require_own_key(self, key: str, folder: str, files: list[_File]) -> None:
        if not files:
            raise DataError(
                key, f"its folder {folder} holds no .parquet file", "Write its rows there, or remove the folder."
            )
        name = folder.removeprefix(_PREFIX)
        try:
            in_name = decode_key(name)
        except ValueError as error:
            raise DataError(key, str(error), "Rename the folder: percent-encode the key's UTF-8 bytes.") from error
        for file in files:
            if not is_text(file.relative):
                raise DataError(key, f"the file name {printable(file.relative)} is not UTF-8", "Rename the file.")
            if in_name is None and file.declared_key is None:
                raise DataError(
                    key,
                    f"the folder name {folder} is a hash and {file.relative} does not declare the key",
                    f"Write the key into the file's metadata as {KEY_METADATA.decode()}.",
                )
            belongs = (
                encode_key(file.declared_key) == name
                if in_name is None and file.declared_key
                else file.declared_key in (None, in_name)
            )
            if not belongs:
                raise DataError(
                    key,
                    f"{file.relative} declares that it belongs to partition {file.declared_key!r}, "
                    f"and lies in the folder {folder}",
                    "Move it to its own folder.",
                )

    def _batches(self, key: str, file: _File, first_row: int) -> Iterator[RowBatch]:
        try:
            with pq.ParquetFile(
                file.path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
            ) as reader:
                names = reader.schema_arrow.names
                missing = [name for name in (self.id_column, self.text_column) if name not in names]
                if missing:
                    raise DataError(
                        key,
                        f"{file.relative} has no column {' and no column '.join(map(repr, missing))}; "
                        f"its columns are {', '.join(map(repr, names))}",
                        "Name the right ones with id_column and text_column.",
                    )
                twice = [name for name in (self.id_column, self.text_column) if names.count(name) > 1]
                if twice:
                    raise DataError(key, f"{file.relative} has two columns {twice[0]!r}", "Rename one of them.")
                columns = list(dict.fromkeys((self.id_column, self.text_column)))
                row = first_row
                read = reader.iter_batches(_rows_per_read(reader.metadata), columns=columns, use_threads=False)
                for ids, texts in _gathered(read, self.id_column, self.text_column):
                    batch = row_batch(key, ids, texts, row, self.max_text_bytes)
                    row += len(batch)
                    yield batch
                if reader.metadata.num_rows == 0:
                    empty = reader.schema_arrow.empty_table()
                    yield row_batch(
                        key,
                        empty.column(self.id_column).combine_chunks(),
                        empty.column(self.text_column).combine_chunks(),
                        first_row,
                        self.max_text_bytes,
                    )
        except FileNotFoundError as error:
            raise TransientError(
                f"partition {key!r}: {file.relative} was removed while the partition was read. Run again.", key
            ) from error
        except UNREADABLE as error:
            if is_systems(error):
                raise _not_given(key, file.relative, error) from error
            raise DataError(
                key,
                f"{file.relative} cannot be read as Parquet ({first_line(error)})",
                "Write the file again, then run again.",
            ) from error


def _was_hidden(key: str, folder: str, files: Sequence[_File]) -> bool:
    """Whether a long key had to be taken from the folder's name, while its files can be read by now."""
    if not is_hashed(key) or key != folder.removeprefix(_PREFIX):
        return False
    declared = {file.declared_key for file in files}
    return len(declared) == 1 and declared.isdisjoint({None, key})


def _not_given(key: str, what: str, error: OSError) -> TransientError:
    named = error.filename if isinstance(error.filename, str) else what
    return not_given(printable(named), error, key)


@contextmanager
def _blaming_system(key: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _not_given(key, what, error) from error


def _raise(error: Exception) -> Iterator[RowBatch]:
    raise error


def _parquet_files(folder: str, prefix: str = "") -> tuple[list[str], bool]:
    """Relative names of a partition's Parquet files, in no particular order; and whether its folder holds no other."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return [], False  # a folder without files is refused when it is read
    names: list[str] = []
    is_flat = True
    for entry in entries:
        name = entry.name
        if name.startswith(("_", ".")):
            continue
        if entry.is_dir():
            is_flat = False
            if not entry.is_symlink():
                names += _parquet_files(entry.path, f"{prefix}{name}/")[0]
        elif name.endswith(".parquet"):
            names.append(prefix + name)
    return names, is_flat


def _file(relative: str, path: str, known: KnownFooters | None) -> _File:
    try:
        return _looked_at(relative, path, known)
    except (FileNotFoundError, NotADirectoryError):
        return _File(relative, path, "gone", None, None, 0)


def _looked_at(relative: str, path: str, known: KnownFooters | None) -> _File:
    status = os.stat(path)  # noqa: PTH116, a Path for each file costs more than looking at it
    token = f"{status.st_size}-{status.st_mtime_ns}"
    footer = known.get(path, status) if known else None
    if footer is None:
        try:
            footer = _footer(path)
        except UNREADABLE as error:
            if is_systems(error):
                raise
            return _File(relative, path, token, None, None, status.st_size)
        if known:
            known.keep(path, status, footer)
    return _File(relative, path, footer.version or token, footer.key, footer.rows, footer.row_bytes)


def _footer(path: str) -> Footer:
    with pa.OSFile(path) as file:  # given a path, pyarrow looks for its file system first, which takes longer
        footer = pq.read_metadata(file)
    declared = footer.metadata or {}
    # Of all columns, as an estimate of the texts: see `unreadable` for why not of the text column alone.
    row_bytes = sum(footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))
    version, key = (
        declared[name].decode("utf-8", "replace") if name in declared else None
        for name in (SOURCE_VERSION_METADATA, KEY_METADATA)
    )
    return Footer(version and _recordable(version), key, footer.num_rows, row_bytes)


def _recordable(version: str) -> str:
    """A declared version as any database can keep it: one that is long or holds control characters ends in a digest."""
    raw = version.encode()
    if len(raw) <= _VERSION_BYTES and not _CONTROL.search(version):
        return version
    return f"{_CONTROL.sub('?', version[:40])}~{hashlib.sha256(raw).hexdigest()[:32]}"


def _rows_per_read(footer: pq.FileMetaData) -> int:
    # The mean can deceive: long texts stand together, or a dictionary holds once what many rows say.
    heaviest = max(
        (
            group.total_byte_size / max(1, group.num_rows)
            for group in map(footer.row_group, range(footer.num_row_groups))
        ),
        default=1.0,
    )
    return max(1, min(_READ_ROWS, int(_BATCH_BYTES / max(1.0, heaviest))))


def _gathered(read: Iterator[pa.RecordBatch], id_column: str, text_column: str) -> Iterator[tuple[pa.Array, pa.Array]]:
    """The two columns, in batches that are large enough to be worth the steps to come, without dictionaries."""
    held: list[tuple[pa.Array, pa.Array]] = []
    rows = size = 0
    for raw in read:
        ids, texts = without_dictionary(raw.column(id_column)), without_dictionary(raw.column(text_column))
        weight = ids.nbytes + texts.nbytes
        if held and (rows + len(raw) > _BATCH_ROWS or size + weight > _BATCH_BYTES):
            yield _joined(held)
            held, rows, size = [], 0, 0
        held.append((ids, texts))
        rows, size = rows + len(raw), size + weight
    if held:
        yield _joined(held)


def _joined(held: list[tuple[pa.Array, pa.Array]]) -> tuple[pa.Array, pa.Array]:
    if len(held) == 1:
        return held[0]
    return pa.concat_arrays([ids for ids, _ in held]), pa.concat_arrays([texts for _, texts in held])


def _version(files: list[_File], columns: str) -> str:
    if len(files) == 1:
        return files[0].token + columns
    lines = "".join(f"{file.relative}\0{file.token}\n" for file in files)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:32] + columns


def _named_columns(**columns: str) -> str:
    """What a source version says of the columns: `?text_column=title`, and nothing of those that it need not name."""
    named = {setting: name for setting, name in columns.items() if name != _UNNAMED_COLUMNS[setting]}
    return f"?{urlencode(named, errors='surrogatepass')}" if named else ""
