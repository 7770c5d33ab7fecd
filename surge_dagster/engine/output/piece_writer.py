"""One piece of an encoded SuperBatch becomes a file: looked at, compared with what it replaces, serialized, published.

A piece is a partition, or a segment of a split one, which is staged as an object of its own. On a local disk, tiny
partitions that are neighbours are one group: their vectors are looked at together, their files are built together and
are published in two steps, so that a thread which waits for a disk waits for several files at once.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import DataError
from surge_dagster.engine.ledger import Ledger
from surge_dagster.engine.output.drift import Comparisons
from surge_dagster.engine.output.embedding_file import FileFacts
from surge_dagster.engine.output.file_formats import file_name, write_file
from surge_dagster.engine.output.file_group import GroupRows, fits, group_files
from surge_dagster.engine.output.local_store import publish_together
from surge_dagster.engine.output.publication import Publication, Spent
from surge_dagster.engine.output.receipts import facts_of_file, receipt_of, require_unchanged
from surge_dagster.engine.output.staging import Staging
from surge_dagster.engine.output.store import Store, StoredObject, Upload
from surge_dagster.engine.output.validation import invalid_row
from surge_dagster.engine.superbatch import Segment, StagedRows, SuperBatch
from surge_dagster.engine.telemetry import Receipt

# What building a group takes beside its vectors stays within what is booked for any piece of each thread; and with
# more files a thread, the files that all threads have open would come near what a process may have.
_MOST_PARTITIONS = 16
_MOST_ROWS = 256
_MOST_STRING_BYTES = 12 * 1024


class PieceWriter:
    """Writes pieces; used by all publishing threads.

    Args:
        store, space: where to.
        staging: where segments of split partitions wait for the others.
        precision: recorded in each file.
        include_text: whether files have a text column.
        ledger: booked with what a comparison with an old file takes.
        threads: that write at a time; each has the files of a group open.
    """

    def __init__(
        self,
        store: Store,
        space: Space,
        staging: Staging,
        *,
        precision: str,
        include_text: bool,
        ledger: Ledger,
        threads: int,
    ) -> None:
        # A quarter of what the process may have open at a time; Debian's default is 1,024.
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = _MOST_PARTITIONS if descriptors == resource.RLIM_INFINITY else descriptors // (4 * threads)
        self._most_partitions = max(1, min(_MOST_PARTITIONS, spare))
        self._store = store
        self._space = space
        self._staging = staging
        self._precision = precision
        self._include_text = include_text
        self.drift = Comparisons(store, space, ledger)

    def pieces(self, batch: SuperBatch) -> deque[tuple[Segment, ...]]:
        """A SuperBatch's segments in order, alone or with those neighbours that they are written with."""
        # In a bucket each is a request, which is sent as soon as a thread is free.
        if self._store.is_remote or self._space.file_format != "parquet":
            return deque((segment,) for segment in batch.segments)
        itemsize = np.dtype(self._space.dtype).itemsize
        offsets = batch.slot.offsets
        text_ends = offsets[[segment.stop for segment in batch.segments]].tolist()
        text_begins = offsets[[segment.start for segment in batch.segments]].tolist()
        pieces: deque[tuple[Segment, ...]] = deque()
        group: list[Segment] = []
        rows = string_bytes = 0
        for segment, text_begin, text_end in zip(batch.segments, text_begins, text_ends, strict=True):
            own_rows = segment.stop - segment.start
            id_bytes = segment.id_bytes
            own_bytes = (
                text_end - text_begin + (sum(ids.nbytes for ids in segment.ids) if id_bytes is None else id_bytes)
            )
            is_tiny = (
                fits(own_rows, self._space.dimension, itemsize, own_bytes)
                and is_whole(segment)
                and segment.partition.replaces is None
            )
            goes_on = is_tiny and bool(group) and _are_neighbours(group[-1], segment)
            if group and not (
                goes_on
                and len(group) < self._most_partitions
                and rows + own_rows <= _MOST_ROWS
                and string_bytes + own_bytes <= _MOST_STRING_BYTES
            ):
                pieces.append(tuple(group))
                group, rows, string_bytes = [], 0, 0
            if is_tiny:
                group.append(segment)
                rows, string_bytes = rows + own_rows, string_bytes + own_bytes
            else:
                pieces.append((segment,))
        if group:
            pieces.append(tuple(group))
        return pieces

    def publish(self, publication: Publication, segment: Segment) -> tuple[Receipt, Spent]:
        """Write the file of a partition that lies whole in its SuperBatch.

        Raises:
            DataError: a vector of it is no embedding.
            SurgeError, OSError: it cannot be written, or is no longer wanted.
        """
        partition, slot = segment.partition, publication.batch.slot
        begun = time.perf_counter()
        matrix = self._sound_vectors(publication, segment)
        texts = slot.texts(segment.start, segment.stop) if self._include_text else None
        truncated = slot.truncated(segment.start, segment.stop)
        facts = facts_of_file(partition, self._space, precision=self._precision, rows=len(matrix), truncated=truncated)
        self._compare(publication, segment, matrix)
        with self._store.create(file_name(self._space.name, partition.key, self._space.file_format)) as upload:
            write_file(
                self._space.file_format, upload, segment.ids, partition.id_type or pa.string(), texts, matrix, facts
            )
            serialized = time.perf_counter()
            stored = upload.publish(lambda: require_unchanged(partition.source))
        spent = Spent(begun, serialized, time.perf_counter(), truncated)
        return self._receipt(publication, facts, stored), spent

    def publish_group(
        self, publication: Publication, segments: Sequence[Segment]
    ) -> tuple[list[Receipt | Exception], Spent] | None:
        """Write the files of several partitions, as `publish` writes each of them.

        Returns:
            For each its receipt or what went wrong with it alone; None when something is wrong with one of them that
            has to be looked for: then nothing was written.
        """
        first, last, slot = segments[0].start, segments[-1].stop, publication.batch.slot
        begun = time.perf_counter()
        matrix = slot.matrix(first, last)
        if publication.encoded.failed_row(first, last) or invalid_row(matrix, normalized=self._space.normalize):
            return None
        all_truncated = slot.truncated(first, last)
        facts = [
            facts_of_file(
                segment.partition,
                self._space,
                precision=self._precision,
                rows=segment.stop - segment.start,
                truncated=slot.truncated(segment.start, segment.stop) if all_truncated else 0,
            )
            for segment in segments
        ]
        rows = GroupRows(
            pa.concat_arrays([ids for segment in segments for ids in segment.ids]),
            slot.texts(first, last) if self._include_text else None,
            matrix,
            [segment.start - first for segment in segments] + [last - first],
        )
        outcomes: dict[str, StoredObject | Exception] = {}
        opened: dict[str, Upload] = {}
        try:
            for segment, said, content in zip(segments, facts, group_files(rows, facts), strict=True):
                key = said.partition_key
                try:
                    opened[key] = self._store.create(
                        file_name(self._space.name, key, self._space.file_format)
                    ).__enter__()
                    if content is None:
                        self._write_alone(opened[key], publication, segment, said)
                    else:
                        opened[key].write(content)
                except Exception as error:  # it is this partition's, and is told as such
                    outcomes[key] = error
            serialized = time.perf_counter()
            looks = {
                segment.partition.key: partial(require_unchanged, segment.partition.source) for segment in segments
            }
            waiting = {key: (upload, looks[key]) for key, upload in opened.items() if key not in outcomes}
            outcomes |= zip(waiting, publish_together(list(waiting.values())), strict=True)
        finally:
            for key, upload in opened.items():
                try:
                    upload.__exit__(None, None, None)
                except Exception as error:
                    outcomes[key] = error
        ended = time.perf_counter()
        told = [self._receipt_or_error(publication, said, outcomes[said.partition_key]) for said in facts]
        truncated = sum(outcome.truncated for outcome in told if isinstance(outcome, Receipt))
        return told, Spent(begun, serialized, ended, truncated)

    def stage(self, publication: Publication, segment: Segment) -> tuple[StagedRows, Spent]:
        """Write a segment of a split partition aside.

        Raises:
            DataError: a vector of it is no embedding.
            SurgeError, OSError: it cannot be written.
        """
        slot = publication.batch.slot
        begun = time.perf_counter()
        matrix = self._sound_vectors(publication, segment)
        truncated = slot.truncated(segment.start, segment.stop)
        self._compare(publication, segment, matrix)
        checked = time.perf_counter()
        staged = self._staging.write(
            segment.partition,
            segment.first_row,
            segment.ids,
            slot.texts(segment.start, segment.stop),
            matrix,
            truncated=truncated,
        )
        return staged, Spent(begun, checked, time.perf_counter(), truncated)

    def _write_alone(self, upload: Upload, publication: Publication, segment: Segment, facts: FileFacts) -> None:
        slot = publication.batch.slot
        texts = slot.texts(segment.start, segment.stop) if self._include_text else None
        matrix = slot.matrix(segment.start, segment.stop)
        write_file(
            self._space.file_format, upload, segment.ids, segment.partition.id_type or pa.string(), texts, matrix, facts
        )

    def _receipt(self, publication: Publication, facts: FileFacts, stored: StoredObject) -> Receipt:
        return receipt_of(
            facts,
            stored,
            self._store.location(stored.name),
            superbatch=publication.batch.index,
            texts_per_second=publication.texts_per_second,
            drift=self.drift.take(facts.partition_key),
        )

    def _receipt_or_error(
        self, publication: Publication, facts: FileFacts, outcome: StoredObject | Exception
    ) -> Receipt | Exception:
        return outcome if isinstance(outcome, Exception) else self._receipt(publication, facts, outcome)

    def _compare(self, publication: Publication, segment: Segment, matrix: np.ndarray) -> None:
        """Compare a segment with the file that is about to be replaced, where its partition was drawn for that."""
        partition = segment.partition
        if partition.replaces is not None and segment.start < segment.stop:
            texts = publication.batch.slot.texts(segment.start, segment.stop)
            self.drift.add(partition.key, partition.replaces, segment.ids, texts, matrix)

    def _sound_vectors(self, publication: Publication, segment: Segment) -> np.ndarray:
        """A segment's vectors, [rows, dimension]; refuses its partition if one of them is no embedding."""
        failed = publication.encoded.failed_row(segment.start, segment.stop)
        if failed is not None:
            raise DataError(
                segment.partition.key,
                f"its text ends every worker that encodes it ({failed.reason})",
                "Look at this text, shorten it or take it out, and run again.",
                segment.first_row + failed.row - segment.start,
            )
        matrix = publication.batch.slot.matrix(segment.start, segment.stop)
        wrong = invalid_row(matrix, normalized=self._space.normalize)
        if wrong is not None:
            raise DataError(
                segment.partition.key,
                f"{wrong[1]}: the encoder gave what cannot be published",
                "Look at the text of this row; if it is ordinary, the model or the device is at fault.",
                segment.first_row + wrong[0],
            )
        return matrix


def is_whole(segment: Segment) -> bool:
    """Whether a segment is all of its partition."""
    return segment.first_row == 0 and segment.last


def _are_neighbours(one: Segment, other: Segment) -> bool:
    return one.stop == other.start and one.partition.id_type == other.partition.id_type
