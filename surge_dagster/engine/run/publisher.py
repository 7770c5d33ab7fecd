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
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass, field
from functools import partial

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import file_name, read_published_file
from surge_dagster.engine.output.freshness import OutputState, status_of
from surge_dagster.engine.run.events import EventStream
from surge_dagster.engine.run.failures import DroppedPartitions, failure_of
from surge_dagster.engine.run.observer import PublicationObserver
from surge_dagster.engine.run.publication import Publication
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.rewriting import StagedRowsUnusable, assemble
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
from surge_dagster.engine.store.local_upload import write_error
from surge_dagster.engine.support.waiting import in_background

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_LAST_SECONDS = 2.0


@dataclass(slots=True)
class _SplitPartition:
    """What became of the segments of a split partition so far. The publisher changes it under its
    lock.

    Attributes:
        staged: rows that are staged, in any order.
        read: the partition as it was read, once its last segment was written; the SuperBatch of
            that segment gives the other two.
    """

    staged: list[StagedRows] = field(default_factory=list)
    read: ReadPartition | None = None
    superbatch: int | None = None
    texts_per_second: float | None = None

    @property
    def is_complete(self) -> bool:
        rows = sum(staged.stop - staged.start for staged in self.staged)
        return self.read is not None and rows == self.read.rows


class Publisher:
    """Writes encoded SuperBatches; what becomes of them goes to the events of the run.

    An error that is not a partition's own stops the run, and `close` raises it.

    Args:
        dropped: partitions that are no longer written; the publisher adds those that it cannot
            write.
        observer: gets each file that is about to be published.
        outputs: the files that the run compared with the source.
    """

    def __init__(
        self,
        target: SpaceTarget,
        staging: Staging,
        memory: RunMemory,
        events: EventStream,
        dropped: DroppedPartitions,
        observer: PublicationObserver | None,
        outputs: OutputState,
    ) -> None:
        self._target = target
        self._staging = staging
        self._memory = memory
        self._events = events
        self._dropped = dropped
        self._observer = observer
        self._outputs = outputs
        self._stop_signal = memory.stop
        self._threads = memory.plan.result.threads
        self._segments = _Tasks("surge-publish", self._threads)
        self._files = _Tasks("surge-publish-split", 1)
        self._split: dict[PartitionToRead, _SplitPartition] = {}
        self._staged: set[tuple[str, int, int]] = set()  # key and rows of segments of ranges
        self._error: BaseException | None = None
        self._store_is_down = False
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
        staged, refused ones do not.

        Raises:
            BaseException: the error that stopped the run.
        """
        is_drained = self._drain()
        if not is_drained:
            self._stop_signal.over.set()
            log.warning(
                "%d SuperBatches and %d files of split partitions were not published within the "
                "grace time; the next run does them again",
                self._unfinished,
                self._unfinished_files,
            )
        elif not self._stop_signal.over.is_set():
            for key in self._dropped.refused:
                self._staging.remove(key)
        for tasks in (self._segments, self._files):
            tasks.end()
            if is_drained:
                tasks.wait()
            else:  # a thread that writes while the interpreter ends would abort the process
                atexit.register(tasks.wait, _LAST_SECONDS)
        if self._error is not None:
            raise self._error

    def _drain(self) -> bool:
        """Wait for what was submitted; returns whether all of it was written."""
        with self._finished:
            self._closing = True
            while self._unfinished or self._unfinished_files:
                seconds_left = self._stop_signal.seconds_left()
                if seconds_left == 0:
                    return False
                self._finished.wait(min(_POLL_SECONDS, seconds_left or _POLL_SECONDS))
        return True

    def _write_segments(self, publication: Publication, waiting: deque[Segment]) -> None:
        """Do one thread's share of a SuperBatch: one task for each of thousands of tiny partitions
        would cost too much."""
        while self._store_is_down or not self._stop_signal.over.is_set():
            try:
                segment = waiting.popleft()
            except IndexError:
                return
            # A store that is down gets no further segment, but what was published before is still
            # reported.
            if not self._store_is_down and segment.partition not in self._dropped:
                self._write_segment(publication, segment)
            if publication.count_down():
                self._finish(publication)

    def _write_segment(self, publication: Publication, segment: Segment) -> None:
        try:
            if segment.is_whole and segment.read is not None:
                publication.publish(segment, segment.read)
            elif segment.start < segment.stop:
                publication.stage(segment)
        except BaseException as error:
            failure = self._failure(segment.partition, error)
            if failure is not None:
                publication.fail(failure)

    def _finish(self, publication: Publication) -> None:
        try:
            self._report(publication)
        except BaseException as error:
            self._stop(error)
        with self._finished:
            self._unfinished -= 1
            self._finished.notify_all()

    def _report(self, publication: Publication) -> None:
        memory = self._memory
        encoded = publication.encoded
        self._flush(publication)
        events = publication.events(memory.bounds.b_min, self._events.begun, memory.ledger.peak)
        # Before the texts count as published: the reader waits for that before it reads what is
        # divided as a whole.
        complete: list[PartitionToRead] = []
        for segment in encoded.batch.segments:
            if self._completes(segment, publication):
                complete.append(segment.partition)

        memory.release(encoded.batch, encoded.published_texts)
        self._events.emit(*events)
        with self._finished:
            for partition in complete:
                self._files.add(partial(self._write_file, partition))
            self._unfinished_files += len(complete)

    def _flush(self, publication: Publication) -> None:
        """Make the names of the published files durable, before their receipts are reported."""
        if not publication.receipts:
            return
        target = self._target
        try:
            target.sync()
        except (OSError, SurgeError) as error:
            lost = (
                f"cannot flush the folder {target.space.name!r} of {target.store.url!r}: {error}."
            )
            self._stop(TransientError(lost))
            for receipt in publication.receipts:
                publication.fail(Failure(receipt.key, lost, transient=True))
            publication.receipts.clear()

    def _completes(self, segment: Segment, publication: Publication) -> bool:
        """Enter a segment of a split partition whose SuperBatch was written; returns whether it was
        the last one."""
        partition = segment.partition
        if segment.is_whole:
            return False
        rows = segment.stop - segment.start
        with self._finished:
            if partition.range is not None:
                self._staged.add((partition.key, segment.first_row, segment.first_row + rows))
                return False
            if partition in self._dropped:
                self._split.pop(partition, None)
                return False

            split = self._split.setdefault(partition, _SplitPartition())
            if rows and segment.start in publication.staged:
                split.staged.append(publication.staged[segment.start])
            if segment.read is not None:
                split.read = segment.read
                split.superbatch = publication.encoded.batch.index
                split.texts_per_second = publication.encoded.metrics.costs.texts_per_second
                split.staged += segment.read.staged
            return split.is_complete

    def _write_file(self, partition: PartitionToRead) -> None:
        with self._finished:
            split = self._split.pop(partition)
        try:
            event = self._outcome(partition, split)
            if event is not None:
                self._events.emit(event)
        except BaseException as error:
            self._stop(error)
        finally:
            with self._finished:
                self._unfinished_files -= 1
                self._finished.notify_all()

    def _outcome(
        self, partition: PartitionToRead, split: _SplitPartition
    ) -> Receipt | Failure | None:
        """Write the file of a split partition, or find that of another run."""
        try:
            try:
                return self._assemble(partition, split)
            except StagedRowsUnusable as error:
                return self._published_by_another(partition) or self._failure(partition, error)
        except BaseException as error:
            return self._failure(partition, error)

    def _assemble(self, partition: PartitionToRead, split: _SplitPartition) -> Receipt:
        """Write the file of a split partition."""
        target = self._target
        ledger = self._memory.ledger
        read = split.read
        assert read is not None
        size = self._memory.plan.reader + target.store.upload_bytes
        ledger.reserve(size, self._is_memory_final)
        try:
            require_not_over = self._stop_signal.require_not_over
            published = assemble(
                target,
                self._staging,
                partition,
                read,
                split.staged,
                require_not_over,
                self._observer,
            )
            target.sync()
        finally:
            ledger.release(size)
        self._staging.remove(partition.key)

        texts_reused = 0
        for rows in read.staged:
            if (partition.key, rows.start, rows.stop) not in self._staged:
                texts_reused += rows.stop - rows.start
        return Receipt.of(
            published.facts,
            published.stored,
            target.store.location(published.stored.name),
            action=partition.action(published.facts),
            superbatch=split.superbatch,
            texts_per_second=split.texts_per_second,
            texts_reused=texts_reused,
        )

    def _published_by_another(self, partition: PartitionToRead) -> Receipt | None:
        """Return the receipt of a partition whose file another run wrote while this one did, and
        removed the staged rows."""
        # the other run may have taken the vectors that a forced run makes again
        is_forced = not (partition.reuse or partition.is_divided)
        store = self._target.store
        space = self._target.space.name
        name = file_name(space, partition.key)
        with contextlib.suppress(InvalidFile, FileNotFoundError):
            # a file that was there before was refused, or is stale
            if is_forced or self._outputs.is_as_listed(name):
                return None
            file = read_published_file(store, name)
            status = status_of(file.facts, space, partition.key, partition.source.source_version)
            if status == "fresh":
                location = store.location(file.stored.name)
                return Receipt.of(file.facts, file.stored, location, action="fresh")
        return None

    def _is_memory_final(self) -> bool:
        """Return whether nothing will release memory any more, so that waiting for it would not
        end."""
        return self._stop_signal.over.is_set() or (self._closing and not self._unfinished)

    def _failure(self, partition: PartitionToRead, error: BaseException) -> Failure | None:
        """Refuse the partition of an error; None if the run ended before it was written."""
        if isinstance(error, Cancelled):
            return None
        self._dropped.add(partition)
        if isinstance(error, OSError):
            name = file_name(self._target.space.name, partition.key)
            error = write_error(self._target.store.location(name), error)
        if isinstance(error, StoreUnavailable):
            with self._finished:
                self._store_is_down = self._store_is_down or not self._stop_signal.over.is_set()
                self._stop_signal.over.set()  # no other thread waits for the store any longer
        if isinstance(error, StoreUnavailable) or not isinstance(error, SurgeError):
            self._stop(error)
        if isinstance(error, SurgeError):
            failure = failure_of(partition.source, error)
            if not failure.transient:
                self._dropped.refuse(partition)
            return failure
        reason = f"partition {partition.key!r}: {type(error).__name__}: {error}"
        return Failure(partition.key, reason, transient=True)

    def _stop(self, error: BaseException) -> None:
        """End the run with an error: without it the reader would wait for a slot that never comes
        back."""
        self._error = self._error or error
        self._stop_signal.stopping.set()


class _Tasks:
    """Does tasks in their order in background threads, a limited number at a time."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._runners: list[Future[None]] = []

    def add(self, task: Callable[[], None]) -> None:
        """Queue a task. Not from two threads."""
        if len(self._runners) < self._limit:
            self._runners.append(in_background(self._run, self._name))
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
