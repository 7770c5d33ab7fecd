"""Grouping the rows of a table by their key without sorting them, in bounded memory; order within a
key is kept.

    blocks of rows ──► 128 spill files, by key ──► one file of groups for each, and what is known of each group

Keys are numbered as they appear, and a key's number says its file: each file gets as many keys as
the others. A file that is small enough is grouped in memory; a larger one is divided again by the
next digits of the numbers, and one of a single key is grouped already. A table whose equal keys
stand together needs none of this: `groups_in_order` finds where each of its groups begins.
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
# of a spill file that is grouped in memory; three copies are alive while it is
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
    """Consecutive rows of a table, of which `rows` has the columns that are kept, of the same types
    in every block.

    Attributes:
        keys: the different keys of the rows, in the order of their first rows.
        places: int32, for each row the place of its key in `keys`.
    """

    first_row: int
    rows: pa.RecordBatch
    keys: Sequence[str]
    places: np.ndarray


class Group(NamedTuple):
    """What is known of the rows of one key.

    Attributes:
        digest: of their columns.
        file, first_batch, batches: where a spill folder has them; -1, 0 and 0 where they follow
            each other in the table.
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
    """A group while its rows come."""

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
    """The groups of a table whose equal keys stand together; None for any other, as soon as a key
    comes again."""
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
    """The numbers of the rows' keys, in the order of first rows; those of new keys are added."""
    return np.array([codes.setdefault(key, len(codes)) for key in block.keys], np.int32)[
        block.places
    ]


def grouped(blocks: Iterable[Block], folder: Path) -> list[Group]:
    """Group a table in a new folder, and say what each group is; `open_groups` reads them."""
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
    """Open a file of groups, which can be read to its end when the folder is removed; its batches
    go to `rows_of`."""
    return pa.ipc.open_file(pa.OSFile(str(folder / f"groups-{file}.arrow")), options=_READ)


def rows_of(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.Array]:
    """The columns of a batch of a group, and the rows of the table that they were."""
    return batch.select(range(1, batch.num_columns)), batch.column(0)


def _spill(blocks: Iterable[Block], folder: Path) -> list[str]:
    """Write all rows to the spill files; returns the keys, each at the place of its number."""
    codes: dict[str, int] = {}
    with ExitStack() as opened:
        writers: _Writers = {}
        for block in _ahead(blocks):
            if len(block.places):
                rows = np.arange(
                    block.first_row, block.first_row + len(block.places), dtype=np.int64
                )
                columns = [
                    pa.array(codes_of_rows(block, codes)),
                    pa.array(rows),
                    *block.rows.columns,
                ]
                numbered = pa.RecordBatch.from_arrays(
                    columns, schema=pa.schema([*_HEAD, *block.rows.schema])
                )
                _divide(numbered, 1, folder / "spill", writers, opened)
    return list(codes)


def _divide(
    rows: pa.RecordBatch, divisor: int, prefix: Path, writers: _Writers, opened: ExitStack
) -> None:
    """Write each row to the file that its number over the divisor says."""
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
    """Writes the groups of one spill file, one behind the other."""

    def __init__(self, sink: pa.NativeFile, opened: ExitStack, file: int, keys: list[str]) -> None:
        self._sink, self._opened, self._file, self._keys = sink, opened, file, keys
        self._writer: pa.ipc.RecordBatchFileWriter | None = None
        self._batches = 0

    def group(self, path: Path, codes: range, divisor: int) -> list[Group]:
        """The groups of a spill file with keys of these numbers, whose next digits the divisor
        gives to `_divide`."""
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
        order = np.argsort(
            of_rows.astype(np.uint16) if len(codes) < 1 << 16 else of_rows, kind="stable"
        )
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
        gathered, first_batch = Gathered(self._keys[code], -1), self._batches
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
    """All batches, or None where they have more bytes."""
    held, size = list[pa.RecordBatch](), 0
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
    """The items, the next of which is made on another thread meanwhile."""
    source, end = iter(items), object()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, source, end)
            yield item  # pyright: ignore[reportReturnType]
