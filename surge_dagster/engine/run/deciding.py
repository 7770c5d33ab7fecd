"""The first part of the reader: decide for each partition whether it is fresh, republished, or has to be read.

A fresh partition is skipped without being opened. Where the source version moved, one reading computes the content
digest: if the content is the same, the file is rewritten with the new version and nothing is encoded.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator

from surge_dagster.engine.errors import DataError, PlaceTaken, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.rewriting import republish
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.space_target import SpaceTarget, require_unchanged
from surge_dagster.engine.run.staging import Staging
from surge_dagster.engine.run.superbatch import MissingTexts, PartitionToRead, row_bytes
from surge_dagster.engine.sources.content import ContentDigest
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.keys import encode_key

log = logging.getLogger(__name__)


def decide(
    partitions: Iterable[Partition],
    outputs: OutputState,
    target: SpaceTarget,
    staging: Staging,
    memory: RunMemory,
    *,
    force: bool,
    seen: Collection[str],
) -> Iterator[Receipt | Failure | PartitionToRead]:
    """Yield what each partition needs, in their order: nothing (a receipt), to be read, or an operator (a failure).

    Args:
        force: read fresh partitions too.
        seen: keys of partitions that were decided before these.

    Raises:
        Cancelled, StoreUnavailable, ConfigError: see `reading.superbatches`.
    """
    decider = _Decider(outputs, target, memory, force, seen)
    for partition in partitions:
        memory.stop.require_running()
        try:
            decision = decider.decision(partition)
            if isinstance(decision, Receipt):
                staging.remove(partition.key)
        except StoreUnavailable:
            raise
        except (SurgeError, OSError) as error:
            decision = failure_of(partition, error)
        yield decision


class _Decider:
    def __init__(
        self, outputs: OutputState, target: SpaceTarget, memory: RunMemory, force: bool, seen: Collection[str]
    ) -> None:
        self._outputs = outputs
        self._target = target
        self._memory = memory
        self._force = force
        self._keys = set(seen)

    def decision(self, partition: Partition) -> Receipt | PartitionToRead:
        self._require_new(partition)
        freshness = self._outputs.freshness(partition)
        file, store = freshness.file, self._target.store
        if freshness.error is not None:
            raise freshness.error
        if file is None:
            return PartitionToRead(partition, reuse=not self._force)
        location = store.location(file.stored.name)
        if freshness.status == "foreign":
            raise PlaceTaken(
                partition.key,
                f"its place in the output, {location!r}, is taken by a file of the space {file.facts.space!r}; it was "
                "left alone",
                "Move that file to its own space's folder, then run again.",
            )
        if self._force:
            return PartitionToRead(partition, file, reuse=False)
        if freshness.status == "fresh":
            return Receipt.of(file.facts, file.stored, location, action="fresh")
        rewritten = self._republished(partition, file)
        if rewritten is None:
            return PartitionToRead(partition, file)
        return Receipt.of(rewritten.facts, rewritten.stored, location, action="republished")

    def _require_new(self, partition: Partition) -> None:
        try:
            encode_key(partition.key)
        except ValueError as error:
            raise DataError(partition.key, str(error), "Give the partition a name.") from error
        if partition.key in self._keys:
            raise DataError(
                partition.key,
                "the key comes again after it was closed; the rows of a partition must follow each other",
                "Order the source by partition key, then run again.",
            )
        self._keys.add(partition.key)

    def _republished(self, partition: Partition, file: PublishedFile) -> PublishedFile | None:
        """The file under the partition's present source version, where the content is the same; None otherwise."""
        digest, widest_row, missing = self._content(partition)
        if digest != file.facts.content_digest:
            return None
        share = self._memory.plan.reader + self._target.store.upload_bytes
        try:
            with self._held(share):
                return republish(
                    self._target,
                    file,
                    partition,
                    widest_row=widest_row,
                    missing=missing,
                    held=lambda size: self._held(size, beside=share),
                )
        except (InvalidFile, FileNotFoundError) as error:
            log.warning("partition %r is encoded again: %s", partition.key, error)
            return None

    def _content(self, partition: Partition) -> tuple[str, int, MissingTexts]:
        """The content digest of a partition, its largest row in bytes of id and text, and its missing texts."""
        digest, widest, missing = ContentDigest(), 0, MissingTexts()
        with contextlib.closing(self._memory.batches(partition)) as batches:
            for batch in batches:
                digest.update(batch)
                missing = missing.plus(batch)
                widest = max(widest, int(row_bytes(batch).max(initial=0)))
        return digest.hexdigest(), widest, missing

    @contextlib.contextmanager
    def _held(self, size: int, beside: int = 0) -> Iterator[None]:
        available = self._memory.plan.beside_superbatch
        if size + beside > available:
            raise InvalidFile(
                f"reading it takes {size + beside:,} bytes at a time and {available:,} are available; "
                "a higher memory_limit_bytes would avoid that"
            )
        with self._memory.held(size):
            yield


def failure_of(partition: Partition, error: SurgeError | OSError) -> Failure:
    """The failure of a partition that could not be read.

    It is transient where its source is being replaced, so that the next run can help.
    """
    if isinstance(error, DataError):
        try:
            require_unchanged(partition)
        except (SurgeError, OSError):
            changed = "Its source changed while it was read; run again."
            return Failure(partition.key, f"{error} {changed}", transient=True, remedy=changed)
        return Failure(partition.key, str(error), remedy=error.remedy, in_source=not isinstance(error, PlaceTaken))
    if isinstance(error, SurgeError):
        return Failure(partition.key, str(error), transient=isinstance(error, TransientError))
    remedy = "Run again when its storage answers."
    return Failure(partition.key, f"partition {partition.key!r}: {error}. {remedy}", True, remedy)
