"""Decide which partitions are fresh and which are read. It opens no source."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from surge_dagster.engine.errors import DataError, PlaceTaken, StoreUnavailable, SurgeError
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.run.failures import failure_of
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.superbatch import PartitionToRead
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.engine.support.waiting import StopSignal


def decide(
    partitions: Iterable[Partition], outputs: OutputState, stop: StopSignal, *, force: bool = False
) -> Iterator[Receipt | Failure | PartitionToRead]:
    """Yield what each partition needs, in their order: nothing (a receipt), to be read, or an operator (a failure).

    Args:
        force: read fresh partitions too.

    Raises:
        Cancelled: the run is stopping.
        StoreUnavailable: the store does not answer.
        ConfigError: the source cannot be listed.
    """
    keys = set[str]()
    for partition in outputs.looked_at(partitions):
        stop.require_running()
        try:
            _require_new(partition, keys)
            keys.add(partition.key)
            decision = _decision(partition, outputs, force)
        except StoreUnavailable:
            raise
        except (SurgeError, OSError) as error:
            decision = failure_of(partition, error)
        yield decision


def _require_new(partition: Partition, keys: Collection[str]) -> None:
    try:
        encode_key(partition.key)
    except ValueError as error:
        raise DataError(partition.key, str(error), "Give the partition a name.") from error
    if partition.key in keys:
        raise DataError(
            partition.key,
            "the key comes again after it was closed; the rows of a partition must follow each other",
            "Order the source by partition key, then run again.",
        )


def _decision(partition: Partition, outputs: OutputState, force: bool) -> Receipt | PartitionToRead:
    freshness = outputs.freshness(partition)
    file = freshness.file
    if freshness.error is not None:
        raise freshness.error
    if file is None:
        return PartitionToRead(partition, reuse=not force)
    location = outputs.store.location(file.stored.name)
    if freshness.status == "foreign":
        raise PlaceTaken(
            partition.key,
            f"its place in the output, {location!r}, is taken by a file of the space {file.facts.space!r}; it was "
            "left alone",
            "Move that file to its own space's folder, then run again.",
        )
    if freshness.status == "fresh" and not force:
        return Receipt.of(file.facts, file.stored, location, action="fresh")
    return PartitionToRead(partition, file, reuse=not force)
