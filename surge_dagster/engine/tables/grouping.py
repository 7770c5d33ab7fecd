"""Grouping the rows of a table by their key in bounded memory.

    blocks of rows ──► 128 files, by the numbers of their keys ──► one file, key after key

Keys are numbered as they appear. Rows that fit in memory are sorted by these numbers; the order
within a key is kept. Others are divided among files by the last digit of their numbers, and each
file is grouped alike, by the next digit. The files lie in the cache and have no names, so that the
disk frees them when the process ends, however it ends.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.sources.bad_rows import FirstIds, with_reason
from surge_dagster.engine.sources.batching import small, together
from surge_dagster.engine.sources.checked_rows import checked_rows
from surge_dagster.engine.sources.partition import ContentDigest, Partition, RowBatch
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support import disk_cache
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.keys import encode_key

_FILES = 128
_HELD_BYTES = 32 * 1024 * 1024  # of rows that are grouped in memory, which makes three copies
_WRITE_BUFFER = 64 * 1024
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)  # batches are small
_READ = pa.ipc.IpcReadOptions(use_threads=False)

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of a table, with the same types in every block.

    Attributes:
        rows: the columns that are kept.
        keys: the different keys of the rows, in the order of their first rows.
        places: for each row the place of its key in `keys`, int32 [rows].
    """

    first_row: int
    rows: pa.RecordBatch
    keys: Sequence[str]
    places: np.ndarray


class Group(NamedTuple):
    """What is known of the rows of one key; the digest is that of their columns."""

    key: str
    first_row: int
    rows: int
    value_bytes: int
    digest: str


class GroupedRows:
    """The rows of a table, which can be read by key.

    Attributes:
        groups: by key, in the order of the encoded keys.

    Raises:
        ConfigError: the disk of the cache does not take the rows.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.groups: dict[str, Group] = {}
        self._batches: dict[str, range] = {}
        self._reader: pa.ipc.RecordBatchFileReader | None = None
        folder = disk_cache.place("tables/rows")
        try:
            disk_cache.make_folder(folder)
            self._write(blocks, folder)
        except OSError as error:
            raise ConfigError(
                f"the rows of the table cannot be grouped in {str(folder)!r}: "
                f"{error.strerror or error}. Set SURGE_CACHE_DIR to a folder on a disk with as "
                "much room as the columns that are read."
            ) from error
        self.groups = {key: self.groups[key] for key in sorted(self.groups, key=encode_key)}

    def read(self, key: str) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        """Yield the columns of a key's rows, each batch with its rows in the table."""
        assert self._reader is not None  # a table without rows has no keys
        for place in self._batches[key]:
            batch = self._reader.get_batch(place)
            yield _columns(batch), batch.column(1)

    def _write(self, blocks: Iterable[Block], folder: Path) -> None:
        names: list[str] = []
        numbered = _numbered(_ahead(blocks), names)
        first = next(numbered, None)
        if first is None:
            return

        file = _RowFile(folder, first.schema)
        runs = _by_number(itertools.chain([first], numbered), names, folder)
        for number, of_key in itertools.groupby(runs, key=_number):
            key = names[number]
            gathered = Gathered(key)
            begin = file.batches
            for run in of_key:
                for piece in small(run):
                    gathered.add(_columns(piece), piece.column(1)[0].as_py())
                    file.write(piece)
            self.groups[key] = gathered.group()
            self._batches[key] = range(begin, file.batches)
        self._reader = file.finish()


class Gathered:
    """A group while its rows are added."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._first_row: int | None = None
        self._digest = ContentDigest()
        self._rows = 0
        self._bytes = 0

    def add(self, rows: pa.RecordBatch, first_row: int = 0) -> None:
        if self._first_row is None:
            self._first_row = first_row
        self._digest.update_raw(rows)
        self._rows += len(rows)
        self._bytes += rows.nbytes

    def group(self) -> Group:
        first_row = self._first_row or 0
        return Group(self._key, first_row, self._rows, self._bytes, self._digest.hexdigest())


class _RowFile:
    """Batches in a file without a name."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._path = f"/proc/self/fd/{self._file.fileno()}"
        self._sink = pa.output_stream(self._path, buffer_size=_WRITE_BUFFER)
        self._writer = pa.ipc.new_file(self._sink, schema, options=_LZ4)
        self.batches = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)
        self.batches += 1

    def finish(self) -> pa.ipc.RecordBatchFileReader:
        self._writer.close()
        self._sink.close()
        with self._file:
            return pa.ipc.open_file(pa.OSFile(self._path), options=_READ)


def _numbered(blocks: Iterable[Block], names: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield rows with the numbers of their keys and their own; add each new key to the names."""
    numbers: dict[str, int] = {}
    for block in blocks:
        if not len(block.rows):
            continue
        for key in block.keys:
            if key not in numbers:
                numbers[key] = len(names)
                names.append(key)
        of_keys = np.array([numbers[key] for key in block.keys], np.int32)
        rows = np.arange(block.first_row, block.first_row + len(block.rows), dtype=np.int64)
        yield pa.RecordBatch.from_arrays(
            [pa.array(of_keys[block.places]), pa.array(rows), *block.rows.columns],
            [".key", ".row", *block.rows.schema.names],
        )


def _by_number(
    batches: Iterator[pa.RecordBatch], names: Sequence[str], folder: Path, divisor: int = 1
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one key after the other.

    Args:
        names: of all keys, once the batches have ended.
        divisor: the numbers of all rows have the same remainder by it.
    """
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size > _HELD_BYTES:
            break
    else:
        if held:
            rows = pa.concat_batches(held)
            held.clear()
            yield from _runs(rows, rows.column(0).to_numpy() // divisor)
        return

    batches = itertools.chain(held, batches)
    if 1 < divisor >= len(names):  # the rows of one key do not fit in memory
        yield from together(batches)
        return
    files = _divided(batches, folder, divisor)
    held.clear()
    while files:
        reader = files.pop().finish()
        of_file = map(reader.get_batch, range(reader.num_record_batches))
        yield from _by_number(of_file, names, folder, divisor * _FILES)


def _divided(batches: Iterable[pa.RecordBatch], folder: Path, divisor: int) -> list[_RowFile]:
    """Write each row to the file of the next digit of its number."""
    files: dict[int, _RowFile] = {}
    for batch in batches:
        digits = batch.column(0).to_numpy() // divisor % _FILES
        for rows in _runs(batch, digits):
            digit = _number(rows) // divisor % _FILES
            if digit not in files:
                files[digit] = _RowFile(folder, rows.schema)
            files[digit].write(rows)
    return list(files.values())


def _runs(rows: pa.RecordBatch, numbers: np.ndarray) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one number after the other, in the order that they have."""
    if numbers.max() < 1 << 16:
        numbers = numbers.astype(np.uint16)  # which numpy sorts faster
    order = np.argsort(numbers, kind="stable")
    ordered = rows.take(pa.array(order))
    begins = np.flatnonzero(np.diff(numbers[order], prepend=-1)).tolist()
    for begin, end in itertools.pairwise([*begins, len(rows)]):
        yield ordered.slice(begin, end - begin)


def _number(rows: pa.RecordBatch) -> int:
    return rows.column(0)[0].as_py()


def _columns(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.select(range(2, rows.num_columns))


def _ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; another thread makes the next one."""
    source = iter(items)
    end = object()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, source, end)
            yield item  # pyright: ignore[reportReturnType]


# Stands for every value that cannot be a key, as hive writers name it.
NO_KEY = "__HIVE_DEFAULT_PARTITION__"
# Key of the partition of rows that are set aside, since they have no key.
UNASSIGNED = "unassigned"
_READ_BYTES = 8 * 1024 * 1024  # of reading a partition, in addition to its rows


def grouped_partitions(
    groups: Sequence[Group],
    open_rows: Callable[[], GroupedRows],
    selection: Selection,
    partition_by: Sequence[str],
    current_version: Callable[[str], str | None],
    shown: Callable[[int], str],
) -> Iterator[Partition]:
    """Yield the partition of each key, in the order of the encoded keys.

    Rows without a key are refused when they are read. If bad rows are set aside, they are: their
    partition has no rows, and names each of them.

    Args:
        current_version: returns the version that a partition of this version has now.
        shown: returns a row of the table for messages.
    """
    no_key = NO_KEY
    if selection.bad_rows == "set_aside":
        no_key = unassigned_key(group.key for group in groups)
    named = [(no_key if group.key == NO_KEY else group.key, group) for group in groups]
    for key, group in sorted(named, key=lambda each: encode_key(each[0])):
        version = group.digest + selection.version_suffix
        read = partial(_read, key, group, open_rows, selection, shown)
        partition = Partition(
            key=key,
            source_version=version,
            read=read,
            current_source_version=partial(current_version, version),
            rows=group.rows,
            text_bytes=group.value_bytes,
            page_bytes=_READ_BYTES,
            id_bytes=selection.id_bytes,
        )
        if group.key != NO_KEY:
            yield partition
        elif selection.bad_rows == "refuse":
            error = without_key(key, group.rows, partition_by, shown(group.first_row))
            yield replace(partition, read=partial(_refuse, error))
        else:
            read = partial(read, reason=no_key_reason(partition_by))
            yield replace(partition, read=read, rows=0, text_bytes=0)


def unassigned_key(keys: Iterable[str]) -> str:
    """Return the key of rows without one: another one, if the usual one is a key of the table."""
    return NO_KEY if UNASSIGNED in keys else UNASSIGNED


def no_key_reason(columns: Sequence[str]) -> str:
    """Return why a row without a key is set aside."""
    return (
        f"the row has no key, since {' or '.join(map(repr, columns))} is null, empty or not UTF-8"
    )


def _refuse(error: DataError) -> Iterator[RowBatch]:
    raise error


def _read(
    key: str,
    group: Group,
    open_rows: Callable[[], GroupedRows],
    selection: Selection,
    shown: Callable[[int], str],
    reason: str | None = None,
) -> Iterator[RowBatch]:
    """Yield the rows of a group; with a reason, set all of them aside."""
    grouped = open_rows()
    if grouped.groups.get(group.key) != group:
        raise TransientError(
            f"partition {key!r}: its rows are not those that were listed. Run again.", key
        )
    first_row = 0
    first_ids = FirstIds()
    for columns, table_rows in grouped.read(group.key):
        place = partial(_place, shown, table_rows, first_row)
        if reason is not None:
            columns = with_reason(columns, reason)
        yield from checked_rows(selection, key, [columns], first_row, place, first_ids)
        first_row += len(columns)


def _place(shown: Callable[[int], str], table_rows: pa.Array, first_row: int, row: int) -> str:
    return shown(table_rows[row - first_row].as_py())


def without_key(key: str, rows: int, columns: Sequence[str], first: str = "") -> DataError:
    """Return the error that refuses rows without a key; `first` is the first one, if known."""
    names = " or ".join(map(repr, columns))
    reason = f"{counted(rows, 'row')} without a key, since {names} is null, empty or not UTF-8"
    remedy = "Give those rows a value, or remove them from the source"
    if not first:
        return DataError(key, reason, f"{remedy}.")
    encoding = "for a CSV file that is not UTF-8, set encoding"
    return DataError(key, f"{reason}; the first is {first}", f"{remedy}; {encoding}.")
