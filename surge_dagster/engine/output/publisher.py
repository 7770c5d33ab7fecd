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
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.calls import EncodeFigures
from surge_dagster.engine.encoder.isolation import FailedRow
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import Cancelled, DataError, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.ledger import Ledger
from surge_dagster.engine.output.assembly import assemble
from surge_dagster.engine.output.drift import Drift, compare_with_previous
from surge_dagster.engine.output.file_formats import file_name, write_file
from surge_dagster.engine.output.receipts import facts_of_file, receipt_of, require_unchanged
from surge_dagster.engine.output.split_partitions import Complete, SplitPartitions, Spoilt
from surge_dagster.engine.output.staging import Staging
from surge_dagster.engine.output.store import Store
from surge_dagster.engine.output.validation import invalid_row
from surge_dagster.engine.superbatch import OpenPartition, Segment, StagedRows, SuperBatch
from surge_dagster.engine.telemetry import Failure, Receipt, SuperBatchReport, overlap_ratio, worker_idle_ratio
from surge_dagster.engine.timeline import Lane, Span

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class PublishedSuperBatch:
    """What became of one SuperBatch."""

    report: SuperBatchReport
    receipts: tuple[Receipt, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class EncodedSuperBatch:
    """What is known of an encode call beside its vectors.

    Attributes:
        duty_cycle, pace_ratio, encode_span: see `SuperBatchReport`.
    """

    figures: EncodeFigures
    duty_cycle: float = 1.0
    pace_ratio: float | None = None
    encode_span: Span | None = None

    def failed_row(self, start: int, stop: int) -> FailedRow | None:
        """The text among rows start..stop that could not be encoded, if there is one."""
        return next((failed for failed in self.figures.failed if start <= failed.row < stop), None)


@dataclass(slots=True)
class _Publication:
    """One SuperBatch while its pieces are being written."""

    batch: SuperBatch
    encoded: EncodedSuperBatch
    remaining: int
    started: float = field(default_factory=time.perf_counter)
    receipts: list[Receipt] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    staged: dict[int, StagedRows] = field(default_factory=dict)  # by the segment's start
    serialize: Lane = field(default_factory=Lane)
    upload: Lane = field(default_factory=Lane)
    truncated: int = 0

    @property
    def texts_per_second(self) -> float | None:
        """Of the encode call."""
        seconds = self.encoded.figures.encode_seconds
        return len(self.batch.slot) / seconds if seconds > 0 else None


class Publisher:
    """Writes encoded SuperBatches to a store.

    Args:
        store, space: where to.
        staging: where segments of split partitions wait for the others.
        precision: recorded in each file.
        include_text: whether files have a text column.
        b_min: for the fill ratio.
        begun: `time.perf_counter()` at the run's begin.
        threads: pieces written at a time; one more writes the files of split partitions.
        ledger, assembly_bytes: the account, and what writing such a file is booked with.
        over: set by `close` when what is not out is given up; the store waits no longer than until then.
        done: called, from a publishing thread, when a SuperBatch is out; its slot is free by then.
        report: told, likewise, what became of a split partition that was complete.
    """

    def __init__(
        self,
        store: Store,
        space: Space,
        staging: Staging,
        *,
        precision: str,
        include_text: bool,
        b_min: int,
        begun: float,
        threads: int,
        ledger: Ledger,
        assembly_bytes: int,
        over: threading.Event,
        done: Callable[[SuperBatch, PublishedSuperBatch], None],
        report: Callable[[Receipt | Failure], None],
    ) -> None:
        self._store = store
        self._space = space
        self._staging = staging
        self._precision = precision
        self._include_text = include_text
        self._b_min = b_min
        self._begun = begun
        self._ledger = ledger
        self._assembly_bytes = assembly_bytes
        self._done = done
        self._report = report
        self._lock = threading.Lock()
        self._threads = threads
        self._pieces = ThreadPoolExecutor(threads, thread_name_prefix="surge-publish")
        self._files = ThreadPoolExecutor(1, thread_name_prefix="surge-publish-split")
        self._split = SplitPartitions()
        self._drift: dict[str, Drift] = {}  # by key, of partitions on their way
        self._fatal: BaseException | None = None
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
        publication = _Publication(batch, encoded, remaining=len(batch.segments))
        with self._lock:
            self._unfinished += 1
        for segment in batch.segments:
            if not _is_whole(segment):
                self._split.begin(segment.partition)
        waiting = deque(batch.segments)
        for _ in range(min(self._threads, len(waiting))):
            self._pieces.submit(self._write_waiting, publication, waiting)

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
        self._pieces.shutdown(wait=drained, cancel_futures=not drained)
        self._files.shutdown(wait=drained, cancel_futures=not drained)
        self.require_alive()

    def require_alive(self) -> None:
        """Raise what ended an earlier piece unexpectedly, if anything did."""
        if self._fatal is not None:
            raise self._fatal

    def _write_waiting(self, publication: _Publication, waiting: deque[Segment]) -> None:
        """One thread's share of a SuperBatch: a task for each of thousands of tiny partitions would cost as they do."""
        while not self._over.is_set():
            try:
                segment = waiting.popleft()
            except IndexError:
                return
            self._guarded(publication, segment)

    def _guarded(self, publication: _Publication, segment: Segment) -> None:
        if not segment.partition.refused:
            failure = self._failure(segment.partition, lambda: self._write(publication, segment))
            if failure is not None:
                with self._lock:
                    publication.failures.append(failure)
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

    def _failure(self, partition: OpenPartition, work: Callable[[], None]) -> Failure | None:
        """Do something for a partition; what goes wrong refuses it."""
        key = partition.key
        try:
            work()
            return None
        except Cancelled:
            return None
        except DataError as error:
            failure = Failure(key, str(error), remedy=error.remedy)
        except StoreUnavailable as error:
            self._fatal = error
            failure = Failure(key, str(error), transient=True)
        except SurgeError as error:
            failure = Failure(key, str(error), transient=isinstance(error, TransientError))
        except OSError as error:
            remedy = "Make room on its disk, then run again." if error.errno in _DISK_FULL else "Run again."
            reason = f"partition {key!r}: cannot be written: {error}. {remedy}"
            failure = Failure(key, reason, transient=True, remedy=remedy)
        except BaseException as error:
            self._fatal = error
            failure = Failure(key, f"partition {key!r}: {type(error).__name__}: {error}", transient=True)
        partition.refused = True
        if not failure.transient:
            self._follow(self._split.spoil(partition))
        return failure

    def _write(self, publication: _Publication, segment: Segment) -> None:
        if _is_whole(segment):
            receipt = self._publish(publication, segment)
            with self._lock:
                publication.receipts.append(receipt)
        elif segment.start < segment.stop:
            self._stage(publication, segment)

    def _publish(self, publication: _Publication, segment: Segment) -> Receipt:
        partition, slot = segment.partition, publication.batch.slot
        begun = time.perf_counter()
        matrix = self._sound_vectors(publication, segment)
        texts = slot.texts(segment.start, segment.stop) if self._include_text else None
        truncated = slot.truncated(segment.start, segment.stop)
        facts = facts_of_file(partition, self._space, precision=self._precision, rows=len(matrix), truncated=truncated)
        self._compare(publication, segment, matrix)
        drift = self._drift.pop(partition.key, None)
        file_format = self._space.file_format
        with self._store.create(file_name(self._space.name, partition.key, file_format)) as upload:
            write_file(file_format, upload, segment.ids, partition.id_type or pa.string(), texts, matrix, facts)
            serialized = time.perf_counter()
            stored = upload.publish(lambda: require_unchanged(partition.source))
        ended = time.perf_counter()
        with self._lock:
            publication.truncated += truncated
            publication.serialize.add(begun, serialized)
            publication.upload.add(serialized, ended)
        return receipt_of(
            facts,
            stored,
            self._store.location(stored.name),
            superbatch=publication.batch.index,
            texts_per_second=publication.texts_per_second,
            drift=drift,
        )

    def _stage(self, publication: _Publication, segment: Segment) -> None:
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
        ended = time.perf_counter()
        with self._lock:
            publication.staged[segment.start] = staged
            publication.truncated += truncated
            publication.serialize.add(begun, checked)
            publication.upload.add(checked, ended)

    def _compare(self, publication: _Publication, segment: Segment, matrix: np.ndarray) -> None:
        """Compare a segment with the file that is about to be replaced, where its partition was drawn for that."""
        partition = segment.partition
        if partition.replaces is None or segment.start == segment.stop:
            return
        texts = publication.batch.slot.texts(segment.start, segment.stop)
        found = compare_with_previous(
            self._store, self._space, partition.key, partition.replaces, segment.ids, texts, matrix, self._ledger
        )
        if found is not None:
            with self._lock:
                self._drift[partition.key] = found.joined(self._drift.get(partition.key))

    def _sound_vectors(self, publication: _Publication, segment: Segment) -> np.ndarray:
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

    def _follow(self, what: Complete | Spoilt | None) -> None:
        """Do what follows from the books of a split partition, in the thread for their files."""
        if what is None or (isinstance(what, Spoilt) and not self._staging.knows(what.partition.key)):
            return
        with self._lock:
            self._files_unfinished += 1
        try:
            self._files.submit(self._tidied, what)
        except RuntimeError:  # the run was given up; the next one finds what is staged
            self._file_done()

    def _tidied(self, what: Complete | Spoilt) -> None:
        try:
            if isinstance(what, Spoilt):
                self._staging.remove(what.partition.key)
                return
            failure = self._failure(what.partition, lambda: self._assemble(what))
            if failure is not None:
                self._report(failure)
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
                self._store,
                self._space,
                self._staging,
                complete.partition,
                complete.segments,
                precision=self._precision,
                include_text=self._include_text,
                going_on=self._require_going_on,
            )
            self._store.sync(self._space.name)
        finally:
            self._ledger.release(self._assembly_bytes)
        self._staging.remove(complete.partition.key)
        self._report(
            receipt_of(
                published.facts,
                published.stored,
                self._store.location(published.stored.name),
                superbatch=complete.superbatch,
                texts_per_second=complete.texts_per_second,
                texts_reused=sum(rows.stop - rows.start for rows in complete.partition.reused),
                drift=self._drift.pop(complete.partition.key, None),
            )
        )

    def _nothing_will_be_released(self) -> bool:
        return self._over.is_set() or (self._closing and not self._unfinished)

    def _require_going_on(self) -> None:
        if self._over.is_set():
            raise Cancelled

    def _finish(self, publication: _Publication) -> None:
        try:
            if publication.receipts:
                self._store.sync(self._space.name)
        except (OSError, SurgeError) as error:
            self._fatal = TransientError(
                f"cannot flush the folder {self._space.name!r} of {self._store.url!r}: {error}."
            )
            publication.failures += [Failure(receipt.key, str(self._fatal), True) for receipt in publication.receipts]
            publication.receipts = []
        batch, encoded = publication.batch, publication.encoded
        figures = encoded.figures
        publish_seconds = time.perf_counter() - publication.started
        texts = sum(segment.stop - segment.start for segment in batch.segments)  # all of it, unless the run was stopped
        report = SuperBatchReport(
            index=batch.index,
            partitions=len(batch.segments),
            texts=texts,
            text_bytes=batch.slot.text_bytes,
            tokens=figures.tokens,
            padded_tokens=figures.padded_tokens,
            truncated=publication.truncated,
            encode_seconds=figures.encode_seconds,
            tokenize_seconds=figures.tokenize_seconds,
            forward_seconds=figures.forward_seconds,
            serialize_seconds=publication.serialize.seconds,
            upload_seconds=publication.upload.seconds,
            publish_seconds=publish_seconds,
            fill_ratio=texts / self._b_min,
            overlap_ratio=overlap_ratio(publish_seconds, figures.encode_seconds),
            texts_per_second=texts / figures.encode_seconds if figures.encode_seconds > 0 else 0.0,
            copy_seconds=figures.copy_seconds,
            duty_cycle=encoded.duty_cycle,
            worker_idle_ratio=worker_idle_ratio(figures.forward_seconds, figures.workers, figures.encode_seconds),
            pace_ratio=encoded.pace_ratio,
            replays=figures.replays,
            gpu_utilisation=figures.gpu_utilisation,
            gpu_memory_bytes=figures.gpu_memory_bytes,
            peak_resident_bytes=self._ledger.peak,
            encode_span=encoded.encode_span,
            serialize_span=publication.serialize.span(self._begun),
            upload_span=publication.upload.span(self._begun),
        )
        order = {segment.partition.key: place for place, segment in enumerate(batch.segments)}
        receipts = tuple(sorted(publication.receipts, key=lambda receipt: order[receipt.key]))
        self._done(batch, PublishedSuperBatch(report, receipts, tuple(publication.failures)))
        for segment in batch.segments:
            if not _is_whole(segment):
                staged = publication.staged.get(segment.start) if segment.start < segment.stop else None
                self._follow(self._split.end(segment, staged, batch.index, publication.texts_per_second))


def _is_whole(segment: Segment) -> bool:
    return segment.first_row == 0 and segment.last
