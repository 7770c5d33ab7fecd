"""The publish stage: threads slice, serialize and publish a SuperBatch while the next one is being
encoded.

Several threads share the segments of one SuperBatch. A whole partition becomes its file. A segment
of a split partition is staged as an object of its own, so that no SuperBatch's memory waits for a
long file. After the last segment the folder is flushed once, the memory is given back, and only
then the receipts are reported. The files of split partitions are written from what is staged, one
at a time. An error fails its partition and no other one.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass, field
from functools import partial

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.output.rejected import RejectedLists
from surge_dagster.engine.run.events import EventStream
from surge_dagster.engine.run.publication import Publication, TextsEndWorkers, assemble
from surge_dagster.engine.run.read_again import ReadAgain
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.staging import StagedRowsGone, Staging
from surge_dagster.engine.run.superbatch import (
    EncodedSuperBatch,
    PartitionToRead,
    ReadPartition,
    Segment,
    SpaceTarget,
    StagedRows,
)
from surge_dagster.engine.store.local_store import write_error
from surge_dagster.engine.support.waiting import in_background

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_LAST_SECONDS = 2.0
_THREAD = "surge-publish"


@dataclass(slots=True)
class _SplitPartition:
    """What became of the segments of a split partition so far. The publisher changes it under its
    lock.

    Attributes:
        staged: rows that are staged, in any order.
        read: the partition as it was read, once its last segment was written.
        superbatch: index of that of its last segment.
    """

    staged: list[StagedRows] = field(default_factory=list)
    read: ReadPartition | None = None
    superbatch: int | None = None

    @property
    def is_complete(self) -> bool:
        rows = sum(staged.rows for staged in self.staged)
        return self.read is not None and rows == self.read.rows


class Publisher:
    """Writes encoded SuperBatches; what becomes of them goes to the events of the run.

    An error that is not a partition's own stops the run, and `close` raises it.

    Args:
        dropped: partitions that are no longer written; the publisher adds those that it cannot
            write.
        read_again: takes partitions that are to be read again; None if those with bad rows are
            refused.
    """

    def __init__(
        self,
        target: SpaceTarget,
        staging: Staging,
        memory: RunMemory,
        events: EventStream,
        dropped: set[PartitionToRead],
        read_again: ReadAgain | None = None,
    ) -> None:
        self._target = target
        self._staging = staging
        self._lists = RejectedLists(target.store, target.space.name)
        self._memory = memory
        self._events = events
        self._dropped = dropped
        self._read_again = read_again
        self._stop_signal = memory.stop
        self._threads = memory.plan.result.threads
        self._tasks: list[Future[None]] = []
        self._lock = threading.Lock()
        self._file_lock = threading.Lock()  # held while the file of a split partition is written
        self._split: dict[PartitionToRead, _SplitPartition] = {}
        self._own_ranges: set[tuple[str, int, int]] = set()  # key and rows of what this run staged
        self._error: BaseException | None = None

    def submit(self, encoded: EncodedSuperBatch) -> None:
        """Write every segment of a SuperBatch; returns immediately."""
        self._begin(partial(self._publish, encoded))

    def close(self) -> None:
        """Wait until every file is published, or the grace time is over; incomplete partitions stay
        staged.

        Raises:
            BaseException: the error that stopped the run.
        """
        if not self._drain():
            self._stop_signal.over.set()
            log.warning(
                "not all that was encoded could be published within the grace time; the next run "
                "encodes the rest again"
            )
            # a thread that writes while the interpreter ends would abort the process
            atexit.register(futures_wait, self._tasks, _LAST_SECONDS)
        if self._error is not None:
            raise self._error

    def _begin(self, task: Callable[[], None]) -> None:
        """Do it in the background; an error ends the run."""

        def run() -> None:
            try:
                task()
            except BaseException as error:
                self._stop(error)

        self._tasks.append(in_background(run, _THREAD))

    def _drain(self) -> bool:
        """Wait for what was submitted; return whether it has ended within the grace time."""
        while pending := [task for task in self._tasks if not task.done()]:
            seconds_left = self._stop_signal.seconds_left()
            if seconds_left == 0:
                return False
            futures_wait(pending, min(_POLL_SECONDS, seconds_left or _POLL_SECONDS))
        return True

    def _publish(self, encoded: EncodedSuperBatch) -> None:
        """Write a SuperBatch in several threads, then report it.

        The threads share its segments: one task for each of thousands of tiny partitions would cost
        too much.
        """
        publication = Publication(encoded, self._target, self._staging, self._lists)
        waiting = deque(encoded.batch.segments)
        write = partial(self._write_segments, publication, waiting)
        threads = [in_background(write, _THREAD) for _ in range(min(self._threads, len(waiting)))]
        futures_wait(threads)
        for thread in threads:
            thread.result()
        # What was published before the store went down is reported too, within the grace time.
        is_written = not waiting
        if is_written or self._stop_signal.seconds_left() != 0:
            self._report(publication)

    def _write_segments(self, publication: Publication, waiting: deque[Segment]) -> None:
        while not self._stop_signal.over.is_set():
            try:
                segment = waiting.popleft()
            except IndexError:
                return
            if segment.partition not in self._dropped:
                self._write_segment(publication, segment)
            elif self._read_again is not None:
                self._read_again.add_more(
                    segment.partition, publication.rows_without_vector(segment)
                )

    def _write_segment(self, publication: Publication, segment: Segment) -> None:
        try:
            if segment.is_whole and segment.read is not None:
                publication.publish(segment, segment.read)
            elif segment.start < segment.stop:
                publication.stage(segment)
        except BaseException as error:
            failure = self._refuse(segment.partition, error)
            if failure is not None:
                publication.fail(failure)

    def _report(self, publication: Publication) -> None:
        memory = self._memory
        encoded = publication.encoded
        if publication.receipts:
            self._flush()
        events = publication.events(memory.bounds.b_min, self._events.begun, memory.ledger.peak)
        # Before the texts count as published: the reader waits for that before it reads what is
        # divided as a whole.
        complete: list[PartitionToRead] = []
        for segment in encoded.batch.segments:
            if self._enter(segment, publication):
                complete.append(segment.partition)

        memory.release(encoded.batch, encoded.published_texts)
        self._events.emit(*events)
        for partition in complete:
            self._begin(partial(self._write_file, partition))

    def _flush(self) -> None:
        """Make the names of published files durable, before their receipts are reported."""
        target = self._target
        try:
            target.sync()
        except (OSError, SurgeError) as error:
            folder = f"the folder {target.space.name!r} of {target.store.url!r}"
            raise TransientError(f"cannot flush {folder}: {error}.") from error

    def _enter(self, segment: Segment, publication: Publication) -> bool:
        """Enter a segment of a split partition whose SuperBatch was written; returns whether it was
        the last one."""
        partition = segment.partition
        if segment.is_whole:
            return False
        with self._lock:
            stop = segment.first_row + segment.rows
            self._own_ranges.add((partition.key, segment.first_row, stop))
            if partition.range is not None:
                return False
            if partition in self._dropped:
                self._split.pop(partition, None)
                return False

            split = self._split.setdefault(partition, _SplitPartition())
            if segment.rows and segment.start in publication.staged:
                split.staged.append(publication.staged[segment.start])
            if segment.read is not None:
                split.read = segment.read
                split.superbatch = publication.encoded.batch.index
                split.staged += segment.read.staged
            return split.is_complete

    def _write_file(self, partition: PartitionToRead) -> None:
        """Write the file of a split partition."""
        with self._lock:
            split = self._split.pop(partition)
        event: Receipt | Failure | None = None
        try:
            with self._file_lock:
                event = self._assemble(partition, split)
        except StagedRowsGone as error:
            if not partition.must_be_staged:  # else the run that has published it reports it
                event = self._refuse(partition, error)
        except BaseException as error:
            event = self._refuse(partition, error)
        if event is not None:
            self._events.emit(event)

    def _assemble(self, partition: PartitionToRead, split: _SplitPartition) -> Receipt:
        target = self._target
        ledger = self._memory.ledger
        read = split.read
        assert read is not None
        size = self._memory.plan.reader + target.store.upload_bytes
        ledger.reserve(size, self._stop_signal.over.is_set)
        try:
            published = assemble(
                target,
                self._staging,
                self._lists,
                partition,
                read,
                split.staged,
                self._stop_signal.require_not_over,
            )
            target.sync()
        finally:
            ledger.release(size)
        self._staging.remove(partition.key)
        return Receipt.of(
            published.facts,
            published.stored,
            target.store.location(published.stored.name),
            action=partition.action(published.facts),
            superbatch=split.superbatch,
            texts_reused=self._staged_before(partition, read),
        )

    def _staged_before(self, partition: PartitionToRead, read: ReadPartition) -> int:
        """Return how many rows of a partition other runs had staged."""
        rows = 0
        for staged in read.staged:
            if (partition.key, staged.start, staged.stop) not in self._own_ranges:
                rows += staged.rows
        return rows

    def _refuse(self, partition: PartitionToRead, error: BaseException) -> Failure | None:
        """Drop the partition of an error, and return its failure; None if the run ended before it
        was written, or if it is read again.

        An error that concerns other partitions too stops the run.
        """
        if isinstance(error, Cancelled):
            return None
        self._dropped.add(partition)
        if isinstance(error, TextsEndWorkers) and self._read_again is not None:
            is_read_again = self._read_again.add(partition, error.rows)
            if is_read_again:
                return None
        if isinstance(error, OSError):
            name = file_name(self._target.space.name, partition.key)
            error = write_error(self._target.store.location(name), error)
        if isinstance(error, StoreUnavailable):
            self._stop_signal.over.set()  # no other thread waits for the store any longer
        if isinstance(error, StoreUnavailable) or not isinstance(error, SurgeError):
            self._stop(error)
        if isinstance(error, SurgeError):
            return partition.failure(error)
        reason = f"partition {partition.key!r}: {type(error).__name__}: {error}"
        return Failure(partition.key, reason, transient=True)

    def _stop(self, error: BaseException) -> None:
        """End the run with an error: without it the reader would wait for a slot that never comes
        back."""
        self._error = self._error or error
        self._stop_signal.stopping.set()
