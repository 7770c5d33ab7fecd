"""Staging: segments of partitions that are larger than a SuperBatch, kept until the whole file can be written.

    .staging/<space>/<encoded key>/<desired version>/<start>-<stop>.parquet

Each is a complete object that names its rows, its space and its source version, with a digest over its (id, text)
rows. A run that dies loses only the segments that were not staged yet, and a later run, whatever its thresholds,
encodes only the rows that no segment covers. The content digest is unknown while a partition streams in, so the desired
version is the one of the source version.

Two runs may stage the same partition: their objects appear whole and under names that say their rows, so either one's
can be used. The run that has published the partition removes them all; the other run then finds nothing to write its
file from and reports that.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.errors import Cancelled, SurgeError
from surge_dagster.engine.files.facts import (
    WRITER,
    InvalidFile,
    VectorFacts,
    VectorOrigin,
    desired_version,
    guarded_metadata,
)
from surge_dagster.engine.files.parquet import ParquetWriter, read_guarded, read_rows
from surge_dagster.engine.files.rows import (
    READ_BYTES,
    check_schema,
    in_words,
    matrix_of,
    require_carried,
    rows_at_a_time,
)
from surge_dagster.engine.files.validation import invalid_row
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.run.space_target import SpaceTarget
from surge_dagster.engine.run.superbatch import Segment, StagedRows, VectorsNotUsable, row_bytes
from surge_dagster.engine.sources.content import ContentDigest
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.engine.support.text_hash import text_hashes
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line

log = logging.getLogger(__name__)

STAGING = ".staging"
SEGMENT_FORMAT = "segment 2"
_NAME = re.compile(r"(?P<start>\d{1,18})-(?P<stop>\d{1,18})\.parquet")
_GROUP_STRING_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SegmentFacts(VectorOrigin):
    """The facts in the footer of a staged segment.

    Attributes:
        source_version: of the partition when it was read.
        content_digest: over the segment's own (id, text) rows.
        first_row: place of its first row in the partition.
        widest_row: largest row, in bytes of id, text and carried columns.
        truncated, carried_columns: see `FileFacts`.
    """

    partition_key: str
    space: str
    precision: str
    source_version: str
    content_digest: str
    first_row: int
    rows: int
    truncated: int
    widest_row: int
    writer: str = WRITER
    carried_columns: str = ""

    @property
    def vectors(self) -> VectorFacts:
        """Where the vectors come from."""
        return VectorFacts(**{fact.name: getattr(self, fact.name) for fact in fields(VectorFacts)})


class Staging:
    """The staged segments of one space, as one run sees them; used by its reader and its publishing threads.

    Args:
        target: the output; a segment of another precision, or with texts where it has none, is not used.
    """

    def __init__(self, target: SpaceTarget) -> None:
        self._target = target
        self._store, self._space = store, space = target.store, target.space
        self._root = f"{STAGING}/{space.name}"
        self._found: dict[str, list[str]] = {}  # left by earlier runs, names by encoded key
        self._known: set[str] = set()  # encoded keys with anything staged
        self._discarded: set[str] = set()
        store.sweep(self._root)
        for stored in store.list(self._root, deep=True):
            folder = stored.name.removeprefix(f"{self._root}/").partition("/")[0]
            self._found.setdefault(folder, []).append(stored.name)
        self._known.update(self._found)

    def knows(self, key: str) -> bool:
        """Whether anything of a partition was found staged, or was staged since."""
        return bool(self._known) and encode_key(key) in self._known

    def usable(self, partition: Partition) -> list[StagedRows]:
        """Rows that earlier runs staged of this source version, read in full and valid: ascending, no overlap.

        Other staged objects of the partition stay until the partition is published: another run may be using them.
        """
        folder = self._folder(partition)
        candidates: list[tuple[int, int, str]] = []
        for name in self._found.pop(encode_key(partition.key), []):
            match = _NAME.fullmatch(name.removeprefix(f"{folder}/"))
            if match is not None and int(match["start"]) < int(match["stop"]):
                candidates.append((int(match["start"]), int(match["stop"]), name))
        chosen: list[StagedRows] = []
        for start, stop, name in sorted(candidates, key=lambda found: (found[0], -found[1])):
            if chosen and start < chosen[-1].stop:
                continue
            try:
                chosen.append(self._checked(partition, start, stop))
            except (InvalidFile, OSError) as error:
                # It stays: the disk may answer later, or another run may be able to use it.
                log.warning("%s is encoded again: %s", self._store.location(name), error)
        return chosen

    def write(
        self, segment: Segment, texts: pa.LargeStringArray, matrix: np.ndarray, vectors: VectorFacts
    ) -> StagedRows:
        """Stage a segment's rows; they are durable when this returns.

        Args:
            texts: as many as the segment has rows.
            matrix: [rows, dimension].
            vectors: where these come from.

        Raises:
            TransientError, OSError: the store does not take it.
        """
        source, start = segment.partition.source, segment.first_row
        digest = ContentDigest()
        sizes: list[np.ndarray] = []
        row = 0
        for ids, carried in zip_longest(segment.ids, segment.carried):
            batch = RowBatch(ids, texts[row : row + len(ids)], carried=carried)  # pyright: ignore[reportArgumentType]
            digest.update(batch)
            sizes.append(row_bytes(batch))
            row += len(ids)
        facts = SegmentFacts(
            partition_key=source.key,
            space=self._space.name,
            precision=self._target.precision,
            source_version=source.source_version,
            content_digest=digest.hexdigest(),
            first_row=start,
            rows=len(matrix),
            widest_row=max(int(piece.max(initial=0)) for piece in sizes),
            carried_columns=in_words(segment.carried_columns),
            **asdict(vectors),
        )
        self._known.add(encode_key(source.key))
        with contextlib.ExitStack() as cleanup:
            upload = cleanup.enter_context(self._store.create(self._name(source, start, start + facts.rows)))
            columns = self._target.columns(segment.id_type, segment.carried_columns)
            metadata = guarded_metadata(facts, SEGMENT_FORMAT)
            writer = cleanup.enter_context(ParquetWriter(upload.sink, columns, metadata))
            column, begun = pa.chunked_array(list(segment.ids), type=columns.field("id").type), 0
            named = segment.carried_columns
            carried = None if named is None else pa.Table.from_batches(segment.carried, named)
            for end in _borders(np.concatenate(sizes)):
                part = slice(begun, end)
                piece: Any = texts[part]
                kept = piece if self._target.include_text else None
                further = None if carried is None else carried[part]
                writer.append(column[part], kept, text_hashes(piece), matrix[part], further)
                begun = end
            writer.close()
            upload.publish(lambda: None)
        self._store.sync(self._folder(source))
        return StagedRows(start, start + len(matrix), facts.content_digest, vectors)

    @contextlib.contextmanager
    def open(
        self, partition: Partition, start: int, stop: int
    ) -> Iterator[tuple[SegmentFacts, Iterator[pa.RecordBatch]]]:
        """A staged segment: its facts, and its rows in batches of about a megabyte.

        Raises:
            FileNotFoundError: there is none.
            InvalidFile: it is damaged, or is not what its name says; also while its rows are read.
            OSError: the system does not give it; also while its rows are read.
        """
        with contextlib.ExitStack() as opened:
            source = opened.enter_context(self._store.open(self._name(partition, start, stop)))
            try:
                reader = opened.enter_context(
                    pq.ParquetFile(source, pre_buffer=False, buffer_size=READ_BYTES, page_checksum_verification=True)
                )
                columns = reader.schema_arrow
            except UNREADABLE as error:
                raise InvalidFile(f"it cannot be read ({first_line(error)})") from error
            facts = read_guarded(reader.metadata, SegmentFacts, SEGMENT_FORMAT)
            self._require(facts, partition, start, stop)
            check_schema(columns, dimension=self._space.dimension, dtype=self._space.dtype)
            require_carried(facts.carried_columns, columns)
            if "text_hash" not in columns.names or ("text" in columns.names) != self._target.include_text:
                raise InvalidFile(f"its columns are {columns.names}, which are not those of the files of this run")
            rows = rows_at_a_time(facts.widest_row, self._space.dimension, np.dtype(self._space.dtype).itemsize)
            yield facts, read_rows(reader, batch_rows=rows)

    def discard(self, key: str) -> None:
        """Note that a partition was refused: `remove_discarded` removes its staged objects when the run has ended."""
        self._discarded.add(key)

    def remove_discarded(self) -> None:
        """Remove everything staged of the partitions that were discarded."""
        for key in self._discarded:
            self.remove(key)

    def remove(self, key: str) -> None:
        """Remove everything staged of a partition, by this run or another; harmless where nothing is."""
        if not self.knows(key):
            return
        folder = encode_key(key)
        try:
            for stored in list(self._store.list(f"{self._root}/{folder}", deep=True)):
                self._store.delete(stored.name)
            self._known.discard(folder)
        except (SurgeError, OSError, Cancelled) as error:  # it does no harm, and the next run tries again
            log.warning("what is staged of partition %r could not be removed: %s", key, error)

    def _name(self, partition: Partition, start: int, stop: int) -> str:
        return f"{self._folder(partition)}/{start}-{stop}.parquet"

    def _folder(self, partition: Partition) -> str:
        version = desired_version(partition.source_version, self._space.name)
        return f"{self._root}/{encode_key(partition.key)}/{version}"

    def _checked(self, partition: Partition, start: int, stop: int) -> StagedRows:
        with self.open(partition, start, stop) as (facts, batches):
            rows = 0
            for batch in batches:
                wrong = invalid_row(matrix_of(batch), normalized=self._space.normalize)
                if wrong is not None:
                    raise InvalidFile(f"row {rows + wrong[0]}: {wrong[1]}")
                rows += batch.num_rows
        if rows != facts.rows:
            raise InvalidFile(f"{rows:,} rows could be read of {facts.rows:,}")
        return StagedRows(start, stop, facts.content_digest, facts.vectors)

    def _require(self, facts: SegmentFacts, partition: Partition, start: int, stop: int) -> None:
        expected = {
            "partition_key": partition.key,
            "space": self._space.name,
            "precision": self._target.precision,
            "source_version": partition.source_version,
            "first_row": start,
            "rows": stop - start,
        }
        for name, value in expected.items():
            if getattr(facts, name) != value:
                raise InvalidFile(f"its {name} is {getattr(facts, name)!r}; expected {value!r}")


class StagedRowsCheck:
    """Separates a partition's staged rows from the others while they stream by, and proves that they are the same.

    Args:
        staged: ascending, none empty, no two overlapping.
    """

    def __init__(self, staged: Sequence[StagedRows]) -> None:
        self._left = list(staged)[::-1]
        self._row = 0
        self._digest = ContentDigest()

    def cut(self, batch: RowBatch) -> Iterator[tuple[RowBatch, bool]]:
        """The next rows in order, in pieces that are staged (True) or not; an empty batch is not.

        Raises:
            VectorsNotUsable: staged rows ended here and were not these.
        """
        if not self._left:
            self._row += len(batch)
            yield batch, False
            return
        done = 0
        while done < len(batch):
            next_one = self._left[-1] if self._left else None
            inside = next_one if next_one is not None and next_one.start <= self._row else None
            border = inside.stop if inside else next_one.start if next_one else self._row + len(batch)
            stop = min(len(batch), done + border - self._row)
            piece = batch.rows(done, stop)
            self._row += stop - done
            done = stop
            if inside is not None:
                self._follow(piece, inside)
            yield piece, inside is not None

    def finish(self) -> None:
        """Check the end of the partition.

        Raises:
            VectorsNotUsable: the partition ends before its staged rows do.
        """
        if self._left:
            raise VectorsNotUsable(
                f"it has {self._row:,} rows, and {self._left[0].stop:,} were there when it was staged"
            )

    def _follow(self, piece: RowBatch, staged: StagedRows) -> None:
        self._digest.update(piece)
        if self._row < staged.stop:
            return
        if self._digest.hexdigest() != staged.digest:
            raise VectorsNotUsable(f"its rows {staged.start:,} to {staged.stop:,} are not those that were staged")
        self._left.pop()
        self._digest = ContentDigest()


def _borders(sizes: np.ndarray) -> list[int]:
    """Where row groups end, so that each has few megabytes of strings: a reader takes a page of one at a time."""
    ends = np.cumsum(sizes)
    borders: list[int] = []
    while (borders[-1] if borders else 0) < len(sizes):
        start = borders[-1] if borders else 0
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + _GROUP_STRING_BYTES, side="right"))
        borders.append(max(stop, start + 1))
    return borders


def remove_staged(store: Store, space: str, keys: Iterable[str]) -> None:
    """Remove what is staged of partitions whose files are up to date; a run that was killed may have left it.

    It does no harm: where it cannot be removed, the log says so and the next run tries again.
    """
    root = f"{STAGING}/{space}"
    try:
        found = [stored.name for stored in store.list(root, deep=True)]
        fresh = {encode_key(key) for key in keys} if found else set[str]()
        for name in found:
            if name.removeprefix(f"{root}/").partition("/")[0] in fresh:
                store.delete(name)
    except (SurgeError, OSError) as error:
        log.warning("staged segments in %s could not be removed: %s", store.location(root), error)


def sweep_orphan_files(store: Store, claimed: str | None = None) -> None:
    """Remove the temp files of dead writers from every space and from its staged segments.

    They do no harm: where they cannot be removed, the log says so and the next run tries again.

    Args:
        claimed: name of a space to leave out, because claiming it has swept it.
    """
    try:
        spaces = list_spaces(store)
    except (SurgeError, OSError) as error:
        log.warning("orphan files in %s could not be listed: %s", store.url, error)
        return
    for space in spaces:
        if space.name == claimed:
            continue
        try:
            store.sweep(space.name)
            store.sweep(f"{STAGING}/{space.name}")
        except (SurgeError, OSError) as error:
            log.warning("orphan files in %s could not be removed: %s", store.location(space.name), error)
