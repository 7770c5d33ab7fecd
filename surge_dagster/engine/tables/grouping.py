"""Grouping the rows of a table by their key in bounded memory, without sorting them.

    blocks of rows ──► 128 spill files, by key ──► one file of groups for each

The order within a key is kept. Keys are numbered as they appear, and a key's number chooses its
file, so that each file gets about as many keys. A file that is small enough is grouped in memory, a
larger one is divided again by the next digits of the numbers. A table whose equal keys are next to
each other needs no files: `groups_in_order` finds where each group begins.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from surge_dagster.engine.sources.content import ContentDigest

_FILES = 128
# Of a spill file that is grouped in memory, which makes three copies of it.
_FILE_BYTES = 32 * 1024 * 1024
_WORKERS = 2  # files that are grouped concurrently
_PIECE_BYTES = 2 * 1024 * 1024  # of a batch in a file of groups
_WRITE_BUFFER = 64 * 1024
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)  # batches are small
_READ = pa.ipc.IpcReadOptions(use_threads=False)
_HEAD = [pa.field(".code", pa.int32()), pa.field(".row", pa.int64())]

Item = TypeVar("Item")
_Writers = dict[int, pa.ipc.RecordBatchStreamWriter]


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
    """The rows of one key.

    Attributes:
        digest: of their columns.
        file, first_batch, batches: where they are in a folder of groups; -1, 0 and 0 if they are
            next to each other in the table.
    """

    key: str
    first_row: int
    rows: int
    value_bytes: int
    digest: str
    file: int = -1
    first_batch: int = 0
    batches: int = 0


class Gathered:
    """A group while its rows are added."""

    def __init__(self, key: str, first_row: int) -> None:
        self._key, self.first_row = key, first_row
        self._digest = ContentDigest()
        self._rows = self._bytes = 0

    def add(self, rows: pa.RecordBatch) -> None:
        self._digest.update_raw(rows)
        self._rows += len(rows)
        self._bytes += rows.nbytes

    def group(self, *place: int) -> Group:
        return Group(
            self._key, self.first_row, self._rows, self._bytes, self._digest.hexdigest(), *place
        )


def groups_in_order(blocks: Iterable[Block]) -> list[Group] | None:
    """Return the groups of a table whose equal keys are next to each other, else None."""
    codes: dict[str, int] = {}
    groups: list[Group] = []
    gathered: Gathered | None = None
    last = -1
    for block in _ahead(blocks):
        if not len(block.places):
            continue
        of_rows = codes_of_rows(block, codes)
        begins = [0, *(np.flatnonzero(np.diff(of_rows)) + 1).tolist()]
        runs = of_rows[begins]
        # Numbers are given in the order of first rows: a run of a new key has the next one.
        if runs[0] not in (last, last + 1) or (np.diff(runs) != 1).any():
            return None
        keys = list(codes) if len(runs) > 1 or runs[0] != last else []
        for run, begin, end in zip(runs.tolist(), begins, [*begins[1:], len(of_rows)], strict=True):
            if run != last or gathered is None:
                if gathered is not None:
                    groups.append(gathered.group())
                gathered, last = Gathered(keys[run], block.first_row + begin), run
            gathered.add(block.rows.slice(begin, end - begin))
    return groups if gathered is None else [*groups, gathered.group()]


def codes_of_rows(block: Block, codes: dict[str, int]) -> np.ndarray:
    """Return the numbers of the rows' keys; new keys get the next numbers."""
    numbers = [codes.setdefault(key, len(codes)) for key in block.keys]
    return np.array(numbers, np.int32)[block.places]


def grouped(blocks: Iterable[Block], folder: Path) -> list[Group]:
    """Group a table in a new folder, and return the groups; `open_groups` reads them."""
    folder.mkdir(mode=0o700, parents=True)
    keys = _spill(blocks, folder)
    with ThreadPoolExecutor(_WORKERS) as pool:
        files = range(min(_FILES, len(keys)))
        return [
            group
            for groups in pool.map(lambda file: _group_file(folder, file, keys), files)
            for group in groups
        ]


def open_groups(folder: Path, file: int) -> pa.ipc.RecordBatchFileReader:
    """Open a file of groups for `rows_of`; it stays readable when the folder is removed."""
    return pa.ipc.open_file(pa.OSFile(str(folder / f"groups-{file}.arrow")), options=_READ)


def rows_of(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.Array]:
    """Return the columns of a batch of a group, and their rows in the table."""
    return batch.select(range(1, batch.num_columns)), batch.column(0)


def _spill(blocks: Iterable[Block], folder: Path) -> list[str]:
    """Write all rows to the spill files; return the keys, each at the place of its number."""
    codes: dict[str, int] = {}
    with ExitStack() as opened:
        writers: _Writers = {}
        for block in _ahead(blocks):
            if len(block.places):
                _divide(_numbered(block, codes), 1, folder / "spill", writers, opened)
    return list(codes)


def _numbered(block: Block, codes: dict[str, int]) -> pa.RecordBatch:
    """Return the rows with their keys' numbers and their own."""
    rows = np.arange(block.first_row, block.first_row + len(block.places), dtype=np.int64)
    head = [pa.array(codes_of_rows(block, codes)), pa.array(rows)]
    schema = pa.schema([*_HEAD, *block.rows.schema])
    return pa.RecordBatch.from_arrays([*head, *block.rows.columns], schema=schema)


def _divide(
    rows: pa.RecordBatch, divisor: int, prefix: Path, writers: _Writers, opened: ExitStack
) -> None:
    """Write each row to the file of its number divided by the divisor."""
    files = (rows.column(0).to_numpy() // divisor % _FILES).astype(np.uint8)
    order = np.argsort(files, kind="stable")  # a radix sort for so few values
    by_file = rows.take(pa.array(order))
    ends = np.cumsum(np.bincount(files, minlength=_FILES)).tolist()
    begin = 0
    for file, end in enumerate(ends):
        if end > begin:
            if file not in writers:
                sink = opened.enter_context(
                    pa.output_stream(f"{prefix}-{file}.arrow", buffer_size=_WRITE_BUFFER)
                )
                writers[file] = opened.enter_context(
                    pa.ipc.new_stream(sink, rows.schema, options=_LZ4)
                )
            writers[file].write_batch(by_file.slice(begin, end - begin))
        begin = end


def _group_file(folder: Path, file: int, keys: list[str]) -> list[Group]:
    spilled = folder / f"spill-{file}.arrow"
    with ExitStack() as opened:
        sink = pa.output_stream(str(folder / f"groups-{file}.arrow"), buffer_size=_WRITE_BUFFER)
        writer = _GroupWriter(opened.enter_context(sink), opened, file, keys)
        groups = writer.group(spilled, range(file, len(keys), _FILES), _FILES)
    spilled.unlink()
    return groups


class _GroupWriter:
    """Writes the groups of one spill file, one after the other."""

    def __init__(self, sink: pa.NativeFile, opened: ExitStack, file: int, keys: list[str]) -> None:
        self._sink = sink
        self._opened = opened
        self._file = file
        self._keys = keys
        self._writer: pa.ipc.RecordBatchFileWriter | None = None
        self._batches = 0

    def group(self, path: Path, codes: range, divisor: int) -> list[Group]:
        """Write the groups of a spill file with keys of these numbers.

        Args:
            divisor: of the numbers' next digits, for `_divide`.
        """
        if len(codes) == 1:
            read = (batch.select(range(1, batch.num_columns)) for batch in _batches(path))
            return [self._add(codes[0], (piece for batch in read for piece in _pieces(batch)))]
        with closing(_batches(path)) as read:
            held = _at_most(_FILE_BYTES, read)
        if held is None:
            return self._divided(path, codes, divisor)
        rows = pa.concat_batches(held)
        held.clear()
        of_rows = (rows.column(0).to_numpy() - codes.start) // codes.step
        if len(codes) < 1 << 16:
            of_rows = of_rows.astype(np.uint16)  # which numpy sorts faster
        order = np.argsort(of_rows, kind="stable")
        rows = rows.select(range(1, rows.num_columns)).take(pa.array(order))
        ends = np.cumsum(np.bincount(of_rows, minlength=len(codes))).tolist()
        begins = [0, *ends[:-1]]
        return [
            self._add(code, _pieces(rows.slice(begin, end - begin)))
            for code, begin, end in zip(codes, begins, ends, strict=True)
        ]

    def _divided(self, path: Path, codes: range, divisor: int) -> list[Group]:
        prefix = path.with_suffix("")
        with ExitStack() as opened:
            writers: _Writers = {}
            for batch in _batches(path):
                _divide(batch, divisor, prefix, writers, opened)
        groups: list[Group] = []
        for place in range(min(_FILES, len(codes))):
            part = prefix.with_name(f"{prefix.name}-{place}.arrow")
            # The next digits of these numbers are their places among the codes.
            groups += self.group(part, codes[place::_FILES], divisor * _FILES)
            part.unlink()
        return groups

    def _add(self, code: int, pieces: Iterable[pa.RecordBatch]) -> Group:
        gathered = Gathered(self._keys[code], -1)
        first_batch = self._batches
        for piece in pieces:
            if self._writer is None:
                self._writer = self._opened.enter_context(
                    pa.ipc.new_file(self._sink, piece.schema, options=_LZ4)
                )
            columns, rows = rows_of(piece)
            if self._batches == first_batch:
                gathered.first_row = rows[0].as_py()
            gathered.add(columns)
            self._writer.write_batch(piece)
            self._batches += 1
        return gathered.group(self._file, first_batch, self._batches - first_batch)


def _batches(path: Path) -> Generator[pa.RecordBatch]:
    with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source, options=_READ) as reader:
        yield from reader


def _at_most(most_bytes: int, batches: Iterable[pa.RecordBatch]) -> list[pa.RecordBatch] | None:
    """Return all batches, None if they have more bytes."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        size += batch.nbytes
        if size > most_bytes:
            return None
        held.append(batch)
    return held


def _pieces(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    count = max(1, _PIECE_BYTES * len(rows) // max(1, rows.nbytes))
    for begin in range(0, len(rows), count):
        yield rows.slice(begin, count)


def _ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; another thread makes the next one."""
    source = iter(items)
    end = object()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, source, end)
            yield item  # pyright: ignore[reportReturnType]
