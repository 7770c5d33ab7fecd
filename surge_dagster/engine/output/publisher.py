"""From an encoded SuperBatch to files: threads that slice, serialize and publish it while the next one is encoded.

Partitions that lie in one SuperBatch are written by several threads, each taking the next one. A segment of a split
partition is taken like them: it is staged, as an object of its own, the last one like the others, so that no
SuperBatch's memory waits for a long file. When the last piece of a SuperBatch is written, its folder is flushed once,
its memory is given back, and only then are its receipts reported. The file of a split partition is written after that,
from what is staged, by a thread that does nothing else. What fails here fails its partition and nothing else.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from surge_dagster.engine.errors import Cancelled, DataError, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.output.assembly import assemble
from surge_dagster.engine.output.piece_writer import PieceWriter
from surge_dagster.engine.output.publication import EncodedSuperBatch, Publication, PublishedSuperBatch
from surge_dagster.engine.output.publishing_threads import PublishingThreads
from surge_dagster.engine.output.receipts import receipt_of
from surge_dagster.engine.output.space_target import SpaceTarget
from surge_dagster.engine.output.split_partitions import Complete, SplitPartitions, Spoilt
from surge_dagster.engine.output.staging import Staging
from surge_dagster.engine.report import Failure, Receipt
from surge_dagster.engine.superbatch import OpenPartition, Segment, SuperBatch
from surge_dagster.engine.support.ledger import Ledger

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Publisher:
    """Writes encoded SuperBatches to a store.

    Args:
        target: where to.
        staging: where segments of split partitions wait for the others.
        b_min: for the fill ratio.
        begun: `time.perf_counter()` at the run's begin.
        threads: pieces written at a time; one more writes the files of split partitions.
        ledger, assembly_bytes: the account, and what writing such a file is booked with.
        over: set by `close` when what is not out is given up, and at once when the store is down; the store waits no
            longer than until then.
        done: called, from a publishing thread, when a SuperBatch is out; its slot is free by then.
        report: told, likewise, what became of a split partition that was complete.
    """

    def __init__(
        self,
        target: SpaceTarget,
        staging: Staging,
        *,
        b_min: int,
        begun: float,
        threads: int,
        ledger: Ledger,
        assembly_bytes: int,
        over: threading.Event,
        done: Callable[[SuperBatch, PublishedSuperBatch], None],
        report: Callable[[Receipt | Failure], None],
    ) -> None:
        self._target = target
        self._staging = staging
        self._b_min = b_min
        self._begun = begun
        self._ledger = ledger
        self._assembly_bytes = assembly_bytes
        self._done = done
        self._report = report
        self._lock = threading.Lock()
        self._threads = threads
        self._pieces = PublishingThreads(threads, "surge-publish")
        self._files = PublishingThreads(1, "surge-publish-split")
        self._split = SplitPartitions()
        self._writer = PieceWriter(target, staging, ledger)
        self._fatal: BaseException | None = None
        self._down = False  # the store, found so before the run was over
        self._unfinished = 0  # SuperBatches
        self._files_unfinished = 0
        self._finished = threading.Condition(self._lock)
        self._closing = False
        self._over = over

    def submit(self, batch: SuperBatch, encoded: EncodedSuperBatch) -> None:
        """Write every segment of an encoded SuperBatch; returns at once.

        Raises:
            BaseException: whatever ended an earlier piece unexpectedly.
        """
        self.require_alive()
        publication = Publication(batch, encoded, remaining=len(batch.segments))
        with self._lock:
            self._unfinished += 1
        for segment in batch.segments:
            if not segment.is_whole:
                self._split.begin(segment.partition)
        waiting = deque(batch.segments)
        for _ in range(min(self._threads, len(waiting))):
            self._pieces.submit(partial(self._write_waiting, publication, waiting))

    def abandon(self, partition: OpenPartition) -> None:
        """Throw away what is staged of a partition whose rows were refused."""
        self._follow(self._split.spoil(partition))

    def close(self, time_left: Callable[[], float | None] = lambda: None) -> None:
        """Wait until everything submitted is out. Segments of a partition that is not complete stay staged.

        Args:
            time_left: seconds to wait for that, asked again and again, since a run may be stopped while it waits; None
                is as long as it takes. What is not out when none are left is left to the next run.
        """
        with self._finished:
            self._closing = True
            drained, left = False, None
            while not drained and left != 0:
                left = time_left()
                drained = self._finished.wait_for(
                    lambda: not self._unfinished and not self._files_unfinished,
                    _POLL_SECONDS if left is None else min(_POLL_SECONDS, left),
                )
        if not drained:
            self._over.set()
            log.warning(
                "%d SuperBatches and %d files of split partitions were not published within the grace time; the next "
                "run does them again",
                *(self._unfinished, self._files_unfinished),
            )
        for threads in (self._pieces, self._files):
            if drained:
                threads.end()
            else:
                threads.give_up()
        self.require_alive()

    def require_alive(self) -> None:
        """Raise what ended an earlier piece unexpectedly, if anything did."""
        if self._fatal is not None:
            raise self._fatal

    def _write_waiting(self, publication: Publication, waiting: deque[Segment]) -> None:
        """One thread's share of a SuperBatch: a task for each of thousands of tiny partitions would cost as they do."""
        while self._down or not self._over.is_set():
            try:
                segment = waiting.popleft()
            except IndexError:
                return
            # No piece is begun for a store that is down, but what was published before is still reported.
            if not self._down:
                self._write_one(publication, segment)
            self._count_down(publication)

    def _write_one(self, publication: Publication, segment: Segment) -> None:
        if segment.partition.refused:
            return
        try:
            if segment.is_whole:
                receipt, spent = self._writer.publish(publication, segment)
                with self._lock:
                    publication.receipts.append(receipt)
                    publication.count(spent)
            elif segment.start < segment.stop:
                staged, spent = self._writer.stage(publication, segment)
                with self._lock:
                    publication.staged[segment.start] = staged
                    publication.count(spent)
        except BaseException as error:
            failure = self._failure(segment.partition, error)
            if failure is not None:
                with self._lock:
                    publication.failures.append(failure)

    def _count_down(self, publication: Publication) -> None:
        with self._lock:
            publication.remaining -= 1
            last = publication.remaining == 0
        if last:
            try:
                self._finish(publication)
            except BaseException as error:  # a thread pool would keep it to itself
                self._fatal = error
            with self._finished:
                self._unfinished -= 1
                self._finished.notify_all()

    def _failure(self, partition: OpenPartition, error: BaseException) -> Failure | None:
        """What went wrong with a partition refuses it; None when it was given up with the run."""
        key = partition.key
        match error:
            case Cancelled():
                return None
            case DataError():
                failure = Failure(key, str(error), remedy=error.remedy)
            case StoreUnavailable():
                self._fatal = self._fatal or error
                self._down = self._down or not self._over.is_set()
                self._over.set()  # nobody waits for the store any longer, and no other request is tried again
                failure = Failure(key, str(error), transient=True)
            case SurgeError():
                failure = Failure(key, str(error), transient=isinstance(error, TransientError))
            case OSError():
                remedy = "Make room on its disk, then run again." if error.errno in _DISK_FULL else "Run again."
                reason = f"partition {key!r}: cannot be written: {error}. {remedy}"
                failure = Failure(key, reason, transient=True, remedy=remedy)
            case _:
                self._fatal = error
                failure = Failure(key, f"partition {key!r}: {type(error).__name__}: {error}", transient=True)
        partition.refused = True
        if not failure.transient:
            self._follow(self._split.spoil(partition))
        return failure

    def _follow(self, what: Complete | Spoilt | None) -> None:
        """Do what follows from the books of a split partition, in the thread for their files."""
        if what is None or (isinstance(what, Spoilt) and not self._staging.knows(what.partition.key)):
            return
        with self._lock:
            self._files_unfinished += 1
        if not self._files.submit(partial(self._tidied, what)):  # the run was given up; the next one finds it staged
            self._file_done()

    def _tidied(self, what: Complete | Spoilt) -> None:
        try:
            if isinstance(what, Spoilt):
                self._staging.remove(what.partition.key)
                return
            try:
                self._assemble(what)
            except BaseException as error:
                failure = self._failure(what.partition, error)
                if failure is not None:
                    self._report(failure)
        except Cancelled:
            pass  # the next run removes what is staged
        except BaseException as error:  # a thread pool would keep it to itself
            self._fatal = error
        finally:
            self._file_done()

    def _file_done(self) -> None:
        with self._finished:
            self._files_unfinished -= 1
            self._finished.notify_all()

    def _assemble(self, complete: Complete) -> None:
        self._ledger.reserve(self._assembly_bytes, self._nothing_will_be_released)
        try:
            published = assemble(
                self._target, self._staging, complete.partition, complete.segments, self._require_going_on
            )
            self._sync()
        finally:
            self._ledger.release(self._assembly_bytes)
        self._staging.remove(complete.partition.key)
        self._report(
            receipt_of(
                published.facts,
                published.stored,
                self._target.store.location(published.stored.name),
                superbatch=complete.superbatch,
                texts_per_second=complete.texts_per_second,
                texts_reused=sum(rows.stop - rows.start for rows in complete.partition.reused),
                drift=self._writer.drift.take(complete.partition.key),
            )
        )

    def _sync(self) -> None:
        self._target.store.sync(self._target.space.name)

    def _nothing_will_be_released(self) -> bool:
        return self._over.is_set() or (self._closing and not self._unfinished)

    def _require_going_on(self) -> None:
        if self._over.is_set():
            raise Cancelled

    def _finish(self, publication: Publication) -> None:
        try:
            if publication.receipts:
                self._sync()
        except (OSError, SurgeError) as error:
            self._fatal = TransientError(
                f"cannot flush the folder {self._target.space.name!r} of {self._target.store.url!r}: {error}."
            )
            publication.failures += [Failure(receipt.key, str(self._fatal), True) for receipt in publication.receipts]
            publication.receipts = []
        batch = publication.batch
        self._done(
            batch,
            publication.published(b_min=self._b_min, begun=self._begun, peak_resident_bytes=self._ledger.peak),
        )
        for segment in batch.segments:
            if not segment.is_whole:
                staged = publication.staged.get(segment.start) if segment.start < segment.stop else None
                self._follow(self._split.end(segment, staged, batch.index, publication.texts_per_second))
