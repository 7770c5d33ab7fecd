"""Staging: segments of partitions that are larger than a SuperBatch, kept until the whole file can
be written.

    .staging/<space>/<encoded key>/<desired version>/<start>-<stop>.parquet

Each is a complete file of some rows of its partition, with a digest over their ids and texts. It
states its own name in the place of the space. A run that dies loses only the segments
that were not staged yet, and a later run, whatever its thresholds, encodes only the rows that no
segment covers. The content digest is unknown while a partition streams in, so the desired version
is the one of the source version.

Two runs may stage the same partition, or ranges of it: their objects appear whole and under names
that say their rows, so either one's can be used. The run that has published the partition removes
them all; the other run then has nothing to write its file from, and finds that of the first one.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise, zip_longest

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.files.facts import InvalidFile, VectorFacts, desired_version, explained
from surge_dagster.engine.files.formats import new_writer, open_output_file
from surge_dagster.engine.files.parquet import OutputFile
from surge_dagster.engine.files.rows import (
    READ_BYTES,
    carried_columns,
    matrix_of,
    require_carried,
    rows_at_a_time,
)
from surge_dagster.engine.files.validation import invalid_row
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.run.space_target import SpaceTarget
from surge_dagster.engine.run.superbatch import (
    ReadPartition,
    Segment,
    StagedRows,
    SuperBatch,
    row_bytes,
)
from surge_dagster.engine.sources.content import ContentDigest
from surge_dagster.engine.sources.partition import Partition, PartitionRange, RowBatch
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.keys import encode_key

log = logging.getLogger(__name__)

STAGING = ".staging"
_NAME = re.compile(r"(?P<start>\d{1,18})-(?P<stop>\d{1,18})\.parquet")


class Staging:
    """The staged segments of one space, as one run sees them; used by its reader and its publishing
    threads.

    Args:
        target: the output; a segment of another precision or with other columns is not used.
    """

    def __init__(self, target: SpaceTarget) -> None:
        self._target = target
        self._store = target.store
        self._root = f"{STAGING}/{target.space.name}"
        # of segments that earlier runs staged, by encoded key; empty for keys of this run
        self._names: dict[str, list[str]] = {}
        for stored in self._store.list(self._root, deep=True):
            self._names.setdefault(_folder_in(self._root, stored.name), []).append(stored.name)

    def has(self, key: str) -> bool:
        """Return whether anything of a partition was staged, by an earlier run or this one."""
        return bool(self._names) and encode_key(key) in self._names

    def usable(
        self, partition: Partition, within: PartitionRange | None = None
    ) -> list[StagedRows]:
        """Return rows that earlier runs staged of this source version, read in full and valid:
        ascending, without overlap.

        Args:
            within: segments that reach beyond it are left out.

        Other staged objects of the partition stay until the partition is published: another run may
        be using them.
        """
        usable = list[StagedRows]()
        candidates = self._rows(partition, self._names.get(encode_key(partition.key), ()))
        for start, stop in sorted(candidates, key=lambda rows: (rows[0], -rows[1])):
            if usable and start < usable[-1].stop:
                continue
            if within is not None and not within.start <= start < stop <= within.stop:
                continue
            try:
                usable.append(self._checked(partition, start, stop))
            except StoreUnavailable:
                raise
            except (InvalidFile, FileNotFoundError, TransientError) as error:
                # it stays: the disk may answer later, or another run may be able to use it
                log.warning(
                    "staged rows of partition %r are encoded again: %s", partition.key, error
                )
        return usable

    def complete(self, partition: Partition) -> list[StagedRows] | None:
        """Return segments with all rows of this source version, as any runs have staged them by
        now; None if rows are missing.

        They are opened and not read: whoever uses them compares checksums and digests.

        Raises:
            TransientError: a segment is damaged, and was removed; or the store does not answer.
        """
        staged: list[StagedRows] = []
        for start, stop in _path(self._listed(partition), partition.rows or 0):
            try:
                with self.open(partition, start, stop) as reader:
                    staged.append(_staged_rows(reader, start, stop))
            except FileNotFoundError:
                return None  # another run has published the partition, and removes them
            except InvalidFile as error:
                self._store.delete(self._name(partition, start, stop))
                raise TransientError(
                    f"partition {partition.key!r}: all of its rows are staged, and some cannot be "
                    f"used: {error}. They were removed; encode them again.",
                    partition.key,
                ) from error
        return staged or None

    def write(
        self, batch: SuperBatch, segment: Segment, matrix: np.ndarray, vectors: VectorFacts
    ) -> StagedRows:
        """Stage a segment's rows with their vectors [rows, dimension]; they are durable when this
        returns.

        Raises:
            TransientError, OSError: the store does not take it.
        """
        texts = batch.slot.texts(segment.start, segment.stop)
        digest = ContentDigest()
        sizes: list[np.ndarray] = []
        row = 0
        for ids, carried in zip_longest(segment.ids, segment.carried):
            rows = RowBatch(ids, texts[row : row + len(ids)], carried=carried)  # pyright: ignore[reportArgumentType]
            digest.update(rows)
            sizes.append(row_bytes(rows))
            row += len(rows)

        partition = segment.partition
        start = segment.first_row
        name = self._name(partition.source, start, start + row)
        carried_columns = segment.carried_columns
        read = ReadPartition(
            row, digest.hexdigest(), segment.id_type, carried_columns=carried_columns
        )
        facts = replace(self._target.facts(partition, read, vectors), space=name)
        columns = self._target.columns(segment.id_type, carried_columns)
        table = self._target.rows(batch, segment, matrix).table(columns)

        self._names.setdefault(encode_key(partition.key), [])
        with self._store.create(name) as upload, new_writer(upload.sink, columns, facts) as writer:
            for begin, end in pairwise(_group_borders(np.concatenate(sizes))):
                writer.append_table(table.slice(begin, end - begin))
            writer.close()
            upload.publish(lambda: None)
        self._store.sync(self._folder(partition.source))
        return StagedRows(start, start + row, facts.content_digest, vectors)

    @contextlib.contextmanager
    def open(self, partition: Partition, start: int, stop: int) -> Iterator[OutputFile]:
        """Open a staged segment, whose rows `rows` reads.

        Raises:
            FileNotFoundError: it was removed.
            InvalidFile: it is damaged, or is not what its name says; also while its rows are read.
            TransientError: the system does not give it; also while its rows are read.
        """
        name = self._name(partition, start, stop)
        location = self._store.location(name)
        with contextlib.ExitStack() as opened:
            with explained(location):
                source = opened.enter_context(self._store.open(name))
                reader = opened.enter_context(open_output_file(source, READ_BYTES))
                reader.location = location
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

    def rows(self, reader: OutputFile) -> Iterator[pa.RecordBatch]:
        """Yield the rows of an open segment, about a megabyte or one row at a time."""
        space = self._target.space
        batch_rows = rows_at_a_time(0, space.dimension, np.dtype(space.dtype).itemsize)
        for group in range(reader.groups):
            yield from reader.read(batch_rows=batch_rows, groups=[group])

    def remove(self, key: str) -> None:
        """Remove everything staged of a partition, by this run or another; harmless where nothing
        is."""
        if not self.has(key):
            return
        try:
            for stored in list(self._store.list(f"{self._root}/{encode_key(key)}", deep=True)):
                self._store.delete(stored.name)
            self._names.pop(encode_key(key), None)
        except (SurgeError, OSError, Cancelled) as error:  # the next run tries again
            log.warning("what is staged of partition %r could not be removed: %s", key, error)

    def remove_range(self, partition: Partition, rows: PartitionRange) -> None:
        """Remove every segment with some of the rows; raises if one cannot be removed: it would be
        used later."""
        for start, stop in self._listed(partition):
            if start < rows.stop and rows.start < stop:
                self._store.delete(self._name(partition, start, stop))

    def _listed(self, partition: Partition) -> list[tuple[int, int]]:
        names = [stored.name for stored in self._store.list(self._folder(partition))]
        return self._rows(partition, names)

    def _rows(self, partition: Partition, names: Iterable[str]) -> list[tuple[int, int]]:
        """Return the rows of segments of this source version, by their names."""
        folder = f"{self._folder(partition)}/"
        rows: list[tuple[int, int]] = []
        for name in names:
            found = _NAME.fullmatch(name.removeprefix(folder))
            if found is not None and int(found["start"]) < int(found["stop"]):
                rows.append((int(found["start"]), int(found["stop"])))
        return rows

    def _name(self, partition: Partition, start: int, stop: int) -> str:
        return f"{self._folder(partition)}/{start}-{stop}.parquet"

    def _folder(self, partition: Partition) -> str:
        version = desired_version(partition.source_version, self._target.space.name)
        return f"{self._root}/{encode_key(partition.key)}/{version}"

    def _checked(self, partition: Partition, start: int, stop: int) -> StagedRows:
        with self.open(partition, start, stop) as reader:
            rows = 0
            for batch in self.rows(reader):
                wrong = invalid_row(matrix_of(batch), normalized=self._target.space.normalize)
                if wrong is not None:
                    raise InvalidFile(f"row {rows + wrong[0]}: {wrong[1]}")
                rows += batch.num_rows
        if rows != stop - start:
            raise InvalidFile(f"{rows:,} rows could be read of {stop - start:,}")
        return _staged_rows(reader, start, stop)


class StagedRowsDiffer(Exception):
    """Rows that an earlier run staged are not those of the partition; the text says why."""


class StagedRowsCheck:
    """Separates a partition's staged rows from the others while they stream by, and proves that
    they are the same.

    Args:
        staged: ascending, none empty, no two overlapping.
        row: the first row that is read; no staged row is before it.
    """

    def __init__(self, staged: Sequence[StagedRows], row: int = 0) -> None:
        self.row = row
        self._coming = deque(staged)
        self._digest = ContentDigest()

    def cut(self, batch: RowBatch) -> Iterator[tuple[RowBatch, bool]]:
        """Yield the next rows in order, in pieces that are staged (True) or not.

        Raises:
            StagedRowsDiffer: staged rows ended here and were not these.
        """
        done = 0
        while done < len(batch):
            staged = self._coming[0] if self._coming else None
            is_staged = staged is not None and staged.start <= self.row
            stop = len(batch)
            if staged is not None:
                border = staged.stop if is_staged else staged.start
                stop = min(stop, done + border - self.row)
            piece = batch if stop - done == len(batch) else batch.rows(done, stop)
            self.row += len(piece)
            done = stop
            if staged is not None and is_staged:
                self._digest.update(piece)
                if self.row == staged.stop:
                    self._end(staged)
            yield piece, is_staged

    def _end(self, staged: StagedRows) -> None:
        if self._digest.hexdigest() != staged.digest:
            rows = f"{staged.start:,} to {staged.stop:,}"
            raise StagedRowsDiffer(f"its rows {rows} are not those that were staged")
        self._coming.popleft()
        self._digest = ContentDigest()

    def finish(self) -> None:
        """Check the end of the partition.

        Raises:
            StagedRowsDiffer: the partition ends before its staged rows do.
        """
        if self._coming:
            last = self._coming[-1].stop
            raise StagedRowsDiffer(
                f"it has {self.row:,} rows, and {last:,} were there when it was staged"
            )


def _staged_rows(reader: OutputFile, start: int, stop: int) -> StagedRows:
    vectors = VectorFacts(
        **{each.name: getattr(reader.facts, each.name) for each in fields(VectorFacts)}
    )
    return StagedRows(start, stop, reader.facts.content_digest, vectors)


def _path(segments: Iterable[tuple[int, int]], rows: int) -> list[tuple[int, int]]:
    """Return segments that have all rows, each once, ascending; none if rows are missing."""
    # end of a segment by its start, if others lead from there to the last row
    after: dict[int, int] = {}
    for start, stop in sorted(segments, reverse=True):
        if start not in after and (stop == rows or stop in after):
            after[start] = stop
    path: list[tuple[int, int]] = []
    row = 0
    while row in after:
        path.append((row, after[row]))
        row = after[row]
    return path


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
    killed may have left it.

    It does no harm: if it cannot be removed, the log says so and the next run tries again.
    """
    root = f"{STAGING}/{space}"
    try:
        left = [stored.name for stored in store.list(root, deep=True)]
        fresh = {encode_key(key) for key in keys} if left else set[str]()
        for name in left:
            if _folder_in(root, name) in fresh:
                store.delete(name)
    except (SurgeError, OSError) as error:
        log.warning("staged segments in %s could not be removed: %s", store.location(root), error)


def sweep_orphan_files(store: Store) -> None:
    """Remove the temp files of dead writers from every space and from its staged segments.

    They do no harm: if they cannot be removed, the log says so and the next run tries again.
    """
    try:
        spaces = [space.name for space in list_spaces(store)]
    except (SurgeError, OSError) as error:
        log.warning("orphan files in %s could not be listed: %s", store.url, error)
        return
    for space in spaces:
        try:
            store.sweep(space)
            store.sweep(f"{STAGING}/{space}")
        except (SurgeError, OSError) as error:
            log.warning("orphan files in %s could not be removed: %s", store.location(space), error)


def _folder_in(root: str, name: str) -> str:
    return name.removeprefix(f"{root}/").partition("/")[0]
