"""The rows of a partition's old file, from which unchanged texts take their vectors while the new file is gathered.

Yesterday's file is the cache; there is no second store. A row's vector is found by the hash of its text, so it does not
matter whether the row has moved, has another id, or stands between other rows.

Vectors come from pages whose checksums hold, and from row groups in which every vector is finite and has its length;
otherwise the old file counts as damaged, and none of its vectors is used. Nothing here stops a partition: what cannot
be read, does not fit into memory or costs more than encoding is encoded.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.known_vectors import KnownVectors
from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.feed.row_comparison import RowComparison
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import PublishedFile, open_output_file
from surge_dagster.engine.files.rows import OutputFile, check_schema, matrix_of, row_group_rows
from surge_dagster.engine.files.validation import invalid_row
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.old_values import LOOKUP_BYTES, NO_ROW, OldValues
from surge_dagster.engine.run.run_context import RunContext
from surge_dagster.engine.run.superbatch import OpenPartition, RowChanges
from surge_dagster.engine.sources.content import IdSet
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.support.text_hash import HASH_BYTES, TEXT_HASH, text_hashes
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line

log = logging.getLogger(__name__)

ROWS_PER_SAMPLE = 400
UNUSABLE = (InvalidFile, TransientError, *UNREADABLE)
_PIECE_BYTES = 8 * 1024 * 1024  # of vectors that are handed over at a time
_COPIES = 5  # of a row group's vectors: as they are read, with their levels, and decoded
_MOST_READINGS = 10  # of a row group on average: where rows were shuffled, each piece needs most of them
_LEAST_MEASURED = 3
_REMEMBERED = 8
_FALL = 1 / 64


class Rate:
    """Seconds that a piece of work took of late.

    They fall a little with each piece that is left out because of them, so a slow moment does not keep work from being
    done until the end of the run. Where the work stays slow, trying it costs at most an eighth of what is encoded
    instead.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count = 0

    def add(self, seconds: float) -> None:
        """Count a piece of work."""
        self._count += 1
        self.seconds += (seconds - self.seconds) / min(self._count, _REMEMBERED)

    def is_below(self, seconds: float) -> bool:
        """Whether the work takes less than this, as far as that is known; it is left out otherwise."""
        if self._count < _LEAST_MEASURED or self.seconds < seconds:
            return True
        self.seconds -= _FALL * seconds
        return False


class ReadingRates:
    """What reading old files takes in a run, by the bits of their rows: large files say nothing about small ones.

    Attributes:
        opening: of a file, with its hashes.
        groups: of the vectors of a row group.
    """

    def __init__(self) -> None:
        self.opening: defaultdict[int, Rate] = defaultdict(Rate)
        self.groups: defaultdict[int, Rate] = defaultdict(Rate)


class PreviousRows:
    """The rows of one old file while its partition is gathered. Get it from `open_previous_rows`.

    Args:
        reader: the open file.
        partition: that is gathered; `distrusted` is set where the file turns out to be damaged.
        reading: of a row group, measured.
        memory: that may be booked for it.
        reuse: whether vectors are taken from it.
        wants_changes: whether rows are compared by id.

    Raises:
        InvalidFile: the file is damaged.
    """

    def __init__(
        self,
        context: RunContext,
        reader: OutputFile,
        partition: OpenPartition,
        reading: Rate,
        memory: _Memory,
        *,
        reuse: bool,
        wants_changes: bool,
    ) -> None:
        self._context = context
        self._space = context.target.space
        self._reader = reader
        self._partition = partition
        self._reading = reading
        self._memory = memory
        self._random = random.Random(f"{partition.key}:{partition.source.source_version}")
        self._hashes: OldValues | None = None
        if reuse and {"text_hash", "text"} & set(reader.columns.names):
            if memory.reserve(_reading_bytes(reader, self._space)):
                self._hashes, self._group_ends = _read_hashes(reader)
            else:
                log.info("partition %r: its old file is not used, as reading it takes too much memory", partition.key)
        self._comparison = RowComparison(reader, memory.reserve) if wants_changes else None
        self._group: tuple[int, np.ndarray] | None = None
        self._readings = self._found = self._declined = 0

    @property
    def held(self) -> int:
        """Bytes that are booked for it."""
        return self._memory.held

    def known(self, batch: RowBatch) -> Iterator[tuple[RowBatch, KnownVectors | None]]:
        """The next rows of the partition in pieces, with the vectors of those whose texts the old file has.

        Each piece must have been gathered before the next one is taken.
        """
        size = max(1, _PIECE_BYTES // (self._space.dimension * np.dtype(self._space.dtype).itemsize))
        for start in range(0, len(batch) or 1, size):
            piece = batch if len(batch) <= size else batch.rows(start, min(start + size, len(batch)))
            by_id = self._by_id(piece)
            vectors, old_rows = self._known(piece, by_id)
            if self._comparison is not None and by_id is not None:
                is_same = np.zeros(len(piece), np.bool_)
                if vectors is not None:
                    is_same[vectors.rows] = old_rows == by_id[vectors.rows]
                self._comparison.add(by_id, is_same, piece.carried)
            yield piece, vectors

    def skip(self, batch: RowBatch) -> None:
        """Leave out the next rows of the partition, which have new vectors already."""
        by_id = self._by_id(batch)
        if self._comparison is not None and by_id is not None:
            self._comparison.add(by_id, np.zeros(len(batch), np.bool_), batch.carried)

    def changes(self) -> RowChanges | None:
        """How the rows differ from those of the old file, after the last one; None where that is unknown."""
        return None if self._comparison is None else self._comparison.result()

    def give_up(self) -> None:
        """Free its memory: no further vector is taken, and it is unknown what has changed."""
        self._hashes = self._comparison = self._group = None
        self._memory.release()

    def describe(self) -> None:
        """Say in the log what was found."""
        if self._declined:
            log.info(
                "partition %r: %d rows are encoded although the old file has their vectors, because reading them would "
                "take longer: %.2g s per row group, %.2g s per text, %d row groups were read and the file has %d",
                *(self._partition.key, self._declined, self._reading.seconds, self._context.speed.text_seconds),
                *(self._readings, self._reader.groups),
            )
        log.debug("partition %r: %d rows have vectors of the old file", self._partition.key, self._found)

    def _by_id(self, batch: RowBatch) -> np.ndarray | None:
        if self._comparison is None:
            return None
        return self._comparison.old_rows(batch.ids, self._partition.rows)

    def _known(self, batch: RowBatch, by_id: np.ndarray | None) -> tuple[KnownVectors | None, np.ndarray]:
        """The vectors that the old file has of some rows, and the rows of the old file that they come from."""
        nothing = None, np.empty(0, np.int64)
        if self._hashes is None or self._partition.distrusted or not len(batch):
            return nothing
        old = self._hashes.rows(text_hashes(batch.texts), self._partition.rows, by_id)
        truncated, is_certain = self._truncation(np.diff(batch.text_offsets))
        rows = np.flatnonzero(is_certain & (old != NO_ROW))
        groups = np.searchsorted(self._group_ends, old[rows], side="right")
        is_cheaper = self._is_cheaper(groups)
        rows, groups = rows[is_cheaper], groups[is_cheaper]
        if not len(rows):
            return nothing
        try:
            matrix = self._vectors(old[rows], groups)
        except UNUSABLE as error:
            self._partition.distrusted = True
            log.warning(
                "partition %r: its old file is damaged, so the whole partition is encoded: %s",
                *(self._partition.key, first_line(error)),
            )
            return nothing
        return KnownVectors(rows, matrix, truncated[rows], self._sample(len(rows))), old[rows]

    def _truncation(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of texts of the old file with these bytes: whether each was truncated, and whether that is certain."""
        facts = self._reader.facts
        if not facts.truncated:
            return np.zeros(len(lengths), np.bool_), np.ones(len(lengths), np.bool_)
        if not facts.shortest_truncated_bytes:
            return np.zeros(len(lengths), np.bool_), np.zeros(len(lengths), np.bool_)
        truncated = lengths > facts.longest_whole_bytes
        return truncated, truncated | (lengths < facts.shortest_truncated_bytes)

    def _is_cheaper(self, groups: np.ndarray) -> np.ndarray:
        """Which rows cost less to read than to encode, bool, by the row groups that their vectors lie in."""
        wanted, places, rows = np.unique(groups, return_inverse=True, return_counts=True)
        is_cheaper, text_seconds = np.zeros(len(wanted), np.bool_), self._context.speed.text_seconds
        if self._readings < _MOST_READINGS * self._reader.groups:
            is_cheaper[:] = [self._reading.is_below(count * text_seconds) for count in rows.tolist()]
        self._declined += int(rows[~is_cheaper].sum())
        return is_cheaper[places]

    def _vectors(self, old: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """The vectors of some rows of the file, [n, dimension], reading each row group once."""
        matrix = np.empty((len(old), self._space.dimension), self._space.dtype)
        for group in np.unique(groups).tolist():
            if self._group is None or self._group[0] != group:
                self._group = None  # one is held at a time
                self._group = group, self._read_group(group)
            places = np.flatnonzero(groups == group)
            matrix[places] = self._group[1][old[places] - self._group_ends[group]]  # from the group's end
        return matrix

    def _read_group(self, group: int) -> np.ndarray:
        self._readings += 1
        begun = time.perf_counter()
        parts = [matrix_of(batch) for batch in self._reader.read(columns=["embedding"], groups=[group])]
        vectors = parts[0] if len(parts) == 1 else np.concatenate(parts)
        first = int(self._group_ends[group - 1]) if group else 0
        rows = int(self._group_ends[group]) - first
        if len(vectors) != rows:
            raise InvalidFile(f"row group {group} has {len(vectors):,} vectors for {rows:,} rows")
        wrong = invalid_row(vectors, normalized=self._space.normalize)
        if wrong is not None:
            raise InvalidFile(f"row {first + wrong[0]}: {wrong[1]}")
        self._reading.add(time.perf_counter() - begun)
        return vectors

    def _sample(self, rows: int) -> np.ndarray:
        """Which of the next rows are encoded to compare them, bool: one in 400, and at least one of the partition."""
        before, self._found = self._found, self._found + rows
        count = max(self._found // ROWS_PER_SAMPLE - before // ROWS_PER_SAMPLE, 0 if before else 1)
        sampled = np.zeros(rows, np.bool_)
        sampled[self._random.sample(range(rows), min(rows, count))] = True
        return sampled


@contextlib.contextmanager
def open_previous_rows(
    context: RunContext, file: PublishedFile | None, partition: OpenPartition, rates: ReadingRates, *, reuse: bool
) -> Iterator[PreviousRows | None]:
    """The rows of a partition's old file; None where nothing of it is needed, or where it cannot be used.

    Args:
        context: of the run; what the rows take is booked until the end.
        file: the old file, as it was listed.
        rates: of the run.
        reuse: whether vectors may be taken from it; not those of another precision.
    """
    if file is None:
        yield None
        return
    facts, text_seconds = file.facts, context.speed.text_seconds
    opening = rates.opening[facts.rows.bit_length()]
    reuse = reuse and facts.rows > 0 and facts.precision == context.target.precision
    if reuse and not opening.is_below(facts.rows * text_seconds):
        reuse = False
        log.info(
            "partition %r: its old file of %d rows is not used, because opening it would take longer than encoding: "
            "%.2g s, %.2g s per text",
            *(partition.key, facts.rows, opening.seconds, text_seconds),
        )
    wants_changes = context.feed is not None and bool(facts.rows_version)
    previous: PreviousRows | None = None
    memory = _Memory(context, partition.source, facts.rows)
    with contextlib.ExitStack() as opened:
        if reuse or wants_changes:
            opened.callback(memory.release)
            begun, reading = time.perf_counter(), rates.groups[facts.rows.bit_length()]
            try:
                reader = opened.enter_context(_open(context, file))
                previous = PreviousRows(
                    context, reader, partition, reading, memory, reuse=reuse, wants_changes=wants_changes
                )
                opened.callback(previous.describe)
            except UNUSABLE as error:
                where = context.target.store.location(file.stored.name)
                log.warning("%s: its vectors are not used: %s", where, first_line(error))
            opening.add(time.perf_counter() - begun)
        yield previous


class _Memory:
    """Books what an old file takes, as far as it fits beside the ids and pages of its partition's source.

    Args:
        rows: of the file.

    Attributes:
        held: bytes that are booked.
    """

    def __init__(self, context: RunContext, source: Partition, rows: int) -> None:
        memory, ids = context.memory, IdSet().bytes_after(max(source.rows or 0, rows))
        self._context = context
        self._available = memory.source - max(0, source.page_bytes - memory.reader_pages) - 2 * ids
        self.held = 0

    def reserve(self, size: int) -> bool:
        """Book bytes, waiting for other stages; False where they do not fit."""
        if self.held + size > self._available:
            return False
        self._context.reserve(size)
        self.held += size
        return True

    def release(self) -> None:
        """Free everything."""
        self._context.ledger.release(self.held)
        self.held = 0


@contextlib.contextmanager
def _open(context: RunContext, file: PublishedFile) -> Iterator[OutputFile]:
    store, space = context.target.store, context.target.space
    with store.open(file.stored.name) as source, open_output_file(source, space.file_format, mapped=True) as reader:
        check_schema(reader.columns, dimension=space.dimension, dtype=space.dtype)
        if reader.facts != file.facts:
            raise InvalidFile("it was replaced since it was listed")
        yield reader


def _reading_bytes(reader: OutputFile, space: Space) -> int:
    """Upper estimate of the memory that rows of a file take while vectors are taken from it, in bytes."""
    itemsize = np.dtype(space.dtype).itemsize
    rows, row = reader.facts.rows, space.dimension * itemsize
    group, hashing = _COPIES * min(rows, row_group_rows(space.dimension, itemsize)) * row, 0
    if "text_hash" not in reader.columns.names:
        hashing = 2 * max((reader.group_bytes(number) for number in range(reader.groups)), default=0)
    return rows * (HASH_BYTES + LOOKUP_BYTES) + max(group + min(rows * row, _PIECE_BYTES), hashing)


def _read_hashes(reader: OutputFile) -> tuple[OldValues, np.ndarray]:
    """The hashes of all texts of a file, and where its row groups end, int64."""
    name = "text_hash" if "text_hash" in reader.columns.names else "text"
    parts: list[pa.Array] = []
    ends: list[int] = []
    rows = 0
    for group in range(reader.groups):
        for batch in reader.read(columns=[name], groups=[group]):
            column = batch.column(name)
            parts.append(column if name == "text_hash" else text_hashes(column))
            rows += len(column)
        ends.append(rows)
    hashes = pa.concat_arrays(parts) if parts else pa.array([], TEXT_HASH)
    if len(hashes) != reader.facts.rows:
        raise InvalidFile(f"its metadata promise {reader.facts.rows:,} rows and it has {len(hashes):,}")
    return OldValues(hashes), np.array(ends, np.int64)
