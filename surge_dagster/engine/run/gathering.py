"""The third part of the reader: gather the rows of partitions into SuperBatches.

A partition is refused as a whole, before anything of it is published: it is closed only after every check on its rows
has passed. Of one that is refused, what the SuperBatch being gathered holds is dropped.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

from surge_dagster.engine.errors import DataError, StoreUnavailable, SurgeError
from surge_dagster.engine.run.aggregator import Aggregator
from surge_dagster.engine.run.dropped import DroppedPartitions
from surge_dagster.engine.run.failures import failure_of
from surge_dagster.engine.run.known_vectors import PartitionRows, RowPiece
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.staging import Staging
from surge_dagster.engine.run.superbatch import ReadPartition, SuperBatch, VectorsNotUsable

log = logging.getLogger(__name__)


def gather(
    items: Iterable[Receipt | Failure | PartitionRows],
    aggregator: Aggregator,
    staging: Staging,
    memory: RunMemory,
    dropped: DroppedPartitions,
) -> Iterator[SuperBatch | Receipt | Failure]:
    """Gather the rows of partitions; receipts and failures pass. What another stage has dropped is read no further."""
    for item in items:
        if isinstance(item, PartitionRows):
            yield from _gather_partition(item, aggregator, staging, memory, dropped)
            continue
        if isinstance(item, Receipt):
            staging.remove(item.key)
        yield item
    yield from map(memory.booked, aggregator.finish())


def _gather_partition(
    item: PartitionRows, aggregator: Aggregator, staging: Staging, memory: RunMemory, dropped: DroppedPartitions
) -> Iterator[SuperBatch | Failure]:
    partition, read, failure = item.partition, None, None
    aggregator.open(partition)
    try:
        with contextlib.closing(item.pieces) as pieces:
            for piece in pieces:
                if partition in dropped:
                    break  # a later stage dropped it
                if isinstance(piece, ReadPartition):
                    read = piece
                else:
                    yield from _gather_rows(piece, aggregator, memory)
    except VectorsNotUsable as error:
        log.warning("partition %r is read again, and all of it is encoded: %s", partition.key, error)
        dropped.read_again(partition)
    except StoreUnavailable:
        raise
    except (SurgeError, OSError) as error:
        is_refused = isinstance(error, DataError)
        if dropped.fail(partition, drop=is_refused):
            failure = failure_of(partition.source, error)
            if is_refused:
                staging.discard(partition.key)
    finally:
        if read is None:
            texts, size = aggregator.discard()
            memory.ledger.release(size)
            memory.in_flight.remove(texts)
    if read is not None:
        yield from map(memory.booked, aggregator.close(read))
    if failure is not None:
        yield failure


def _gather_rows(piece: RowPiece, aggregator: Aggregator, memory: RunMemory) -> Iterator[SuperBatch]:
    if piece.is_staged:
        aggregator.skip(piece.rows)
        return
    ready = aggregator.add(piece.rows, piece.vectors)
    memory.in_flight.add(len(piece.rows))
    yield from map(memory.booked, ready)
