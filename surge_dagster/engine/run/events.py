"""The stream of a run's events: counted in its report, and handed to the thread that iterates over
the run."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator

from surge_dagster.engine.run.report import Event, Failure, Receipt, RunReport, SuperBatchReport
from surge_dagster.engine.run.run_memory import RunMemory
from surge_dagster.engine.support.waiting import next_item

log = logging.getLogger(__name__)


class EventStream:
    """Takes events from any thread and yields them in one.

    Args:
        report: counts the events, and gets the peaks of `memory`.

    Attributes:
        begun: `time.perf_counter()` from which the report counts its seconds.
        published: keys of the partitions that were published, also those whose receipt was not
            taken yet.
        ended: whether the last event was taken.
    """

    def __init__(self, report: RunReport, memory: RunMemory) -> None:
        self.begun = time.perf_counter()
        self.published: set[str] = set()
        self.ended = False
        self._report = report
        self._memory = memory
        self._failed_keys: set[str] = set()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Event, ...] | BaseException | None] = (
            queue.SimpleQueue()
        )

    def emit(self, *events: Event) -> None:
        """Count events and hand them over, in groups: waking the consumer costs more than counting
        an event."""
        now = time.perf_counter() - self.begun
        with self._lock:
            new = tuple(event for event in events if self._count(event, now))
        self._queue.put(new)

    def end(self, error: BaseException | None) -> None:
        """Say that no event follows, and which error ended the run."""
        self._report.max_in_flight_texts = self._memory.in_flight.most
        self._report.peak_resident_bytes = self._memory.ledger.peak
        self._report.exposed_io_seconds = self._memory.exposed_io.seconds
        if error is not None:
            self._queue.put(error)
        self._queue.put(None)

    def __iter__(self) -> Iterator[Event]:
        """Yield events until the end, and raise the error that ended the run."""
        while (group := next_item(self._queue)) is not None:
            if isinstance(group, BaseException):
                self.ended = True
                raise group
            yield from group
        self.ended = True

    def _count(self, event: Event, now: float) -> bool:
        """Add an event to the report; False for a second failure of one partition, which is not
        reported."""
        if isinstance(event, Failure):
            if event.key in self._failed_keys:  # two stages found an error concurrently
                return False
            self._failed_keys.add(event.key)
        elif isinstance(event, Receipt) and event.action != "fresh":
            self.published.add(event.key)
        elif isinstance(event, SuperBatchReport) and event.is_slow:
            log.warning("%s", event.slow_message)
        self._report.count(event, now)
        return True
