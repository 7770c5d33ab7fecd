"""From an encoded SuperBatch to files: threads that slice, serialize and publish it while the next one is encoded.

A partition that lies in one SuperBatch is one task. The segments of a split partition are appended to one open file by
a thread of their own, in order. When the last piece of a SuperBatch is written, its folder is flushed once, its memory
is given back, and only then are its receipts reported. What fails here fails its partition and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from surge_dagster.engine.catalog import Partition
from surge_dagster.engine.columns import value_lengths
from surge_dagster.engine.encoder.calls import EncodeFigures
from surge_dagster.engine.encoder.isolation import FailedRow
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import DataError, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.output.embedding_file import (
    EmbeddingFileWriter,
    FileFacts,
    desired_version,
    page_window_bytes,
    piece_bytes,
)
from surge_dagster.engine.output.freshness import file_name
from surge_dagster.engine.output.store import Store, StoredObject, Upload
from surge_dagster.engine.output.validation import invalid_row
from surge_dagster.engine.superbatch import OpenPartition, Segment, SuperBatch
from surge_dagster.engine.telemetry import Failure, Receipt, SuperBatchReport, overlap_ratio, worker_idle_ratio

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PublishedSuperBatch:
    """What became of one SuperBatch; `ended_texts` are the texts of partitions that ended in it, well or badly."""

    report: SuperBatchReport
    receipts: tuple[Receipt, ...]
    failures: tuple[Failure, ...]
    ended_texts: int


@dataclass(frozen=True, slots=True)
class EncodedSuperBatch:
    """What is known of an encode call beside its vectors.

    Attributes:
        duty_cycle, pace_ratio: see `SuperBatchReport`.
    """

    figures: EncodeFigures
    duty_cycle: float = 1.0
    pace_ratio: float | None = None

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
    serialize_seconds: float = 0.0
    upload_seconds: float = 0.0
    truncated: int = 0


@dataclass(slots=True)
class _OpenFile:
    """A file to which segments are being appended."""

    upload: Upload
    writer: EmbeddingFileWriter
    cleanup: ExitStack
    truncated: int = 0


class Publisher:
    """Writes encoded SuperBatches to a store.

    Args:
        store, space: where to.
        precision: recorded in each file.
        include_text: whether files have a text column.
        b_min: for the fill ratio.
        threads: pieces written at a time; the segments of split partitions have one more thread.
        done: called, from a publishing thread, when a SuperBatch is out; its slot is free by then.
    """

    def __init__(
        self,
        store: Store,
        space: Space,
        *,
        precision: str,
        include_text: bool,
        b_min: int,
        threads: int,
        done: Callable[[SuperBatch, PublishedSuperBatch], None],
    ) -> None:
        self._store = store
        self._space = space
        self._precision = precision
        self._include_text = include_text
        self._b_min = b_min
        self._done = done
        self._lock = threading.Lock()
        self._pieces = ThreadPoolExecutor(threads, thread_name_prefix="surge-publish")
        self._split_lane = ThreadPoolExecutor(1, thread_name_prefix="surge-publish-split")
        self._open: dict[str, _OpenFile] = {}  # touched by the split lane alone
        self._fatal: BaseException | None = None
        self._unfinished = 0
        self._finished = threading.Condition(self._lock)

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
            whole = segment.first_row == 0 and segment.last
            lane: Executor = self._pieces if whole else self._split_lane
            lane.submit(self._guarded, publication, segment, self._write_whole if whole else self._append_segment)

    def abandon(self, partition: OpenPartition) -> None:
        """Throw away what was written of a split partition that was refused while it was read."""
        self._split_lane.submit(self._discard_open, partition.key)

    def close(self, timeout_seconds: float | None = None) -> None:
        """Wait until everything submitted is out, and throw away files that can no longer be completed.

        Args:
            timeout_seconds: how long to wait; what is not out by then is left to the next run.
        """
        with self._finished:
            drained = self._finished.wait_for(lambda: not self._unfinished, timeout_seconds)
        if not drained:
            log.warning(
                "%d SuperBatches were not published within the grace time; the next run does them again",
                self._unfinished,
            )
        self._pieces.shutdown(wait=drained, cancel_futures=not drained)
        self._split_lane.shutdown(wait=drained, cancel_futures=not drained)
        if drained:
            for key in list(self._open):
                self._discard_open(key)
        self.require_alive()

    def require_alive(self) -> None:
        """Raise what ended an earlier piece unexpectedly, if anything did."""
        if self._fatal is not None:
            raise self._fatal

    def _guarded(
        self, publication: _Publication, segment: Segment, write: Callable[[_Publication, Segment], Receipt | None]
    ) -> None:
        failure: Failure | None = None
        receipt: Receipt | None = None
        key = segment.partition.key
        try:
            if not segment.partition.refused:
                receipt = write(publication, segment)
        except StoreUnavailable as error:
            self._fatal = error
            failure = Failure(key, str(error), transient=True)
        except SurgeError as error:
            failure = Failure(key, str(error), transient=isinstance(error, TransientError))
        except OSError as error:
            failure = Failure(key, f"partition {key!r}: cannot be written: {error}. Run again.", transient=True)
        except BaseException as error:
            self._fatal = error
            failure = Failure(key, f"partition {key!r}: {type(error).__name__}: {error}", transient=True)
        if failure is not None:
            segment.partition.refused = True
            if write == self._append_segment:  # then this is the split lane, which alone may touch open files
                self._discard_open(key)
        with self._lock:
            if failure is not None:
                publication.failures.append(failure)
            if receipt is not None:
                publication.receipts.append(receipt)
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

    def _write_whole(self, publication: _Publication, segment: Segment) -> Receipt:
        with ExitStack() as cleanup:
            opened = self._begin(segment, cleanup)
            self._append(publication, segment, opened)
            return self._publish(publication, segment, opened)

    def _append_segment(self, publication: _Publication, segment: Segment) -> Receipt | None:
        key = segment.partition.key
        opened = self._open.get(key)
        if opened is None:
            with ExitStack() as cleanup:
                opened = self._open[key] = self._begin(segment, cleanup)
                opened.cleanup = cleanup.pop_all()
        self._append(publication, segment, opened)
        if not segment.last:
            return None
        receipt = self._publish(publication, segment, opened)
        del self._open[key]
        opened.cleanup.close()
        return receipt

    def _begin(self, segment: Segment, cleanup: ExitStack) -> _OpenFile:
        upload = cleanup.enter_context(self._store.create(file_name(self._space.name, segment.partition.key)))
        writer = EmbeddingFileWriter(
            upload.sink,
            segment.partition.id_type or pa.string(),
            self._space.dimension,
            self._space.dtype,
            include_text=self._include_text,
        )
        return _OpenFile(upload, cleanup.enter_context(writer), cleanup)

    def _append(self, publication: _Publication, segment: Segment, opened: _OpenFile) -> None:
        begun = time.perf_counter()
        slot = publication.batch.slot
        failed = publication.encoded.failed_row(segment.start, segment.stop)
        if failed is not None:
            raise DataError(
                segment.partition.key,
                f"its text ends every worker that encodes it ({failed.reason})",
                "Look at this text, shorten it or take it out, and run again.",
                segment.first_row + failed.row - segment.start,
            )
        matrix = slot.matrix(segment.start, segment.stop)
        wrong = invalid_row(matrix, normalized=self._space.normalize)
        if wrong is not None:
            raise DataError(
                segment.partition.key,
                f"{wrong[1]}: the encoder gave what cannot be published",
                "Look at the text of this row; if it is ordinary, the model or the device is at fault.",
                segment.first_row + wrong[0],
            )
        ids = pa.chunked_array(list(segment.ids), type=segment.partition.id_type or pa.string())
        texts = slot.texts(segment.start, segment.stop) if self._include_text else None
        truncated = slot.truncated(segment.start, segment.stop)
        opened.writer.append(ids, texts, matrix)
        opened.truncated += truncated
        with self._lock:
            publication.truncated += truncated
            publication.serialize_seconds += time.perf_counter() - begun

    def _publish(self, publication: _Publication, segment: Segment, opened: _OpenFile) -> Receipt:
        partition = segment.partition
        if partition.content_digest is None:
            raise RuntimeError(f"partition {partition.key!r} reached its end without a content digest")
        begun = time.perf_counter()
        facts = FileFacts(
            partition_key=partition.key,
            space=self._space.name,
            model=self._space.requested.model,
            precision=self._precision,
            source_version=partition.source.source_version,
            content_digest=partition.content_digest,
            desired_version=desired_version(partition.content_digest, self._space.name),
            rows=opened.writer.rows,
            dimension=self._space.dimension,
            truncated=opened.truncated,
        )
        opened.writer.close(facts)
        stored = opened.upload.publish(lambda: require_unchanged(partition.source))
        with self._lock:
            publication.upload_seconds += time.perf_counter() - begun
        encode_seconds = publication.encoded.figures.encode_seconds
        return receipt_of(
            facts,
            stored,
            self._store.location(stored.name),
            superbatch=publication.batch.index,
            texts_per_second=len(publication.batch.slot) / encode_seconds if encode_seconds > 0 else None,
        )

    def _discard_open(self, key: str) -> None:
        opened = self._open.pop(key, None)
        if opened is not None:
            try:
                opened.cleanup.__exit__(RuntimeError, RuntimeError("abandoned"), None)
            except Exception as error:  # the partition's own failure counts, and the others go on
                log.warning("cannot clean up after partition %r: %s", key, error)

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
            serialize_seconds=publication.serialize_seconds,
            upload_seconds=publication.upload_seconds,
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
        )
        ended = sum(segment.first_row + segment.stop - segment.start for segment in batch.segments if segment.last)
        order = {segment.partition.key: place for place, segment in enumerate(batch.segments)}
        receipts = tuple(sorted(publication.receipts, key=lambda receipt: order[receipt.key]))
        self._done(batch, PublishedSuperBatch(report, receipts, tuple(publication.failures), ended))


def require_unchanged(partition: Partition) -> None:
    """Look the source version up once more, so that of two writers the one with the newer source wins.

    Raises:
        TransientError: the source has changed, or has gone, since the partition was listed.
    """
    current = partition.current_source_version()
    if current != partition.source_version:
        came = "it has gone" if current is None else f"it is {current!r} now"
        raise TransientError(
            f"partition {partition.key!r}: its source changed while it was encoded (source version "
            f"{partition.source_version!r} was read, {came}). The result was thrown away; run again.",
            partition.key,
        )


def receipt_of(
    facts: FileFacts,
    stored: StoredObject,
    location: str,
    *,
    superbatch: int | None = None,
    texts_per_second: float | None = None,
    action: str = "encoded",
) -> Receipt:
    """The receipt of a published file."""
    return Receipt(
        key=facts.partition_key,
        action=action,  # pyright: ignore[reportArgumentType]
        path=location,
        rows=facts.rows,
        dimension=facts.dimension,
        bytes=stored.size,
        etag=stored.etag,
        truncated=facts.truncated,
        source_version=facts.source_version,
        content_digest=facts.content_digest,
        desired_version=facts.desired_version,
        space=facts.space,
        superbatch=superbatch,
        texts_per_second=texts_per_second,
    )


def largest_pieces(batch: SuperBatch, space: Space, threads: int) -> int:
    """Memory that writing a SuperBatch can take at once: that of its `threads` largest pieces, in bytes."""
    itemsize = np.dtype(space.dtype).itemsize
    offsets = batch.slot.offsets
    sizes = []
    for segment in batch.segments:
        widest = _window(np.diff(offsets[segment.start : segment.stop + 1]))
        if segment.ids and not pa.types.is_int64(segment.ids[0].type):
            widest = max(widest, _window(np.concatenate([value_lengths(ids) for ids in segment.ids])))
        sizes.append(piece_bytes(segment.stop - segment.start, space.dimension, itemsize, widest))
    return sum(sorted(sizes)[-threads:])


def _window(lengths: np.ndarray) -> int:
    return page_window_bytes(int(lengths.sum()), int(lengths.max(initial=0)))
