"""What a run does with each partition, once `output/freshness.py` has said whether it is fresh. It
opens no source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from surge_dagster.engine.errors import (
    DataError,
    PlaceTaken,
    StoreUnavailable,
    SurgeError,
    TransientError,
)
from surge_dagster.engine.output.freshness import Freshness, OutputState
from surge_dagster.engine.run.report import Failure, Receipt, failure_of
from surge_dagster.engine.run.superbatch import PartitionToRead
from surge_dagster.engine.sources.partition import Partition, PartitionRange
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.engine.support.waiting import StopSignal


def decide(
    partitions: Iterable[Partition],
    outputs: OutputState,
    stop: StopSignal,
    *,
    force: bool = False,
    ranges: Sequence[PartitionRange] = (),
    freshness: Mapping[str, Freshness] | None = None,
) -> Iterator[Receipt | Failure | PartitionToRead]:
    """Yield what each partition needs, in their order: nothing (a receipt), to be read, or an
    operator (a failure).

    Args:
        force: read fresh partitions too.
        ranges: what is read of their partitions; the others are read whole.
        freshness: of all partitions by key, if the caller has asked for it.

    Raises: `Cancelled` if the run is stopping, `StoreUnavailable` if the store does not answer,
    `ConfigError` if the source cannot be listed.
    """
    keys: set[str] = set()
    divided: dict[str, list[PartitionRange]] = defaultdict(list)
    for rows in ranges:
        divided[rows.key].append(rows)
    for partition in outputs.looked_at(partitions) if freshness is None else partitions:
        stop.require_running()
        parts = divided.pop(partition.key, [])
        try:
            _require_new(partition, keys)
            keys.add(partition.key)
            found = outputs.freshness(partition) if freshness is None else freshness[partition.key]
            decision = _decision(partition, found, outputs, force)
            if parts and isinstance(decision, PartitionToRead):
                yield from _ranges_of(decision, parts)
            else:
                yield decision
        except StoreUnavailable:
            raise
        except (SurgeError, OSError) as error:
            yield failure_of(partition, error)
    for key, parts in divided.items():
        reason = f"{parts[0]} were to be encoded, and the source has no such partition now."
        yield Failure(key, f"{reason} Divide it anew.", transient=True)


def _ranges_of(
    decision: PartitionToRead, ranges: Sequence[PartitionRange]
) -> list[PartitionToRead]:
    for rows in ranges:
        _require_rows(decision.source, rows)
    return [replace(decision, range=rows) for rows in ranges]


def _require_rows(partition: Partition, rows: PartitionRange) -> None:
    """Raise if only these rows cannot be read, or if they are those of another source version."""
    if rows.source_version != partition.source_version:
        raise TransientError(
            f"{rows} were to be encoded as the source had them in its version "
            f"{rows.source_version!r}; it is {partition.source_version!r} now. Divide it anew.",
            partition.key,
        )
    if partition.read_range is None:
        why = "its source cannot read rows without those before them"
    elif rows.stop > (partition.rows or 0):
        why = f"it has {partition.rows or 0:,}"
    else:
        return
    raise DataError(
        partition.key,
        f"{rows} were to be encoded, and {why}",
        "Divide a partition of a known size within it, or embed it as a whole.",
    )


def _require_new(partition: Partition, keys: Collection[str]) -> None:
    try:
        encode_key(partition.key)
    except ValueError as error:
        raise DataError(partition.key, str(error), "Give the partition a name.") from error
    if partition.key in keys:
        raise DataError(
            partition.key,
            "the key comes again after it was closed; the rows of a partition must follow each "
            "other",
            "Order the source by partition key, then run again.",
        )


def _decision(
    partition: Partition, freshness: Freshness, outputs: OutputState, force: bool
) -> Receipt | PartitionToRead:
    file = freshness.file
    if freshness.error is not None:
        raise freshness.error
    if file is None:
        return PartitionToRead(partition, reuse=not force)
    location = outputs.store.location(file.stored.name)
    if freshness.status == "foreign":
        raise PlaceTaken(
            partition.key,
            f"its place in the output, {location!r}, is taken by a file of the space "
            f"{file.facts.space!r}; it was left alone",
            "Move that file to its own space's folder, then run again.",
        )
    if freshness.status == "fresh" and not force:
        return Receipt.of(file.facts, file.stored, location, action="fresh")
    return PartitionToRead(partition, file, reuse=not force)
