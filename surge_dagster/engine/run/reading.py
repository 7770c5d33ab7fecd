"""The reading stage: decide for each partition whether it needs work, read it, and gather its rows into SuperBatches.

A fresh partition is skipped without being opened. Where the source version moved, one reading computes the content
digest: if the content is the same, the file is rewritten with the new version and nothing is encoded. Every other
partition is gathered; rows that an earlier run left staged are read and checked, but not encoded again. A partition is
refused as a whole, before anything of it is published: it is closed only after every check on its rows has passed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

from surge_dagster.engine.errors import Cancelled, DataError, PlaceTaken, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.run.aggregator import Aggregator
from surge_dagster.engine.run.previous_rows import PreviousRows, ReadingRates, open_previous_rows
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.rewriting import republish
from surge_dagster.engine.run.run_context import RunContext
from surge_dagster.engine.run.space_target import require_unchanged
from surge_dagster.engine.run.staging import OtherRows, StagedRowsCheck
from surge_dagster.engine.run.superbatch import (
    MissingTexts,
    OpenPartition,
    StagedRows,
    SuperBatch,
    row_bytes,
)
from surge_dagster.engine.sources.content import ContentDigest, IdSet, refuse_repeated_id
from surge_dagster.engine.sources.partition import Partition, RowBatch, read_rows
from surge_dagster.engine.support.keys import encode_key

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


def superbatches(
    partitions: Iterable[Partition],
    outputs: OutputState,
    context: RunContext,
    *,
    force: bool = False,
) -> Iterator[SuperBatch | Receipt | Failure]:
    """Read partitions in their order, and yield what follows from each.

    Args:
        outputs: the files of the space.
        context: of the run. The memory of each SuperBatch is booked, and its receiver releases it.
        force: encode fresh partitions too.

    Yields:
        SuperBatches to encode, receipts of partitions that need no encoding, failures of partitions that are refused.

    Raises:
        Cancelled: the run is stopping.
        StoreUnavailable: the store does not answer.
        ConfigError: the source cannot be listed.
    """
    reader = _Reader(context, outputs, force)
    for partition in outputs.looked_at(partitions):
        context.stop.require_running()
        yield from reader.read(partition)
    yield from reader.finish()
    for partition in reader.mixed():
        yield from reader.read(partition)
    yield from reader.finish()


class _NoRoom(Exception):
    """The memory limit does not allow reading a file."""


class _Reader:
    """Reads one partition after the other; its generator methods yield what `superbatches` yields."""

    def __init__(self, context: RunContext, outputs: OutputState, force: bool) -> None:
        self._context = context
        self._outputs = outputs
        self._force = force
        self._aggregator = Aggregator(context.bounds, context.acquire, context.reserve)
        self._seen: set[str] = set()
        self._rates = ReadingRates()
        self._may_be_mixed = False

    def read(self, partition: Partition) -> Iterator[SuperBatch | Receipt | Failure]:
        """Deal with one partition: skip it, rewrite its file, gather its rows, or refuse it."""
        try:
            self._require_new(partition)
            published = self._outputs.file(partition.key)
            receipt = None if published is None else self._receipt_without_encoding(partition, published)
            if receipt is None:
                yield from self._gather(partition, published)
            else:
                self._context.staging.remove(partition.key)
                yield receipt
        except DataError as error:
            yield _refusal(partition, error)
        except StoreUnavailable:
            raise
        except SurgeError as error:
            yield Failure(partition.key, str(error), transient=isinstance(error, TransientError))
        except OSError as error:
            remedy = "Run again when its storage answers."
            yield Failure(partition.key, f"partition {partition.key!r}: {error}. {remedy}", True, remedy)

    def finish(self) -> Iterator[SuperBatch]:
        """Yield the rows that are left after the last partition."""
        yield from map(self._context.booked, self._aggregator.finish())

    def mixed(self) -> list[Partition]:
        """Partitions that have to be read again, after `finish`; from then on nothing is reused.

        It waits for the SuperBatches that may still show that the old file of a split partition is not to be trusted.
        """
        context = self._context
        while self._may_be_mixed and context.in_flight.texts:
            context.stop.stopping.wait(_POLL_SECONDS)
            context.stop.require_running()
        self._force, self._seen = True, set()
        return [opened.source for opened in context.read_again.values() if not opened.refused]

    def _require_new(self, partition: Partition) -> None:
        try:
            encode_key(partition.key)
        except ValueError as error:
            raise DataError(partition.key, str(error), "Give the partition a name.") from error
        if partition.key in self._seen:
            raise DataError(
                partition.key,
                "the key comes again after it was closed; the rows of a partition must follow each other",
                "Order the source by partition key, then run again.",
            )
        self._seen.add(partition.key)

    def _receipt_without_encoding(self, partition: Partition, published: PublishedFile) -> Receipt | None:
        """The receipt of a partition whose file is fresh or could be republished; None where it has to be encoded."""
        target = self._context.target
        status = self._outputs.status_of(partition, published)
        location = target.store.location(published.stored.name)
        if status == "foreign":
            raise PlaceTaken(
                partition.key,
                f"its place in the output, {location!r}, is taken by a file of the space {published.facts.space!r}; "
                "it was left alone",
                "Move that file to its own space's folder, then run again.",
            )
        if self._force:
            return None
        if status == "fresh":
            return Receipt.of(published.facts, published.stored, location, action="fresh")
        digest, widest_row, missing = self._content(partition)
        if digest != published.facts.content_digest:
            return None
        share = self._context.memory.reader + target.store.upload_bytes
        try:
            with self._held(share):
                rewritten = republish(
                    target,
                    published,
                    partition,
                    widest_row=widest_row,
                    missing=missing,
                    held=lambda size: self._held(size, beside=share),
                )
        except (InvalidFile, _NoRoom) as error:
            log.warning("%s is encoded again: %s", location, error)
            return None
        return Receipt.of(rewritten.facts, rewritten.stored, location, action="republished")

    def _content(self, partition: Partition) -> tuple[str, int, MissingTexts]:
        """The content digest of a partition, its largest row in bytes of id and text, and its missing texts."""
        digest, widest, missing = ContentDigest(), 0, MissingTexts()
        with self._pages(partition):
            for batch in self._batches(partition):
                digest.update(batch)
                missing.count(batch)
                widest = max(widest, int(row_bytes(batch).max(initial=0)))
        return digest.hexdigest(), widest, missing

    @contextlib.contextmanager
    def _held(self, size: int, beside: int = 0) -> Iterator[None]:
        # Gathered rows that have their vectors already wait for this stage too.
        ledger = self._context.ledger
        available = self._context.memory.beside_superbatch - self._aggregator.held_vector_bytes
        if size + beside > available:
            raise _NoRoom(
                f"reading it takes {size + beside:,} bytes at a time and {available:,} are available; "
                "a higher memory_limit_bytes would avoid that"
            )
        ledger.reserve(size, self._context.stop.stopping.is_set)
        try:
            yield
        finally:
            ledger.release(size)

    def _gather(self, partition: Partition, replaced: PublishedFile | None) -> Iterator[SuperBatch]:
        staged = self._staged(partition)
        with self._pages(partition):
            try:
                yield from self._gather_unstaged(self._opened(partition, replaced), replaced, staged)
            except OtherRows as error:
                log.warning("partition %r: its staged rows are not used: %s", partition.key, error)
                self._context.staging.remove(partition.key)
                yield from self._gather_unstaged(self._opened(partition, replaced), replaced, [])

    def _opened(self, partition: Partition, replaced: PublishedFile | None) -> OpenPartition:
        opened = OpenPartition(partition)
        if replaced is not None:
            opened.previous, opened.previous_encoded_at = replaced.stored, replaced.facts.oldest_encoded_at
        if partition.key in self._context.read_again:
            opened.cosines = self._context.read_again[partition.key].cosines
        return opened

    def _staged(self, partition: Partition) -> list[StagedRows]:
        """Rows of the partition that an earlier run staged and that can be used."""
        context = self._context
        if not context.staging.knows(partition.key):
            return []
        if self._force:
            context.staging.remove(partition.key)
            return []
        context.ledger.reserve(context.memory.reader, context.stop.stopping.is_set)
        try:
            return context.staging.usable(partition)
        finally:
            context.ledger.release(context.memory.reader)

    def _gather_unstaged(
        self, opened: OpenPartition, replaced: PublishedFile | None, staged: list[StagedRows]
    ) -> Iterator[SuperBatch]:
        """Read all rows, and gather those that are not staged, with the vectors that the old file has.

        Raises:
            OtherRows: the staged rows are not those that are read; nothing of the partition is held any more.
        """
        with open_previous_rows(self._context, replaced, opened, self._rates, reuse=not self._force) as previous:
            yield from self._gather_rows(opened, previous, staged)
        if opened.content_digest is not None:
            yield from map(self._context.booked, self._aggregator.close())

    def _gather_rows(
        self, opened: OpenPartition, previous: PreviousRows | None, staged: list[StagedRows]
    ) -> Iterator[SuperBatch]:
        partition, context = opened.source, self._context
        digest, ids = ContentDigest(), IdSet()
        check = StagedRowsCheck(staged) if staged else None
        opened.kept = bool(staged)
        self._may_be_mixed |= opened.kept and previous is not None
        self._aggregator.open(opened)
        try:
            for batch in self._batches(partition):
                if opened.refused:
                    return  # a later stage refused and reported it
                digest.update(batch)
                opened.missing.count(batch)
                self._book_ids(partition, ids, len(batch), previous)
                ids.add(batch.ids)
                for rows, is_staged in check.cut(batch) if check is not None else ((batch, False),):
                    if is_staged:
                        if previous is not None:
                            previous.skip(rows)
                        self._aggregator.skip(rows)
                        continue
                    for piece, known in previous.known(rows) if previous is not None else ((rows, None),):
                        ready = self._aggregator.add(piece, known)
                        context.in_flight.add(len(piece))
                        for full in map(context.booked, ready):
                            is_split = full.segments[-1].partition is opened
                            self._may_be_mixed |= is_split and previous is not None
                            yield full
            if check is not None:
                check.finish()
            came = opened.rows + opened.missing.skipped_rows
            if partition.rows not in (None, came):
                raise TransientError(
                    f"partition {partition.key!r}: {partition.rows:,} rows were announced and {came:,} came. "
                    "Its source changed while it was read; run again.",
                    partition.key,
                )
            refuse_repeated_id(partition, ids.repeated())
            opened.staged += staged
            opened.reused_texts = sum(rows.stop - rows.start for rows in staged)
            opened.changes = previous.changes() if previous is not None else None
            opened.content_digest = digest.hexdigest()
        except OtherRows:
            opened.refused = True
            raise
        except DataError:
            opened.refused = True
            context.staging.discard(partition.key)
            raise
        finally:
            context.ledger.release(ids.bytes)
            if opened.content_digest is None:
                self._drop()

    def _drop(self) -> None:
        """Drop gathered rows of the open partition; segments that were yielded before are still staged."""
        texts, size = self._aggregator.discard()
        self._context.ledger.release(size)
        self._context.in_flight.remove(texts)

    def _book_ids(self, partition: Partition, ids: IdSet, rows: int, previous: PreviousRows | None) -> None:
        memory = self._context.memory
        beyond = max(0, partition.page_bytes - memory.reader_pages)
        needed, available = ids.bytes_after(rows), memory.source - beyond
        if previous is not None and needed + previous.held > available:
            previous.give_up()
        if needed > available:
            raise DataError(
                partition.key,
                f"finding repeated ids takes {needed:,} bytes and {available:,} are set aside",
                "Raise the memory limit, or split the partition in the source.",
            )
        self._context.ledger.reserve(needed - ids.bytes, self._context.stop.stopping.is_set)

    @contextlib.contextmanager
    def _pages(self, partition: Partition) -> Iterator[None]:
        """Books what the source's pages may take until the partition is read.

        Raises:
            DataError: they do not fit.
        """
        ledger, size, memory = self._context.ledger, partition.page_bytes, self._context.memory
        if size > memory.pages:
            id_bytes = IdSet().bytes_after(partition.rows or 0)
            raise DataError(
                partition.key,
                f"reading its largest row group may take {size:,} bytes of memory and {memory.pages:,} are set aside",
                f"Write row groups of fewer rows, or set memory_limit_bytes to {memory.limit_for(size + id_bytes):,}.",
            )
        self._context.reserve(size)
        try:
            yield
        finally:
            ledger.release(size)

    def _batches(self, partition: Partition) -> Iterator[RowBatch]:
        """A partition's rows; each batch is booked while it is in use."""
        ledger, stopping = self._context.ledger, self._context.stop.stopping
        share = self._context.memory.reader - min(partition.page_bytes, self._context.memory.reader_pages)
        for batch in read_rows(partition):
            if stopping.is_set():
                raise Cancelled
            # What Arrow holds: the values, and up to eight bytes a row for the offsets of each column.
            reading = min(2 * (batch.value_bytes + 16 * (len(batch) + 1)), share)
            ledger.reserve(reading, stopping.is_set)
            try:
                yield batch
            finally:
                ledger.release(reading)


def _refusal(partition: Partition, error: DataError) -> Failure:
    """The failure of a partition; transient where its source is being replaced, so that the next run can help."""
    try:
        require_unchanged(partition)
    except (SurgeError, OSError):
        changed = "Its source changed while it was read; run again."
        return Failure(partition.key, f"{error} {changed}", transient=True, remedy=changed)
    return Failure(partition.key, str(error), remedy=error.remedy, in_source=not isinstance(error, PlaceTaken))
