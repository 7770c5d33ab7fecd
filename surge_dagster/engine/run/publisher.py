"""The publish stage: threads slice, serialize and publish a SuperBatch while the next one is being
encoded.

Several threads share the segments of one SuperBatch. A whole partition becomes its file. A segment
of a split partition is staged as an object of its own, so that no SuperBatch's memory waits for a
long file. After the last segment the folder is flushed once, the memory is given back, and only
then the receipts are reported. One more thread writes the files of split partitions from what is
staged. An error fails its partition and no other one.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass, field
from functools import partial

from surge_dagster.engine.errors import (
    Cancelled,
    StoreUnavailable,
    SurgeError,
    TransientError,
    WriteRefused,
)
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import file_name, read_published_file
from surge_dagster.engine.output.freshness import status_of
from surge_dagster.engine.run.events import EventStream
from surge_dagster.engine.run.failures import DroppedPartitions, failure_of
from surge_dagster.engine.run.observer import PublicationObserver
from surge_dagster.engine.run.publication import Publication
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.rewriting import assemble
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.space_target import SpaceTarget
from surge_dagster.engine.run.staging import Staging
from surge_dagster.engine.run.superbatch import (
    EncodedSuperBatch,
    PartitionToRead,
    ReadPartition,
    Segment,
    StagedRows,
)
from surge_dagster.engine.support.waiting import in_background

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
# to remove unfinished files when the process ends; a store that answers needs less
_LAST_SECONDS = 2.0
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of a local disk that the next file would meet too; a file that is too large is no reason to
# end the run.
_DISK_UNUSABLE = (
    *_DISK_FULL,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.EIO,
    errno.ESTALE,
)
_DOWN_AFTER = 4  # refused writes in a row, as with operations on a bucket


@dataclass(slots=True)
class _SplitPartition:
    """What became of the segments of a split partition so far. The publisher changes it under its
    lock.

    Attributes:
        staged: rows that are staged, in any order.
        read: the partition as it was read, once its last segment was written; with it, the
            SuperBatch of that.
    """

    staged: list[StagedRows] = field(default_factory=list)
    read: ReadPartition | None = None
    superbatch: int | None = None
    texts_per_second: float | None = None


class Publisher:
    """Writes encoded SuperBatches; what becomes of them goes to the events of the run.

    An error that is not a partition's own stops the run, and `close` raises it.

    Args:
        dropped: partitions of which nothing is written any more; those that cannot be written are
            added.
        observer: is told of each file that is about to be published.
    """

    def __init__(
        self,
        target: SpaceTarget,
        staging: Staging,
        memory: RunMemory,
        events: EventStream,
        dropped: DroppedPartitions,
        observer: PublicationObserver | None,
    ) -> None:
        self._target = target
        self._staging = staging
        self._memory = memory
        self._events = events
        self._dropped = dropped
        self._observer = observer
        self._stop_signal = memory.stop
        self._threads = memory.plan.result.threads
        self._segments = _Tasks("surge-publish", self._threads)
        self._files = _Tasks("surge-publish-split", 1)
        self._split: dict[PartitionToRead, _SplitPartition] = {}
        self._staged: set[tuple[str, int, int]] = set()  # key and rows of segments of ranges
        self._error: BaseException | None = None
        self._store_is_down = False
        self._refused_writes = 0  # in a row, by a local disk
        self._unfinished = 0  # SuperBatches
        self._unfinished_files = 0
        self._finished = threading.Condition()
        self._closing = False

    def submit(self, encoded: EncodedSuperBatch) -> None:
        """Write every segment of a SuperBatch; returns immediately."""
        publication = Publication(encoded, self._target, self._staging, self._observer)
        waiting = deque(encoded.batch.segments)
        with self._finished:  # no segment is counted as done before its SuperBatch is
            for _ in range(min(self._threads, len(waiting))):
                self._segments.add(partial(self._write_segments, publication, waiting))
            self._unfinished += 1

    def close(self) -> None:
        """Wait until every file is published, or the grace time is over; incomplete partitions stay
        staged.

        Raises:
            BaseException: the error that stopped the run.
        """
        stop = self._stop_signal
        with self._finished:
            self._closing = True
            drained, left = False, None
            while not drained and left != 0:
                left = stop.seconds_left()
                drained = self._finished.wait_for(
                    lambda: not self._unfinished and not self._unfinished_files,
                    _POLL_SECONDS if left is None else min(_POLL_SECONDS, left),
                )
        if not drained:
            stop.over.set()
            log.warning(
                "%d SuperBatches and %d files of split partitions were not published within the grace time; the next "
                "run does them again",
                *(self._unfinished, self._unfinished_files),
            )
        elif not stop.over.is_set():
            for key in self._dropped.refused_keys():  # now that nothing more of them is staged
                self._staging.remove(key)
        for tasks in (self._segments, self._files):
            tasks.end()
            if drained:
                tasks.wait()
            else:
                atexit.register(tasks.wait, _LAST_SECONDS)
        if self._error is not None:
            raise self._error

    def _write_segments(self, publication: Publication, waiting: deque[Segment]) -> None:
        """One thread's share of a SuperBatch: one task for each of thousands of tiny partitions
        would cost too much."""
        while self._store_is_down or not self._stop_signal.over.is_set():
            try:
                segment = waiting.popleft()
            except IndexError:
                return
            # A store that is down gets no further segment, but what was published before is still
            # reported.
            if not self._store_is_down and segment.partition not in self._dropped:
                try:
                    if segment.is_whole and segment.read is not None:
                        publication.publish(segment, segment.read)
                    elif segment.start < segment.stop:
                        publication.stage(segment)
                except BaseException as error:
                    failure = self._failure(segment.partition, error)
                    if failure is not None:
                        publication.fail(failure)
                else:
                    self._count_writes(refused=False)
            if publication.count_down():
                self._finish(publication)

    def _finish(self, publication: Publication) -> None:
        try:
            self._report(publication)
        except BaseException as error:
            self._stop(error)
        with self._finished:
            self._unfinished -= 1
            self._finished.notify_all()

    def _report(self, publication: Publication) -> None:
        memory, encoded, target = self._memory, publication.encoded, self._target
        try:
            if publication.receipts:
                target.sync()
        except (OSError, SurgeError) as error:
            lost = (
                f"cannot flush the folder {target.space.name!r} of {target.store.url!r}: {error}."
            )
            self._stop(TransientError(lost))
            publication.failures += [
                Failure(receipt.key, lost, transient=True) for receipt in publication.receipts
            ]
            publication.receipts.clear()
        events = publication.events(memory.bounds.b_min, self._events.begun, memory.ledger.peak)
        # Before the texts count as published: the reader waits for that before it reads what is
        # divided as a whole.
        complete = [
            segment.partition
            for segment in encoded.batch.segments
            if self._completes(segment, publication)
        ]
        memory.release(encoded.batch, encoded.published_texts)
        self._events.emit(*events)
        with self._finished:
            for partition in complete:
                self._files.add(partial(self._write_file, partition))
            self._unfinished_files += len(complete)

    def _completes(self, segment: Segment, publication: Publication) -> bool:
        """Enter a segment of a split partition whose SuperBatch was written; True when it was the
        last one."""
        partition = segment.partition
        if segment.is_whole:
            return False
        with self._finished:
            if partition.range is not None:
                self._staged.add(
                    (
                        partition.key,
                        segment.first_row,
                        segment.first_row + segment.stop - segment.start,
                    )
                )
                return False
            if partition in self._dropped:
                self._split.pop(partition, None)
                return False
            split = self._split.setdefault(partition, _SplitPartition())
            if segment.start in publication.staged and segment.start < segment.stop:
                split.staged.append(publication.staged[segment.start])
            if segment.read is not None:
                split.read, split.superbatch = segment.read, publication.encoded.batch.index
                split.texts_per_second = publication.encoded.metrics.costs.texts_per_second
                split.staged += segment.read.staged
            return (
                split.read is not None
                and sum(rows.stop - rows.start for rows in split.staged) == split.read.rows
            )

    def _write_file(self, partition: PartitionToRead) -> None:
        with self._finished:
            split = self._split.pop(partition)
        try:
            self._assemble(partition, split)
        except BaseException as error:
            event = self._published_by_another(partition, error) or self._failure(partition, error)
            if event is not None:
                self._events.emit(event)
        else:
            self._count_writes(refused=False)
        finally:
            with self._finished:
                self._unfinished_files -= 1
                self._finished.notify_all()

    def _assemble(self, partition: PartitionToRead, split: _SplitPartition) -> None:
        """Write the file of a split partition."""
        target, staging, ledger, read = self._target, self._staging, self._memory.ledger, split.read
        assert read is not None
        size = self._memory.plan.reader + target.store.upload_bytes
        ledger.reserve(size, self._is_memory_final)
        try:
            require_not_over = self._stop_signal.require_not_over
            published = assemble(
                target, staging, partition, read, split.staged, require_not_over, self._observer
            )
            target.sync()
        finally:
            ledger.release(size)
        staging.remove(partition.key)
        earlier = [
            rows
            for rows in read.staged
            if (partition.key, rows.start, rows.stop) not in self._staged
        ]
        receipt = Receipt.of(
            published.facts,
            published.stored,
            target.store.location(published.stored.name),
            superbatch=split.superbatch,
            texts_per_second=split.texts_per_second,
            texts_reused=sum(rows.stop - rows.start for rows in earlier),
        )
        self._events.emit(receipt)

    def _published_by_another(
        self, partition: PartitionToRead, error: BaseException
    ) -> Receipt | None:
        """The receipt of a partition whose file another run wrote while this one did, and removed
        the staged rows."""
        # else it may be the file that was to be replaced
        is_new = partition.reuse or partition.is_divided
        if not is_new or not isinstance(error.__cause__, FileNotFoundError | TransientError):
            return None
        store, space = self._target.store, self._target.space
        with contextlib.suppress(SurgeError, OSError, InvalidFile, Cancelled):
            file = read_published_file(store, file_name(space.name, partition.key))
            if (
                status_of(file.facts, space.name, partition.key, partition.source.source_version)
                == "fresh"
            ):
                return Receipt.of(
                    file.facts, file.stored, store.location(file.stored.name), action="fresh"
                )
        return None

    def _is_memory_final(self) -> bool:
        """Whether nothing will release memory any more, so that waiting for it would not end."""
        return self._stop_signal.over.is_set() or (self._closing and not self._unfinished)

    def _failure(self, partition: PartitionToRead, error: BaseException) -> Failure | None:
        """Refuse the partition of an error; None when the run ended before it was written."""
        key = partition.key
        if partition not in self._dropped:
            error = self._counted(error)
        match error:
            case Cancelled():
                return None
            case SurgeError():
                if isinstance(error, StoreUnavailable):
                    with self._finished:
                        self._store_is_down = (
                            self._store_is_down or not self._stop_signal.over.is_set()
                        )
                        self._stop_signal.over.set()  # every other thread gives up its retries
                    self._stop(error)
                failure = failure_of(partition.source, error)
            case OSError():
                remedy = (
                    "Make room on its disk, then run again."
                    if error.errno in _DISK_FULL
                    else "Run again."
                )
                reason = f"partition {key!r}: cannot be written: {error}. {remedy}"
                failure = Failure(key, reason, transient=True, remedy=remedy)
            case _:
                self._stop(error)
                failure = Failure(
                    key, f"partition {key!r}: {type(error).__name__}: {error}", transient=True
                )
        # None where it was reported, or is read once more.
        return failure if self._dropped.fail(partition, refused=not failure.transient) else None

    def _counted(self, error: BaseException) -> BaseException:
        """The error, or `StoreUnavailable` where a local disk refused several writes in a row."""
        cause = error.__cause__ if isinstance(error, WriteRefused) else error
        if not isinstance(cause, OSError) or cause.errno not in _DISK_UNUSABLE:
            return error
        refused_writes = self._count_writes(refused=True)
        if refused_writes < _DOWN_AFTER:
            return error
        return StoreUnavailable(
            f"{self._target.store.url}: {refused_writes} writes in a row failed, the last with: "
            f"{os.strerror(cause.errno)}. What was published stays. Make room on the disk, or make the output folder "
            "writable again, then run again."
        )

    def _count_writes(self, *, refused: bool) -> int:
        """Count a write; returns how many in a row were refused by now."""
        with self._finished:
            self._refused_writes = self._refused_writes + 1 if refused else 0
            return self._refused_writes

    def _stop(self, error: BaseException) -> None:
        """End the run with an error: without it the reader would wait for a slot that never comes
        back."""
        self._error = self._error or error
        self._stop_signal.stopping.set()


class _Tasks:
    """Does tasks in their order in background threads, a limited number at a time."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._runners: list[Future[None]] = []

    def add(self, task: Callable[[], None]) -> None:
        """Queue a task; `RuntimeError` where the system gives no thread and there is none. Not from
        two threads."""
        if len(self._runners) < self._most:
            try:
                self._runners.append(in_background(self._run, self._name))
            except RuntimeError:
                if not self._runners:
                    raise
        self._waiting.put(task)

    def end(self) -> None:
        """Let each thread end once every queued task is done or taken; none is added afterwards."""
        for _ in self._runners:
            self._waiting.put(None)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the threads have ended."""
        futures_wait(self._runners, seconds)

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            task()
