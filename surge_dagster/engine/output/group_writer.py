"""Tiny partitions that are neighbours in a SuperBatch become files together, on a local disk.

What costs as much for ten rows as for a hundred is done once for all of them: their vectors are looked at together,
their files are built together and are published in two steps, so that a thread which waits for a disk waits for several
files at once. Each file, each receipt and each error are still those of one partition.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from surge_dagster.engine.files.embedding_file import FileFacts
from surge_dagster.engine.files.file_formats import write_file
from surge_dagster.engine.files.file_group import GroupRows, fits, group_files
from surge_dagster.engine.files.validation import invalid_row
from surge_dagster.engine.output.publication import Publication, Spent
from surge_dagster.engine.output.receipts import receipt_of, require_unchanged
from surge_dagster.engine.output.space_target import SpaceTarget
from surge_dagster.engine.report import Receipt
from surge_dagster.engine.store.local_upload import publish_together
from surge_dagster.engine.store.store import StoredObject, Upload
from surge_dagster.engine.superbatch import Segment, SuperBatch

# What building a group takes beside its vectors stays within what is booked for any piece of each thread; and with
# more files a thread, the files that all threads have open would come near what a process may have.
_MOST_PARTITIONS = 24
_MOST_ROWS = 256
_MOST_STRING_BYTES = 12 * 1024


class GroupWriter:
    """Writes groups; used by all publishing threads.

    Args:
        target: where to.
        threads: that write at a time; each has the files of a group open.
    """

    def __init__(self, target: SpaceTarget, threads: int) -> None:
        # A quarter of what the process may have open at a time; Debian's default is 1,024.
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = _MOST_PARTITIONS if descriptors == resource.RLIM_INFINITY else descriptors // (4 * threads)
        self._most_partitions = max(1, min(_MOST_PARTITIONS, spare))
        self._target = target

    def pieces(self, batch: SuperBatch) -> deque[tuple[Segment, ...]]:
        """A SuperBatch's segments in order, alone or with those neighbours that they are written with."""
        # In a bucket each is a request, which is sent as soon as a thread is free.
        space = self._target.space
        if self._target.store.is_remote or space.file_format != "parquet":
            return deque((segment,) for segment in batch.segments)
        dimension, itemsize = space.dimension, np.dtype(space.dtype).itemsize
        offsets = batch.slot.offsets
        text_ends = offsets[[segment.stop for segment in batch.segments]].tolist()
        text_begins = offsets[[segment.start for segment in batch.segments]].tolist()
        pieces: deque[tuple[Segment, ...]] = deque()
        group: list[Segment] = []
        rows = string_bytes = 0
        for segment, text_begin, text_end in zip(batch.segments, text_begins, text_ends, strict=True):
            own_rows, own_bytes = segment.stop - segment.start, text_end - text_begin + _id_bytes(segment)
            is_tiny = (
                fits(own_rows, dimension, itemsize, own_bytes)
                and segment.is_whole
                and segment.partition.replaces is None
            )
            if group and not (
                is_tiny
                and len(group) < self._most_partitions
                and rows + own_rows <= _MOST_ROWS
                and string_bytes + own_bytes <= _MOST_STRING_BYTES
                and _are_neighbours(group[-1], segment)
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

    def publish(
        self, publication: Publication, segments: Sequence[Segment]
    ) -> tuple[list[Receipt | Exception], Spent] | None:
        """Write the files of several partitions, as `PieceWriter.publish` writes each of them.

        Returns:
            For each its receipt or what went wrong with it alone; None when something is wrong with one of them that
            has to be looked for: then nothing was written.
        """
        first, last, slot = segments[0].start, segments[-1].stop, publication.batch.slot
        begun = time.perf_counter()
        matrix = slot.matrix(first, last)
        if publication.encoded.failed_row(first, last) or invalid_row(matrix, normalized=self._target.space.normalize):
            return None
        facts = self._facts(publication, segments)
        rows = GroupRows(
            pa.concat_arrays([ids for segment in segments for ids in segment.ids]),
            self._target.texts(publication.batch, first, last),
            matrix,
            [segment.start - first for segment in segments] + [last - first],
        )
        opened: dict[int, Upload] = {}  # by the partitions' places, like what follows
        written: dict[int, tuple[Upload, Callable[[], None]]] = {}
        outcomes: dict[int, StoredObject | Exception] = {}
        try:
            for place, content in enumerate(group_files(rows, facts)):
                segment, said = segments[place], facts[place]
                try:
                    upload = opened[place] = self._target.create(said.partition_key).__enter__()
                    if content is None:
                        self._write_alone(upload, publication, segment, said)
                    else:
                        upload.write(content)
                    written[place] = upload, partial(require_unchanged, segment.partition.source)
                except Exception as error:  # it is this partition's, and is told as such
                    outcomes[place] = error
            serialized = time.perf_counter()
            outcomes |= zip(written, publish_together([*written.values()]), strict=True)
        finally:
            for place, upload in opened.items():
                try:
                    upload.__exit__(None, None, None)
                except Exception as error:
                    outcomes[place] = error
        ended = time.perf_counter()
        told = self._receipts(publication, facts, outcomes)
        truncated = sum([outcome.truncated for outcome in told if isinstance(outcome, Receipt)])
        return told, Spent(begun, serialized, ended, truncated)

    def _facts(self, publication: Publication, segments: Sequence[Segment]) -> list[FileFacts]:
        slot = publication.batch.slot
        is_truncated = slot.truncated(segments[0].start, segments[-1].stop) > 0
        return [
            self._target.facts(
                segment.partition,
                rows=segment.stop - segment.start,
                truncated=slot.truncated(segment.start, segment.stop) if is_truncated else 0,
            )
            for segment in segments
        ]

    def _receipts(
        self, publication: Publication, facts: Sequence[FileFacts], outcomes: Mapping[int, StoredObject | Exception]
    ) -> list[Receipt | Exception]:
        index, speed = publication.batch.index, publication.texts_per_second
        told: list[Receipt | Exception] = []
        for place, said in enumerate(facts):
            outcome = outcomes[place]
            if isinstance(outcome, StoredObject):
                location = self._target.store.location(outcome.name)
                outcome = receipt_of(said, outcome, location, superbatch=index, texts_per_second=speed)
            told.append(outcome)
        return told

    def _write_alone(self, upload: Upload, publication: Publication, segment: Segment, facts: FileFacts) -> None:
        batch = publication.batch
        rows = self._target.rows(batch, segment, batch.slot.matrix(segment.start, segment.stop))
        write_file(self._target.space.file_format, upload, rows, facts)


def _id_bytes(segment: Segment) -> int:
    if segment.id_bytes is not None:
        return segment.id_bytes
    return sum(ids.nbytes for ids in segment.ids)


def _are_neighbours(one: Segment, other: Segment) -> bool:
    return one.stop == other.start and one.partition.id_type == other.partition.id_type
