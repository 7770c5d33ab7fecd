"""The reader: three generators, one after the other, from partitions to SuperBatches.

    decide  ──►  known vectors  ──►  gather
    fresh,       staged by an        rows into
    republish    earlier run,        SuperBatches
    or read      or in the old file

Partitions whose known vectors turned out to be wrong come once more after all others, without these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.run.aggregator import Aggregator
from surge_dagster.engine.run.deciding import decide
from surge_dagster.engine.run.dropped import DroppedPartitions
from surge_dagster.engine.run.gathering import gather
from surge_dagster.engine.run.known_vectors import known_vectors
from surge_dagster.engine.run.observer import PublicationObserver
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.space_target import SpaceTarget
from surge_dagster.engine.run.staging import Staging
from surge_dagster.engine.run.superbatch import SuperBatch
from surge_dagster.engine.sources.partition import Partition


def superbatches(
    partitions: Iterable[Partition],
    outputs: OutputState,
    target: SpaceTarget,
    staging: Staging,
    memory: RunMemory,
    dropped: DroppedPartitions,
    observer: PublicationObserver | None = None,
    *,
    force: bool = False,
    seen: Collection[str] = (),
) -> Iterator[SuperBatch | Receipt | Failure]:
    """Read partitions in their order, and yield what follows from each.

    Args:
        memory: books each SuperBatch; its receiver releases it.
        force: encode fresh partitions too.
        seen: keys of partitions that were found fresh before these.

    Raises:
        Cancelled: the run is stopping.
        StoreUnavailable: the store does not answer.
        ConfigError: the source cannot be listed.
    """
    aggregator = Aggregator(memory.bounds, memory.acquire, memory.reserve)
    decisions = decide(partitions, outputs, target, staging, memory, force=force, seen=seen)
    rows = known_vectors(decisions, target, staging, memory, observer)
    yield from gather(rows, aggregator, staging, memory, dropped)
    # The encode calls that are under way may still show that old vectors are wrong.
    memory.in_flight.wait_until_none(memory.stop)
    rows = known_vectors(dropped.to_read_again(), target, staging, memory, observer)
    yield from gather(rows, aggregator, staging, memory, dropped)
