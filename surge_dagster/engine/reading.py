"""The reader's side of a run: decide for each partition whether it needs work, read it, and gather its rows.

A partition is refused as a whole and before anything of it is published: every check on its rows has passed when its
last row was read, and only then is it closed. A partition that is fresh is skipped without being opened. One whose
source version moved is read once for its digest alone: if the content is what it was, its file is rewritten with the
new version and nothing is encoded. Of one that an earlier run left staged in part, all rows are read and checked, and
those without vectors are gathered.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator

from surge_dagster.engine.errors import Cancelled, DataError, PlaceTaken, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.files.embedding_file import InvalidFile
from surge_dagster.engine.memory import MemoryPlan
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.drift import DriftDraw
from surge_dagster.engine.output.freshness import OutputState, PublishedFile
from surge_dagster.engine.output.receipts import receipt_of, require_unchanged
from surge_dagster.engine.output.republish import republish
from surge_dagster.engine.output.staged_rows import OtherRows, StagedRowsCheck
from surge_dagster.engine.output.staging import Staging
from surge_dagster.engine.report import Failure, InFlight, Receipt
from surge_dagster.engine.sources.content import ContentDigest, IdSet, refuse_repeated_id
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.superbatch import Aggregator, OpenPartition, StagedRows, SuperBatch, row_bytes
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.engine.support.ledger import Ledger

log = logging.getLogger(__name__)


class _NoRoom(Exception):
    """The budget does not allow for reading a file."""


class Admission:
    """Takes partitions one after the other.

    Args:
        aggregator: gathers the rows.
        outputs: what was published before this run.
        staging: what is staged of partitions that were not.
        store, space: for files that are only rewritten.
        ledger, memory: the account, and the shares it is divided into.
        in_flight: counts texts admitted.
        force: encode what is fresh too.
        again: keys of partitions to encode though their files look fresh.
        stopped: becomes true when the run is stopping.
        hand_over: takes each SuperBatch that became ready.
        report: takes receipts of partitions that need no encoding, and failures.
        abandon: told of a partition whose rows were refused, of which parts may be staged or on their way.
    """

    def __init__(
        self,
        *,
        aggregator: Aggregator,
        outputs: OutputState,
        staging: Staging,
        store: Store,
        space: Space,
        ledger: Ledger,
        memory: MemoryPlan,
        in_flight: InFlight,
        force: bool,
        again: Collection[str],
        stopped: Callable[[], bool],
        hand_over: Callable[[SuperBatch], None],
        report: Callable[[Receipt | Failure], None],
        abandon: Callable[[OpenPartition], None],
    ) -> None:
        self._aggregator = aggregator
        self._outputs = outputs
        self._staging = staging
        self._store = store
        self._space = space
        self._ledger = ledger
        self._memory = memory
        self._in_flight = in_flight
        self._force = force
        self._again = again
        self._stopped = stopped
        self._hand_over = hand_over
        self._report = report
        self._abandon = abandon
        self._seen: set[str] = set()
        self._draw = DriftDraw()

    def admit(self, partition: Partition) -> None:
        """Deal with one partition: skip it, rewrite its file, gather its rows, or refuse it.

        Raises:
            Cancelled: the run is stopping.
        """
        try:
            self._require_new(partition)
            published = self._outputs.file(partition.key)
            if published is not None and self._settled(partition, published):
                self._staging.remove(partition.key)
            else:
                self._gather(partition, published)
        except DataError as error:
            self._report(self._refusal(partition, error))
        except StoreUnavailable:
            raise
        except SurgeError as error:
            self._report(Failure(partition.key, str(error), transient=isinstance(error, TransientError)))
        except OSError as error:
            remedy = "Run again when its storage answers."
            reason = f"partition {partition.key!r}: {error}. {remedy}"
            self._report(Failure(partition.key, reason, transient=True, remedy=remedy))

    def finish(self) -> None:
        """Hand over what is left after the last partition."""
        for batch in self._aggregator.finish():
            self._hand_over(batch)

    def _refusal(self, partition: Partition, error: DataError) -> Failure:
        """What was found wrong may be the trace of a source that was being replaced: then another run can help."""
        try:
            require_unchanged(partition)
        except (SurgeError, OSError):
            changed = "Its source changed while it was read; run again."
            return Failure(partition.key, f"{error} {changed}", transient=True, remedy=changed)
        return Failure(partition.key, str(error), remedy=error.remedy, in_source=not isinstance(error, PlaceTaken))

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

    def _settled(self, partition: Partition, published: PublishedFile) -> bool:
        """Whether the partition, of which there is a file, is dealt with without encoding it."""
        status = self._outputs.status_of(partition, published)
        if status == "foreign":
            raise PlaceTaken(
                partition.key,
                f"its place in the output, {self._store.location(published.stored.name)!r}, is taken by a file of the "
                f"space {published.facts.space!r}; it was left alone",
                "Move that file to its own space's folder, then run again.",
            )
        if self._force or partition.key in self._again:
            return False
        if status == "fresh":
            self._report_settled(published, "fresh")
            return True
        digest, widest_row = self._content(partition)
        if digest != published.facts.content_digest:
            return False
        share = self._memory.reader + self._store.upload_bytes
        try:
            with self._held(share):
                rewritten = republish(
                    self._store,
                    published,
                    partition,
                    self._space,
                    widest_row=widest_row,
                    held=lambda size: self._held(size, beside=share),
                )
        except (InvalidFile, _NoRoom) as error:
            log.warning("%s is encoded again: %s", self._store.location(published.stored.name), error)
            return False
        self._report_settled(rewritten, "republished")
        return True

    def _report_settled(self, published: PublishedFile, action: str) -> None:
        location = self._store.location(published.stored.name)
        self._report(receipt_of(published.facts, published.stored, location, action=action))

    def _content(self, partition: Partition) -> tuple[str, int]:
        """The digest of a partition's rows, and the most bytes of id and text that one of them has."""
        digest, widest = ContentDigest(), 0
        for batch in self._batches(partition):
            digest.update(batch)
            widest = max(widest, int(row_bytes(batch).max(initial=0)))
        return digest.hexdigest(), widest

    @contextlib.contextmanager
    def _held(self, size: int, beside: int = 0) -> Iterator[None]:
        if size + beside > self._memory.beside_superbatch:
            raise _NoRoom(
                f"reading it takes {size + beside:,} bytes at once and {self._memory.beside_superbatch:,} can be had; "
                "a higher memory_limit_bytes would avoid that"
            )
        self._ledger.reserve(size, self._stopped)
        try:
            yield
        finally:
            self._ledger.release(size)

    def _gather(self, partition: Partition, replaced: PublishedFile | None) -> None:
        opened = OpenPartition(partition)
        if replaced is not None and self._draw.takes(partition.key):
            opened.replaces = replaced.facts.content_digest
        staged = self._staged(partition)
        try:
            self._gather_unstaged(opened, staged)
        except OtherRows as error:
            log.warning("partition %r: what was staged of it is not used: %s", partition.key, error)
            self._staging.remove(partition.key)
            self._gather_unstaged(OpenPartition(partition, replaces=opened.replaces), [])

    def _staged(self, partition: Partition) -> list[StagedRows]:
        """What an earlier run staged of the partition and can be used; what cannot is removed."""
        if not self._staging.knows(partition.key):
            return []
        if self._force:
            self._staging.remove(partition.key)
            return []
        self._ledger.reserve(self._memory.reader, self._stopped)
        try:
            return self._staging.usable(partition)
        finally:
            self._ledger.release(self._memory.reader)

    def _gather_unstaged(self, opened: OpenPartition, staged: list[StagedRows]) -> None:
        """Read all rows, and gather those that are not staged.

        Raises:
            OtherRows: what is staged is not what is read; nothing of the partition is held any more.
        """
        partition = opened.source
        digest, ids = ContentDigest(), IdSet()
        seam = StagedRowsCheck(staged) if staged else None
        self._aggregator.open(opened)
        try:
            for batch in self._batches(partition):
                if opened.refused:
                    return  # it failed further on, where that was reported
                digest.update(batch)
                self._grow(partition, ids, len(batch))
                ids.add(batch.ids)
                for rows, are_staged in seam.cut(batch) if seam is not None else ((batch, False),):
                    if are_staged:
                        self._aggregator.skip(rows)
                        continue
                    taken = self._aggregator.add(rows)
                    self._in_flight.add(len(rows))
                    for ready in taken:
                        self._hand_over(ready)
            if seam is not None:
                seam.finish()
            if partition.rows not in (None, opened.rows):
                raise TransientError(
                    f"partition {partition.key!r}: {partition.rows:,} rows were announced and {opened.rows:,} came. "
                    "Its source changed while it was read; run again.",
                    partition.key,
                )
            refuse_repeated_id(partition, ids.repeated())
            opened.reused += staged
            opened.content_digest = digest.hexdigest()
        except OtherRows:
            opened.refused = True
            raise
        except DataError:
            opened.refused = True
            self._abandon(opened)
            raise
        finally:
            self._ledger.release(ids.bytes)
            if opened.content_digest is None:
                self._drop()
        for ready in self._aggregator.close():
            self._hand_over(ready)

    def _drop(self) -> None:
        """What was handed over already is not lost unless it was refused: its segments are staged."""
        texts, size = self._aggregator.discard()
        self._ledger.release(size)
        self._in_flight.remove(texts)

    def _grow(self, partition: Partition, ids: IdSet, rows: int) -> None:
        wanted = ids.bytes_after(rows)
        if wanted > self._memory.id_set:
            raise DataError(
                partition.key,
                f"telling whether its ids repeat takes {wanted:,} bytes and {self._memory.id_set:,} are set aside",
                "Raise the memory limit, or split the partition in the source.",
            )
        self._ledger.reserve(wanted - ids.bytes, self._stopped)

    def _batches(self, partition: Partition) -> Iterator[RowBatch]:
        """A partition's rows; each batch counts as held while it is looked at."""
        for batch in partition.read():
            if self._stopped():
                raise Cancelled
            # As much as Arrow holds: values, and up to eight bytes a row for where each id and each text begins.
            reading = min(2 * (batch.value_bytes + 16 * (len(batch) + 1)), self._memory.reader)
            self._ledger.reserve(reading, self._stopped)
            try:
                yield batch
            finally:
                self._ledger.release(reading)
