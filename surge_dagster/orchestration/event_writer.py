"""Events leave the run's thread at once and are stored by a thread of their own, many at a time.

Storing an event takes Dagster milliseconds, and a run that waited for each would embed at the speed of a database. So
they queue here: stored when a batch is complete, or after a second, so that partitions turn green while the run goes
on. The queue is bounded; a run that is faster than the event log waits for it. What a crash loses of the queue are
events, never files: the next run finds the files and adopts them.

Many events point at another one by its storage id, which is known only when that one is stored. They are handed over
as a function, which is called when everything logged before it is stored, for a whole batch at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import dagster as dg

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.support.waiting import TURN_SECONDS, wait_for_thread
from surge_dagster.orchestration.event_batches import BATCH_EVENTS, Store, event_store
from surge_dagster.orchestration.partition_events import AnyEvent

_FLUSH_SECONDS = 1.0
# Two batches of some 4 kB per event; more would only take longer to store when a run is terminated.
_WAITING_EVENTS = 2 * BATCH_EVENTS


class EventsNotStored(TransientError):
    """Dagster's event log refused events; the files that they tell of are published, and the next run adopts them."""


@dataclass(frozen=True, slots=True)
class _Logged:
    make: Callable[[], AnyEvent]
    points_back: bool
    stored: Callable[[int], None] | None = None


class EventWriter:
    """Stores the events of one step; use `with`, which stores the rest in the end.

    Args:
        context: of the op whose events they are.
        grace_seconds: how long storing the rest may take when the step is ended by an error or is terminated.
        stopped_at: tells when that time began, on the monotonic clock; None is when the step has come to its end.
        before: called in the writer's thread with events that are about to be stored.
    """

    def __init__(
        self,
        context: dg.OpExecutionContext,
        *,
        grace_seconds: float,
        stopped_at: Callable[[], float | None] = lambda: None,
        before: Callable[[Sequence[AnyEvent]], None] = lambda events: None,
    ) -> None:
        self._context = context
        self._grace_seconds = grace_seconds
        self._stopped_at = stopped_at
        self._before = before
        self._waiting: deque[_Logged] = deque()
        self._changed = threading.Condition()
        self._oldest = 0.0  # when the first of those that wait was logged
        self._flushed = float("-inf")
        self._storing = 0
        self._closing = False
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="surge-events", daemon=True)

    def log(self, event: AnyEvent, stored: Callable[[int], None] | None = None) -> None:
        """Store an event soon; it may overtake those of `log_after`.

        Args:
            event: an observation or materialization.
            stored: called with its storage id, in the writer's thread.

        Raises:
            EventsNotStored: the event log refused this or an earlier event.
        """
        self._put(_Logged(lambda: event, False, stored))

    def log_after(self, make: Callable[[], AnyEvent]) -> None:
        """Store an event that is made, in the writer's thread, when everything logged before it is stored.

        Raises:
            EventsNotStored: the event log refused an earlier event.
        """
        self._put(_Logged(make, True))

    def close(self, seconds: float | None = None) -> int:
        """Store what is left; gives how many events were not stored within the time.

        Raises:
            EventsNotStored: the event log refused events.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            wait_for_thread(self._thread, seconds)
        with self._changed:
            left = self._storing + len(self._waiting)
            self._waiting.clear()
            self._closed = True  # what other threads still have to tell comes too late
            self._changed.notify_all()
            self._require_stored()
        return left

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self.close()
                return
            except EventsNotStored:
                raise
            except BaseException:  # interrupted while it waited
                self._close_in_time()
                raise
        self._close_in_time()

    def _close_in_time(self) -> None:
        now = time.monotonic()
        begun = self._stopped_at()
        spent = 0.0 if begun is None else now - begun
        try:
            left = self.close(max(0.0, self._grace_seconds - spent))
        except EventsNotStored:
            return  # what ended the step is the reason to tell; the files are adopted either way
        if left:
            self._context.log.warning(
                f"{left:,} events were not stored within the grace time of {self._grace_seconds:g} s. Their files are "
                "published, and the next run adopts them."
            )

    def _put(self, logged: _Logged) -> None:
        with self._changed:
            while len(self._waiting) >= _WAITING_EVENTS and self._error is None and not self._closed:
                self._changed.wait(TURN_SECONDS)
            self._require_stored()
            if self._closed:
                return
            now = time.monotonic()
            if not self._waiting:
                self._oldest = now
            self._waiting.append(logged)
            # The writer sleeps until the first of them is due: woken by each, it would take turns from the encoder's
            # thread for nothing.
            is_first_after_pause = logged.points_back and now - self._flushed >= _FLUSH_SECONDS
            is_batch = len(self._waiting) >= min(BATCH_EVENTS, _WAITING_EVENTS)
            if is_first_after_pause or is_batch or len(self._waiting) == 1:
                self._changed.notify_all()

    def _require_stored(self) -> None:
        if self._error is not None:
            raise EventsNotStored(
                f"events could not be stored in Dagster's event log ({type(self._error).__name__}: {self._error}). "
                "The files that they tell of are published, and the next run adopts them without encoding them. "
                "Look whether the event log's database can be reached and written."
            ) from self._error

    def _run(self) -> None:
        try:
            with event_store(self._context) as store:
                while batch := self._next():
                    self._store_all(store, batch)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> list[_Logged]:
        """Wait for events that are due and take them; none when there will be no more."""
        with self._changed:
            self._storing = 0
            while not (count := self._due()):
                if self._closing:
                    return []
                left = self._oldest + _FLUSH_SECONDS - time.monotonic() if self._waiting else None
                self._changed.wait(left)
            batch = [self._waiting.popleft() for _ in range(count)]
            self._storing = count
            self._oldest = self._flushed = time.monotonic()
            self._changed.notify_all()
            return batch

    def _due(self) -> int:
        """How many of the events that wait are to be stored now."""
        now, waiting = time.monotonic(), len(self._waiting)
        if self._closing or waiting >= BATCH_EVENTS or (waiting and now - self._oldest >= _FLUSH_SECONDS):
            return min(waiting, BATCH_EVENTS)
        if now - self._flushed >= _FLUSH_SECONDS:
            # After a pause not even a second: the first partition appears as soon as it is there.
            return next((place for place, logged in enumerate(self._waiting, 1) if logged.points_back), 0)
        return 0

    def _store_all(self, store: Store, batch: list[_Logged]) -> None:
        for points_back in (False, True):
            alike = [logged for logged in batch if logged.points_back is points_back]
            if not alike:
                continue
            events = [logged.make() for logged in alike]
            self._before(events)
            ids = store(events, any(logged.stored for logged in alike))
            for logged, storage_id in zip(alike, ids, strict=True):
                if logged.stored is not None and storage_id is not None:
                    logged.stored(storage_id)
