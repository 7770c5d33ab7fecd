"""The events of a run: counted in its report, handed to the thread that iterates over the run, and
followed to say how far it is, for a progress bar or a log."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.report import (
    Event,
    Failure,
    OldVectorSample,
    Receipt,
    RunReport,
    SuperBatchReport,
)
from surge_dagster.engine.run.run_memory import InFlight, RunMemory
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.waiting import every, next_item

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


class Run(Protocol):
    """A run in this process, or one over the machines of a cluster; see `EmbeddingRun`."""

    @property
    def report(self) -> RunReport: ...

    @property
    def space(self) -> Space: ...

    @property
    def in_flight(self) -> InFlight | None: ...

    @property
    def preparing(self) -> str: ...

    @property
    def published(self) -> set[str]: ...

    def events(self) -> Generator[Event]: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        all_texts: None if the source does not know the rows of all partitions.
        activity: what the run does now, in words.
    """

    partitions: int
    all_partitions: int
    texts: int
    all_texts: int | None
    seconds: float
    activity: str

    def in_words(self) -> str:
        """Return what is done by now, and how long the rest takes."""
        partitions = f"{self.partitions:,} of {counted(self.all_partitions, 'partition')}"
        if not self.texts:
            return f"Progress: {partitions} in {_duration(self.seconds)}; {self.activity}"

        rate = self.texts / self.seconds
        texts = counted(self.texts, "text")
        remaining = ""
        if self.all_texts is not None:
            texts = f"{self.texts:,} of {counted(self.all_texts, 'text')}"
            remaining = f", about {_duration((self.all_texts - self.texts) / rate)} left"
        elif self.partitions:
            seconds = self.seconds * (self.all_partitions / self.partitions - 1)
            remaining = f", about {_duration(seconds)} left if partitions are alike"
        return f"Progress: {partitions}, {texts}, {rate:,.0f} texts/s{remaining}; {self.activity}"


class Follower:
    """Counts the events of a run; any thread may call `progress`."""

    def __init__(
        self, run: Run, partitions: Sequence[Partition], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._now = now
        self._begun = now()
        self._rows = {partition.key: partition.rows for partition in partitions}
        self._partitions = 0
        self._texts_not_encoded = 0  # fresh, reused, skipped or refused
        known = [rows for rows in self._rows.values() if rows is not None]
        self.all_texts = sum(known) if len(known) == len(self._rows) else None

    def follow(
        self, events: Generator[Event], show: Callable[[Progress], object], seconds: float
    ) -> Generator[Event]:
        """Run, and yield the events; `show` gets the progress again and again, in a thread."""
        with every(seconds, lambda: show(self.progress()), "surge-progress"), closing(events):
            for event in events:
                self.count(event)
                yield event

    def count(self, event: Event) -> None:
        match event:
            case SuperBatchReport() | OldVectorSample():
                return  # its texts were counted while they were encoded
            case Receipt(action="encoded"):
                self._texts_not_encoded += event.texts_reused + _left_out(event)
            case Receipt():
                self._texts_not_encoded += event.rows + _left_out(event)
            case Failure():
                self._texts_not_encoded += self._rows.get(event.key) or 0
        self._partitions += 1

    def progress(self) -> Progress:
        in_flight = self._run.in_flight
        if in_flight is None:
            encoded = self._run.report.texts_encoded
            activity = self._run.preparing
        else:
            encoded = in_flight.encoded
            activity = f"{in_flight.texts:,} in flight"

        texts = encoded + self._texts_not_encoded
        if self.all_texts is not None:  # some texts of a refused partition may have been encoded
            texts = min(texts, self.all_texts)
        return Progress(
            self._partitions,
            len(self._rows),
            texts,
            self.all_texts,
            self._now() - self._begun,
            activity,
        )


def _left_out(receipt: Receipt) -> int:
    return receipt.skipped_rows + receipt.rejected_rows


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
