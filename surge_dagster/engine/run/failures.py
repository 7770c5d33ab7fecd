"""What is wrong with a partition that could not be read, or whose source changed meanwhile."""

from __future__ import annotations

from surge_dagster.engine.errors import DataError, PlaceTaken, SurgeError, TransientError
from surge_dagster.engine.run.report import Failure
from surge_dagster.engine.sources.partition import Partition


def require_unchanged(partition: Partition) -> None:
    """Look the source version up once more, so that of two writers the one with the newer source wins.

    Raises:
        TransientError: the source has changed, or was removed, since the partition was listed.
    """
    current = partition.current_source_version()
    if current != partition.source_version:
        change = "it was removed" if current is None else f"it is {current!r} now"
        raise TransientError(
            f"partition {partition.key!r}: its source changed while it was encoded (source version "
            f"{partition.source_version!r} was read, {change}). The result was thrown away; run again.",
            partition.key,
        )


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
