"""The rows of a partition's old file, from which unchanged texts take their vectors while the new
file is gathered.

Yesterday's file is the cache; there is no second store. A row's vector is found by the hash of its
text, so it does not matter whether the row has moved, has another id, or stands between other rows.

Vectors come from pages whose checksums hold, and from row groups in which every vector is finite
and has its length. At the first damage the rest of the partition is encoded. Nothing here refuses a
partition: what cannot be read, or does not fit into memory, is encoded.

A model or a device may give other vectors than it gave before, under the same name. So a run first
draws one row from each of up to 32 files of its space, encodes their texts and compares
(`ReuseCheck`). If one vector differs by more than the precision promises, the run takes no vectors
from old files. Files without a text column cannot be compared, and their vectors are reused. Rows
that an earlier run staged are used in any case.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.arena import KnownVectors
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import EncoderError, StoreUnavailable, TransientError
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import open_published
from surge_dagster.engine.files.parquet import OutputFile
from surge_dagster.engine.files.rows import invalid_row, matrix_of, row_group_rows
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.change_feed import RowChanges, RowComparison
from surge_dagster.engine.run.old_values import LOOKUP_BYTES, NO_ROW, OldValues
from surge_dagster.engine.run.report import OldVectorSample
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.superbatch import PartitionToRead, SpaceTarget, StagedRows
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.support.cosines import LOWEST_COSINE, cosines
from surge_dagster.engine.support.printable import first_line
from surge_dagster.engine.support.text_hash import HASH_BYTES, TEXT_HASH, text_hashes
from surge_dagster.engine.support.unreadable import UNREADABLE

log = logging.getLogger(__name__)

_MOST_FILES = 32
_MOST_TEXT_BYTES = 64 * 1024
_SEED = 1
UNUSABLE = (InvalidFile, TransientError, *UNREADABLE)
_PIECE_BYTES = 8 * 1024 * 1024  # of vectors that are handed over at a time
_COPIES = 5  # of a row group's vectors: as they are read, with their levels, and decoded
# of a row group on average: if rows were shuffled, each piece needs most of them
_MOST_READINGS = 10


@dataclass(eq=False, slots=True)
class ReuseAnswer:
    """Whether old vectors may be reused; None until it is decided. Runs of one pool may share it.

    Attributes:
        lock: held while a run compares the sample.
    """

    allowed: bool | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class ReuseCheck:
    """Decides whether old vectors may be reused; used by the reader.

    Args:
        names: of the files of the space, sorted.
        report: takes the result of the comparison.
        answer: of runs that share it; the first one compares.
    """

    def __init__(
        self,
        names: Sequence[str],
        target: SpaceTarget,
        pool: EncoderPool,
        memory: RunMemory,
        report: Callable[[OldVectorSample], None],
        answer: ReuseAnswer,
    ) -> None:
        self._names = names
        self._target = target
        self._pool = pool
        self._memory = memory
        self._report = report
        self._random = random.Random(_SEED)
        self._answer = answer

    def allows_reuse(self) -> bool:
        """Return whether old vectors may be reused; the first call compares the sample."""
        answer = self._answer
        with answer.lock:
            if answer.allowed is None:
                with self._memory.held(self._memory.plan.reader):
                    answer.allowed = self._compare()
            return answer.allowed

    def _compare(self) -> bool:
        drawn = self._random.sample(self._names, min(_MOST_FILES, len(self._names)))
        rows = [row for name in drawn if (row := self._row_of(name)) is not None]
        if not rows:
            return True

        keys, texts, old_vectors = zip(*rows, strict=True)
        try:
            vectors = self._pool.vectors(pa.array(texts, pa.large_string()))
        except EncoderError as error:
            log.warning(
                "no vectors of old files are reused, as a sample of them could not be compared: %s",
                error,
            )
            return False

        found = cosines(vectors, np.stack(old_vectors)).tolist()
        by_key = dict(zip(keys, found, strict=True))
        sample = OldVectorSample(by_key, LOWEST_COSINE[self._target.precision])
        self._report(sample)
        if sample.drifted:
            log.warning("%s", sample.message)
        return not sample.drifted

    def _row_of(self, name: str) -> tuple[str, str, np.ndarray] | None:
        """Return key, text and vector of a row of a file; None if it cannot be read or compared."""
        try:
            with open_published(self._target.store, self._target.space, name) as reader:
                has_rows = "text" in reader.columns.names and reader.facts.rows
                if has_rows and reader.facts.precision == self._target.precision:
                    return self._row_in(reader)
        except StoreUnavailable:
            raise
        except UNUSABLE:  # the reader of its partition reports it
            pass
        return None

    def _row_in(self, reader: OutputFile) -> tuple[str, str, np.ndarray] | None:
        """Return the first row of a random row group; None if its text is too long."""
        group = self._random.randrange(reader.groups)
        row = next(reader.read(columns=["text", "embedding"], groups=[group], batch_rows=1))
        text = row.column("text")[0].as_py()
        if len(text.encode()) > _MOST_TEXT_BYTES:
            return None
        return reader.facts.partition_key, text, matrix_of(row)[0].copy()


@dataclass(frozen=True, slots=True)
class _Group:
    """A row group of an old file: vectors, [rows, dimension], and which texts were truncated."""

    number: int
    first_row: int
    vectors: np.ndarray
    truncated: np.ndarray


class OldRows:
    """The rows of one old file while its partition is gathered; see `open_old_rows`."""

    def __init__(
        self,
        target: SpaceTarget,
        reader: OutputFile,
        partition: PartitionToRead,
        memory: _Memory,
        is_compared: bool,
        takes_vectors: bool,
        reused_rows: Callable[[StagedRows], np.ndarray] | None,
    ) -> None:
        self._space = target.space
        self._reader = reader
        self._partition = partition
        self._memory = memory
        self._hashes: OldValues | None = None
        self._takes_vectors = takes_vectors
        self._reused_rows = reused_rows
        needs_texts = takes_vectors or (is_compared and reused_rows is not None)
        if needs_texts and reader.facts.rows and reader.facts.precision == target.precision:
            if memory.reserve(_reading_bytes(reader, self._space)):
                self._hashes = read_hashes(reader)
                self._group_ends = reader.group_ends()
            else:
                log.info(
                    "partition %r: its old file is not used, as reading it takes too much memory",
                    partition.key,
                )
        self._compared: RowComparison | None = None
        if is_compared:
            include_text = target.include_text
            self._compared = RowComparison(reader, memory.reserve, include_text=include_text)
        self._group: _Group | None = None
        self._readings = 0
        self._flags: tuple[StagedRows, np.ndarray] | None = None

    @property
    def held(self) -> int:
        return self._memory.held

    def pieces(self, batch: RowBatch) -> Iterator[tuple[RowBatch, KnownVectors | None]]:
        """Yield the next rows of the partition in pieces, with vectors of the old file."""
        row_bytes = self._space.dimension * np.dtype(self._space.dtype).itemsize
        size = max(1, _PIECE_BYTES // row_bytes)
        for start in range(0, len(batch) or 1, size):
            piece = batch
            if len(batch) > size:
                piece = batch.rows(start, min(start + size, len(batch)))
            by_id = self._by_id(piece)
            vectors, old_rows = self._vectors(piece, by_id)
            if self._compared is not None and by_id is not None:
                is_same = np.zeros(len(piece), np.bool_)
                if vectors is not None:
                    is_same[vectors.rows] = old_rows == by_id[vectors.rows]
                self._compared.add(piece, by_id, is_same)
            yield piece, vectors

    def skip(self, batch: RowBatch, staged: StagedRows, place: int) -> None:
        """Leave out the next rows of the partition, which are staged.

        Args:
            place: of the first one among the staged rows.
        """
        by_id = self._by_id(batch)
        if self._compared is None or by_id is None:
            return
        is_same = np.zeros(len(batch), np.bool_)
        is_of_this_file = staged.old_rows_version == self._reader.facts.rows_version
        if self._hashes is not None and is_of_this_file:
            has_same_text = self._hashes.rows(text_hashes(batch.texts), by_id) == by_id
            reused = self._flags_of(staged)[place : place + len(batch)]
            is_same = reused & has_same_text & (by_id != NO_ROW)
        self._compared.add(batch, by_id, is_same)

    def _flags_of(self, staged: StagedRows) -> np.ndarray:
        """Return which staged rows have vectors of an old file; those of one segment are kept."""
        assert self._reused_rows is not None
        if self._flags is None or self._flags[0] is not staged:
            self._flags = staged, self._reused_rows(staged)
        return self._flags[1]

    def changes(self) -> RowChanges | None:
        """Return how the rows differ from those of the old file, after the last one, if known."""
        return None if self._compared is None else self._compared.result()

    def _by_id(self, batch: RowBatch) -> np.ndarray | None:
        return None if self._compared is None else self._compared.old_rows(batch.ids)

    def _vectors(
        self, batch: RowBatch, by_id: np.ndarray | None
    ) -> tuple[KnownVectors | None, np.ndarray]:
        """Return the old file's vectors of some rows, and which of its rows have them."""
        nothing = None, np.empty(0, np.int64)
        is_exhausted = self._readings >= _MOST_READINGS * self._reader.groups
        if self._hashes is None or not self._takes_vectors or is_exhausted or not len(batch):
            return nothing
        old = self._hashes.rows(text_hashes(batch.texts), by_id)
        rows = np.flatnonzero(old != NO_ROW)
        if not len(rows):
            return nothing
        try:
            return self._taken(rows, old[rows]), old[rows]
        except StoreUnavailable:
            raise
        except UNUSABLE as error:
            log.warning(
                "partition %r: no more vectors are taken from its old file: %s",
                self._partition.key,
                first_line(error),
            )
            self._takes_vectors = False
            self._group = None
            return nothing

    def _taken(self, rows: np.ndarray, old: np.ndarray) -> KnownVectors:
        """Return vectors of rows of the file for these rows; reads each row group once."""
        groups = np.searchsorted(self._group_ends, old, side="right")
        matrix = np.empty((len(old), self._space.dimension), self._space.dtype)
        truncated = np.empty(len(old), np.bool_)
        for number in np.unique(groups).tolist():
            if self._group is None or self._group.number != number:
                self._group = None  # one is held at a time
                self._group = self._read_group(number)
            places = np.flatnonzero(groups == number)
            rows_in_group = old[places] - self._group.first_row
            matrix[places] = self._group.vectors[rows_in_group]
            truncated[places] = self._group.truncated[rows_in_group]
        return KnownVectors(rows, matrix, truncated)

    def _read_group(self, number: int) -> _Group:
        self._readings += 1
        batches = list(self._reader.read(columns=["truncated", "embedding"], groups=[number]))
        vectors = np.concatenate([matrix_of(batch) for batch in batches])
        truncated = np.concatenate([batch.column("truncated") for batch in batches])
        first = int(self._group_ends[number - 1]) if number else 0
        rows = int(self._group_ends[number]) - first
        if len(vectors) != rows:
            raise InvalidFile(f"row group {number} has {len(vectors):,} vectors for {rows:,} rows")
        has_blank_texts = self._reader.facts.blank_texts > 0
        wrong = invalid_row(
            vectors, normalized=self._space.normalize, may_be_zero=lambda row: has_blank_texts
        )
        if wrong is not None:
            raise InvalidFile(f"row {first + wrong[0]}: {wrong[1]}")
        return _Group(number, first, vectors, truncated)


@contextlib.contextmanager
def open_old_rows(
    partition: PartitionToRead,
    target: SpaceTarget,
    memory: RunMemory,
    *,
    is_compared: bool,
    takes_vectors: bool,
    reused_rows: Callable[[StagedRows], np.ndarray] | None = None,
) -> Iterator[OldRows | None]:
    """Yield the rows of a partition's old file; None if it has no file that can be used.

    Args:
        is_compared, takes_vectors: what it is used for.
        reused_rows: returns which staged rows have vectors of an old file; None if none is staged.
    """
    file = partition.old_file
    if file is None or not (takes_vectors or is_compared):
        yield None
        return

    with contextlib.ExitStack() as opened:
        booked = _Memory(memory, partition.source, file.facts.rows)
        opened.callback(booked.release)
        old_rows: OldRows | None = None
        try:
            published = open_published(target.store, target.space, file.stored.name, file)
            reader = opened.enter_context(published)
            old_rows = OldRows(
                target, reader, partition, booked, is_compared, takes_vectors, reused_rows
            )
        except StoreUnavailable:
            raise
        except UNUSABLE as error:
            booked.release()
            log.warning(
                "partition %r: vectors of its old file are not used: %s",
                partition.key,
                first_line(error),
            )
        yield old_rows


class _Memory:
    """Books what an old file takes, as far as the ids and pages of its partition's source leave
    room."""

    def __init__(self, memory: RunMemory, source: Partition, rows: int) -> None:
        ids = source.bytes_of_ids(max(source.rows or 0, rows))
        self._memory = memory
        self._available = memory.source_bytes(source) - 2 * ids
        self.held = 0

    def reserve(self, size: int) -> bool:
        """Book bytes, waiting for other stages; return False if they do not fit."""
        if self.held + size > self._available:
            return False
        self._memory.reserve(size)
        self.held += size
        return True

    def release(self) -> None:
        """Free everything."""
        self._memory.ledger.release(self.held)
        self.held = 0


def _reading_bytes(reader: OutputFile, space: Space) -> int:
    """Return an upper estimate of the memory of taking vectors from a file, in bytes."""
    itemsize = np.dtype(space.dtype).itemsize
    rows = reader.facts.rows
    row_bytes = space.dimension * itemsize
    group = _COPIES * min(rows, row_group_rows(space.dimension, itemsize)) * row_bytes
    return rows * (HASH_BYTES + LOOKUP_BYTES) + group + min(rows * row_bytes, _PIECE_BYTES)


def read_hashes(reader: OutputFile) -> OldValues:
    """Return the hashes of all texts of a file."""
    parts = [batch.column("text_hash") for batch in reader.read(columns=["text_hash"])]
    return OldValues(pa.concat_arrays([pa.array([], TEXT_HASH), *parts]))
