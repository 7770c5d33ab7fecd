"""The reader: three generators, one after the other, from decisions to SuperBatches.

    republish  ──►  known vectors  ──►  gather
    the same        staged by an        rows into
    content         earlier run,        SuperBatches
                    or in the old file

Partitions whose known vectors turned out to be wrong come once more after all others, without these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from surge_dagster.engine.run.aggregator import Aggregator
from surge_dagster.engine.run.dropped import DroppedPartitions
from surge_dagster.engine.run.gathering import gather
from surge_dagster.engine.run.known_vectors import known_vectors
from surge_dagster.engine.run.observer import PublicationObserver
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.rewriting import republish
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.run.space_target import SpaceTarget
from surge_dagster.engine.run.staging import Staging
from surge_dagster.engine.run.superbatch import PartitionToRead, SuperBatch


def superbatches(
    decisions: Iterable[Receipt | Failure | PartitionToRead],
    target: SpaceTarget,
    staging: Staging,
    memory: RunMemory,
    dropped: DroppedPartitions,
    observer: PublicationObserver | None = None,
) -> Iterator[SuperBatch | Receipt | Failure]:
    """Read what was decided to be read, in this order; what was decided otherwise passes.

    Args:
        decisions: see `deciding.decide`, which says also what is raised.
        memory: books each SuperBatch; its receiver releases it.
    """
    aggregator = Aggregator(memory.bounds, memory.acquire, memory.reserve)
    rows = known_vectors(republish(decisions, target, memory), target, staging, memory, observer)
    yield from gather(rows, aggregator, staging, memory, dropped)
    # The encode calls that are under way may still show that old vectors are wrong.
    memory.in_flight.wait_until_none(memory.stop)
    rows = known_vectors(dropped.to_read_again(), target, staging, memory, observer)
    yield from gather(rows, aggregator, staging, memory, dropped)
