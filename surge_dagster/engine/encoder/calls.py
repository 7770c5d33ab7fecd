"""One encode call as its caller sees it: waiting for it, and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from surge_dagster.engine.encoder.metrics import NO_COSTS, Costs
from surge_dagster.engine.encoder.quarantine import FailedRow
from surge_dagster.engine.encoder.schedule import Job
from surge_dagster.engine.support.waiting import wait_in_turns


@dataclass(frozen=True, slots=True)
class EncodeMetrics:
    """What an encode call cost, and which of its texts failed.

    Attributes:
        failed: one text of each group that has texts that end every worker.
    """

    costs: Costs = NO_COSTS
    workers: int = 1
    failed: tuple[FailedRow, ...] = ()

    def plus(self, later: EncodeMetrics) -> EncodeMetrics:
        """Of two calls for one slot, one after the other."""
        costs = self.costs.plus(later.costs)
        return replace(later, costs=costs, failed=self.failed + later.failed)


class EncodeCall:
    def __init__(self, job: Job, workers: int, abandon: Callable[[Job], None]) -> None:
        self._job = job
        self._workers = workers
        self._abandon = abandon

    def result(self, timeout_seconds: float | None = None) -> EncodeMetrics | None:
        """Wait for the end of the call, or raise what ended the pool; None after the timeout."""
        if not wait_in_turns(self._job.done.wait, timeout_seconds):
            return None
        if self._job.error is not None:
            raise copy_of(self._job.error)
        return self.metrics

    def abandon(self) -> None:
        """Ends the call without encoding further rows; `encoded` lists the rows that have vectors.

        Workers finish the chunks that they have, and these keep the slot from being used again
        until then, but this method does not wait for them.
        """
        self._abandon(self._job)
        wait_in_turns(self._job.done.wait)

    @property
    def encoded(self) -> list[tuple[int, int]]:
        """Ranges of rows that have vectors, ascending; of a call for some rows, their places."""
        return sorted(self._job.encoded)

    @property
    def finished_rows(self) -> int:
        """How many rows have their vectors or have failed by now."""
        return self._job.finished_rows

    @property
    def metrics(self) -> EncodeMetrics:
        job = self._job
        costs = replace(
            job.costs,
            texts_computed=job.rows,
            encode_seconds=job.encode_seconds,
            replays=job.replays,
        )
        return EncodeMetrics(costs, workers=self._workers, failed=job.failed)


def copy_of(error: Exception) -> Exception:
    """Return the same error as a new object: each thread that raises it adds its traceback."""
    return type(error)(str(error))
