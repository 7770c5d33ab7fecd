"""Staging: segments of partitions that are larger than a SuperBatch, kept until the whole file can
be written.

    .staging/<space>/<encoded key>/<desired version>/<start>-<stop>.parquet

Each is a complete file of some rows of its partition, with a digest over their ids and texts. Its
fact `space` is its own name, so that no reader takes it for an output file. A run that dies loses
only the segments that were not staged yet. A later run, whatever its thresholds, encodes only the
rows that no segment covers. The content digest is unknown while a partition streams in, so the
version is that of the source.

Rows whose texts ended workers are not counted. Next to segments that lack some stands a list of
these, `left-out.parquet`; a later run leaves them out, too, and so its rows have the same places.

Two runs may stage the same partition, or ranges of it: their objects appear whole and under names
that say their rows, so either one's can be used. The run that has published the partition removes
them all; the other run then has nothing to write its file from, and its next run finds that of the
first one.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import pairwise, zip_longest

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.files.facts import (
    InvalidFile,
    VectorFacts,
    desired_version,
    explained,
)
from surge_dagster.engine.files.parquet import OutputFile, write_file
from surge_dagster.engine.files.rows import (
    READ_BYTES,
    carried_columns,
    in_words,
    require_carried,
    rows_at_a_time,
)
from surge_dagster.engine.output.ended_workers import (
    NONE_ENDED_WORKERS,
    EndedWorkers,
    ended_workers_in,
)
from surge_dagster.engine.output.rejected import RejectedRowsBuilder, read_list, write_list
from surge_dagster.engine.output.rejected import folder_of as rejected_folder
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.run.superbatch import (
    PartitionToRead,
    ReadPartition,
    Segment,
    SpaceTarget,
    StagedRows,
    SuperBatch,
    row_bytes,
)
from surge_dagster.engine.sources.partition import (
    ContentDigest,
    Partition,
    PartitionRange,
    RowBatch,
)
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.keys import encode_key

log = logging.getLogger(__name__)

STAGING = ".staging"
_VECTOR_FACTS = [each.name for each in fields(VectorFacts)]
_REUSED = "surge.reused"  # whether a row's vector is that of the old file
_LEFT_OUT = "left-out.parquet"
_NAME = re.compile(r"(?P<start>\d{1,18})-(?P<stop>\d{1,18})\.parquet")


class StagedRowsGone(TransientError):
    """Staged rows cannot be read any more; another run may have published their partition, and
    removed them."""


class Staging:
    """The staged segments of one space, as one run sees them; used by its reader and its publishing
    threads.

    Args:
        target: the output; a segment of another precision or with other columns is not used.
    """

    def __init__(self, target: SpaceTarget) -> None:
        self._target = target
        self._store = target.store
        self._root = _root(target.space.name)
        self._staged_keys = staged_keys(self._store, target.space.name)  # encoded
        self._lock = threading.Lock()
        self._listed: set[PartitionToRead] = set()  # whose list of rows left out is written

    def has(self, key: str) -> bool:
        """Return whether anything of a partition was staged, by an earlier run or this one."""
        return bool(self._staged_keys) and encode_key(key) in self._staged_keys

    def find(self, partition: Partition, within: PartitionRange | None = None) -> list[StagedRows]:
        """Return rows that any runs staged of this source version by now: ascending, without
        overlap, as many as possible.

        They are opened and not read: whoever uses them compares checksums and digests.

        Args:
            within: segments that reach beyond it are left out.

        Other staged objects of the partition stay until the partition is published: another run may
        be using them.
        """
        found: list[StagedRows] = []
        for start, stop in self._ranges(partition):
            if within is None or within.start <= start <= stop <= within.stop:
                found += self._usable(partition, start, stop)
        return _most_rows_without_overlap(found)

    def _ranges(self, partition: Partition) -> list[tuple[int, int]]:
        """Return the rows, from one to before another, of each staged object of this version."""
        folder = self._folder(partition)
        ranges: list[tuple[int, int]] = []
        for stored in self._store.list(folder):
            name = _NAME.fullmatch(stored.name.removeprefix(f"{folder}/"))
            if name is not None:
                ranges.append((int(name["start"]), int(name["stop"])))
        return ranges

    def _usable(self, partition: Partition, start: int, stop: int) -> list[StagedRows]:
        """Return these staged rows; none if they cannot be used."""
        try:
            with self._opened(self._name(partition, start, stop)) as reader:
                facts = reader.facts
                vectors = VectorFacts(**{name: getattr(facts, name) for name in _VECTOR_FACTS})
                digest = facts.content_digest
                return [StagedRows(start, stop, digest, vectors, facts.rows_version)]
        except StoreUnavailable:
            raise
        except (InvalidFile, FileNotFoundError, TransientError) as error:
            # it stays: the disk may answer later, or another run may be able to use it
            log.warning("staged rows of partition %r are encoded again: %s", partition.key, error)
            return []

    def write(
        self, batch: SuperBatch, segment: Segment, matrix: np.ndarray, vectors: VectorFacts
    ) -> StagedRows:
        """Stage a segment's rows with their vectors [rows, dimension]; they are durable when this
        returns. Raises `TransientError` or `OSError` if the store does not take it."""
        digest = ContentDigest()
        sizes: list[np.ndarray] = []
        for rows in _pieces(batch, segment):
            digest.update(rows)
            sizes.append(row_bytes(rows))

        partition = segment.partition
        stop = segment.first_row + segment.rows
        name = self._name(partition.source, segment.first_row, stop)
        table = self._table(batch, segment, matrix)
        read = ReadPartition(
            segment.rows,
            digest.hexdigest(),
            segment.id_type,
            carried_columns=segment.carried_columns,
        )
        facts = replace(
            self._target.facts(partition, read, vectors),
            space=name,
            carried_columns=in_words(carried_columns(table.schema)),
            rows_version=partition.old_rows_version,
        )

        self._staged_keys.add(encode_key(partition.key))
        self._write_left_out(partition)
        borders = pairwise(_group_borders(np.concatenate(sizes)))
        with self._store.create(name) as upload:
            groups = (table.slice(begin, end - begin) for begin, end in borders)
            write_file(upload.sink, table.schema, facts, groups)
            upload.publish(lambda: None)
        self._store.sync(self._folder(partition.source))
        return StagedRows(
            segment.first_row, stop, facts.content_digest, vectors, partition.old_rows_version
        )

    def _write_left_out(self, partition: PartitionToRead) -> None:
        """Write the list of the rows that are left out of what is staged, once per reading."""
        rows = partition.ended_workers.rows
        with self._lock:
            if not rows or partition in self._listed:
                return
            source = partition.source
            listed = RejectedRowsBuilder()
            listed.add(list(rows.values()))
            table = listed.rejected().table
            name = f"{self._folder(source)}/{_LEFT_OUT}"
            write_list(self._store, name, source.key, source.source_version, table)
            self._listed.add(partition)

    def left_out(self, partition: Partition) -> EndedWorkers:
        """Return the rows that are left out of what is staged of this source version."""
        if not self.has(partition.key):
            return NONE_ENDED_WORKERS
        name = f"{self._folder(partition)}/{_LEFT_OUT}"
        try:
            return ended_workers_in(read_list(self._store, name, partition.source_version))
        except StoreUnavailable:
            raise
        except TransientError as error:
            log.warning("staged rows of partition %r may not be used: %s", partition.key, error)
            return NONE_ENDED_WORKERS

    def _table(self, batch: SuperBatch, segment: Segment, matrix: np.ndarray) -> pa.Table:
        """Return the rows of a segment as a file has them, and which vectors were reused."""
        table = self._target.table(batch, segment, matrix)
        reused = pa.array(batch.slot.is_known(segment.start, segment.stop))
        return table.add_column(table.num_columns - 1, _REUSED, reused)

    def reused_rows(self, partition: Partition, staged: StagedRows) -> np.ndarray:
        """Return which staged rows have the vector of the old file, bool [rows]; raises as
        `rows`."""
        batches = self.rows(partition, staged, [_REUSED])
        flags = [batch.column(_REUSED).to_numpy(zero_copy_only=False) for batch in batches]
        return np.concatenate(flags)

    def rows(
        self, partition: Partition, staged: StagedRows, columns: list[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield staged rows, about a megabyte or one row at a time, with the columns of a file.

        Raises:
            StagedRowsGone: they were removed, or the system does not give them.
            TransientError: they are damaged, and were removed.
        """
        space = self._target.space
        name = self._name(partition, staged.start, staged.stop)
        batch_rows = rows_at_a_time(0, space.dimension, np.dtype(space.dtype).itemsize)
        at_fault = (
            f"partition {partition.key!r}: its staged rows {staged.start:,} to {staged.stop:,}"
        )
        try:
            with self._opened(name) as reader:
                if reader.facts.content_digest != staged.digest:
                    raise InvalidFile("it holds other rows than those that were staged")
                names = columns or [name for name in reader.columns.names if name != _REUSED]
                rows = 0
                for group in range(reader.groups):
                    for batch in reader.read(columns=names, batch_rows=batch_rows, groups=[group]):
                        rows += len(batch)
                        yield batch
                if rows != staged.rows:
                    raise InvalidFile(f"{rows:,} rows could be read of {staged.rows:,}")
        except StoreUnavailable:
            raise
        except (FileNotFoundError, TransientError) as error:
            reason = (
                f"{at_fault} cannot be read; another run may have published the partition, and "
                f"removed them: {error}. Run again."
            )
            raise StagedRowsGone(reason, partition.key) from error
        except InvalidFile as error:
            self._store.delete(name)
            reason = f"{at_fault} cannot be used and were removed: {error}. Run again."
            raise TransientError(reason, partition.key) from error

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[OutputFile]:
        """Open a staged segment.

        Raises:
            FileNotFoundError: it was removed.
            InvalidFile: it is damaged, or is not what its name says; also while its rows are read.
            TransientError: the system does not give it; also while its rows are read.
        """
        location = self._store.location(name)
        with contextlib.ExitStack() as opened:
            with explained(location):
                source = opened.enter_context(self._store.open(name))
                reader = OutputFile(source, READ_BYTES, location)
                self._require_own(reader, name)
            yield reader

    def _require_own(self, reader: OutputFile, name: str) -> None:
        """Raise `InvalidFile` for a segment of other rows, another precision or other columns."""
        facts = reader.facts
        if (facts.space, facts.precision) != (name, self._target.precision):
            raise InvalidFile(f"it was written as {facts.space!r} in {facts.precision}")
        require_carried(facts.carried_columns, reader.columns)
        id_type = reader.columns.field("id").type
        columns = self._target.columns(id_type, carried_columns(reader.columns))
        if reader.columns != columns:
            raise InvalidFile(
                f"its columns are {reader.columns.names}, those of this run {columns.names}"
            )

    def remove(self, key: str) -> None:
        """Remove everything staged of a partition, by this run or another; harmless if nothing
        is."""
        if self.has(key):
            _remove_folder(self._store, f"{self._root}/{encode_key(key)}")
            self._staged_keys.discard(encode_key(key))

    def remove_from(self, partition: Partition, row: int) -> None:
        """Remove what is staged of a row and those behind it; harmless if nothing is."""
        with _harmless(self._store, self._folder(partition)):
            ranges = self._ranges(partition)
            for start, stop in ranges:
                if stop > row:
                    self._store.delete(self._name(partition, start, stop))
            if all(stop > row for _, stop in ranges):
                self.remove(partition.key)

    def _name(self, partition: Partition, start: int, stop: int) -> str:
        return f"{self._folder(partition)}/{start}-{stop}.parquet"

    def _folder(self, partition: Partition) -> str:
        version = desired_version(partition.source_version, self._target.space.name)
        return f"{self._root}/{encode_key(partition.key)}/{version}"


def _pieces(batch: SuperBatch, segment: Segment) -> Iterator[RowBatch]:
    """Yield the rows of a segment in the pieces of its ids."""
    first = segment.start
    for ids, carried in zip_longest(segment.ids, segment.carried):
        texts = batch.slot.texts(first, first + len(ids))
        yield RowBatch(ids, texts, carried=carried)  # pyright: ignore[reportArgumentType]
        first += len(ids)


def _most_rows_without_overlap(segments: Iterable[StagedRows]) -> list[StagedRows]:
    """Return the segments that together have the most rows and do not overlap, ascending.

    Two runs may have staged a partition in different pieces. For each possible last segment, in the
    order of their ends, the best choice before it is known already.
    """
    by_stop = sorted(segments, key=lambda each: each.stop)
    stops = [each.stop for each in by_stop]
    most_rows = [0]  # of the first segments, by their number
    befores: list[int] = []  # how many segments end before each one begins
    for segment in by_stop:
        before = bisect_right(stops, segment.start)
        befores.append(before)
        most_rows.append(max(most_rows[-1], most_rows[before] + segment.rows))

    chosen: list[StagedRows] = []
    number = len(by_stop)
    while number:
        if most_rows[number] == most_rows[number - 1]:
            number -= 1
        else:
            chosen.append(by_stop[number - 1])
            number = befores[number - 1]
    return chosen[::-1]


def _group_borders(sizes: np.ndarray) -> list[int]:
    """Return where row groups begin and end, so that each has about a megabyte of strings: a reader
    takes a page at a time."""
    ends = np.cumsum(sizes)
    borders = [0]
    while borders[-1] < len(sizes):
        before = int(ends[borders[-1] - 1]) if borders[-1] else 0
        stop = int(np.searchsorted(ends, before + READ_BYTES, side="right"))
        borders.append(max(stop, borders[-1] + 1))
    return borders


def remove_staged(store: Store, space: str, keys: Iterable[str]) -> None:
    """Remove what is staged of partitions whose files are up to date or deleted; a run that was
    killed may have left it."""
    root = _root(space)
    with _harmless(store, root):
        for folder in staged_keys(store, space).intersection(map(encode_key, keys)):
            _remove_folder(store, f"{root}/{folder}")


def _root(space: str) -> str:
    return f"{STAGING}/{space}"


def staged_keys(store: Store, space: str) -> set[str]:
    """Return the encoded keys of the partitions of which something is staged."""
    root = _root(space)
    names = (stored.name for stored in store.list(root, deep=True))
    return {name.removeprefix(f"{root}/").partition("/")[0] for name in names}


def _remove_folder(store: Store, folder: str) -> None:
    with _harmless(store, folder):
        for stored in list(store.list(folder, deep=True)):
            store.delete(stored.name)


def sweep_orphan_files(store: Store) -> None:
    """Remove the temp files of dead writers from every space, its lists and its staged segments."""
    with _harmless(store, ""):
        for space in list_spaces(store):
            for folder in (space.name, rejected_folder(space.name), _root(space.name)):
                with _harmless(store, folder):
                    store.sweep(folder)


@contextlib.contextmanager
def _harmless(store: Store, folder: str) -> Iterator[None]:
    """Log an error while files are removed that do no harm; the next run tries again."""
    try:
        yield
    except (SurgeError, OSError, Cancelled) as error:
        place = store.location(folder)
        log.warning("files in %s that no run needs could not be removed: %s", place, error)
