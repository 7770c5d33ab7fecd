"""Storing events in Dagster's event log: `report_events` while the caller waits, `EventWriter` in its own thread.

Dagster stores a single event in about 10 ms on SQLite and 25 ms on Postgres, and a batch of them in a twentieth of that
per event. A run that waited for each event would embed at the speed of a database, so its events wait in a bounded
queue until a thread stores them: the first ones immediately, then twice a second or when a batch is complete. A crash
loses the queued events and no file: the next run finds the files and adopts them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import dagster as dg

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.support.waiting import TURN_SECONDS, wait_for_thread
from surge_dagster.orchestration.dagster_internals import Event, Planned, can_batch, store_batch, store_planned

log = logging.getLogger(__name__)

# A batch is one transaction, and other processes wait for SQLite as long as it lasts.
BATCH_EVENTS = 1_000
_FLUSH_SECONDS = 0.5
# Two batches of some 4 kB per event; more would only take longer to store when a run is terminated.
_WAITING_EVENTS = 2 * BATCH_EVENTS


class EventsNotStored(TransientError):
    """Dagster's event log refused events; the files that they report are published, and the next run adopts them."""


def report_events(instance: dg.DagsterInstance, context: dg.OpExecutionContext | None, events: Sequence[Event]) -> None:
    """Store events, those of one kind and one asset together and in their order.

    Dagster's storages update their table of assets from the last event of a batch alone, and Postgres stores a batch of
    several kinds event by event.

    Args:
        instance: where to store them.
        context: of the op that reports them; None for events that belong to no run.
        events: observations and materializations; those of a run may be planned events too.

    Raises:
        Exception: the event log refused an event, whatever its database raises. Earlier events are stored.
    """
    if not can_batch():
        for event in events:
            _store_one(instance, context, event)
        return
    groups: dict[object, list[Event]] = {}
    for event in events:
        groups.setdefault((type(event), event.asset_key), []).append(event)
    for group in groups.values():
        store_batch(instance, context, group, BATCH_EVENTS)


def _store_one(instance: dg.DagsterInstance, context: dg.OpExecutionContext | None, event: Event) -> None:
    if isinstance(event, Planned):
        assert context is not None, "only a run plans partitions"
        store_planned(context, event)
    elif context is None:
        instance.report_runless_asset_event(event)
    else:
        context.log_event(event)
        for _ in context.consume_events():
            pass  # it is stored by now; the context would keep it in memory until the step ends (4 kB each)


class EventWriter:
    """Stores the events of one step in a thread of its own; use `with`, which stores the remaining ones at the end.

    Args:
        context: of the op that reports the events.
        grace_seconds: how long storing the remaining events may take when an error or an interrupt ends the step.
        stopped_at: returns when that time began, on the monotonic clock; None while the step is running.
        stored: called in the writer's thread with the events that were just stored, before any event of `log_after` is
            made.
    """

    def __init__(
        self,
        context: dg.OpExecutionContext,
        *,
        grace_seconds: float,
        stopped_at: Callable[[], float | None] = lambda: None,
        stored: Callable[[Sequence[Event]], None] = lambda events: None,
    ) -> None:
        self._context = context
        self._grace_seconds = grace_seconds
        self._stopped_at = stopped_at
        self._stored = stored
        self._waiting: deque[Event | Callable[[], Event]] = deque()
        self._made_later = 0  # queued events of `log_after`
        self._shows_partitions = False  # whether one of them was stored
        self._flushed = float("-inf")
        self._storing = 0
        self._changed = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="surge-events", daemon=True)

    def log(self, event: Event) -> None:
        """Store an event soon; it may overtake events of `log_after`.

        Raises:
            EventsNotStored: the event log refused an earlier event.
        """
        self._put(event)

    def log_after(self, make: Callable[[], Event]) -> None:
        """Store an event that the writer's thread makes when everything logged before it is stored.

        Raises:
            EventsNotStored: the event log refused an earlier event.
        """
        self._put(make)

    def close(self, seconds: float | None = None) -> int:
        """Store what is queued; gives how many events were not stored within the time.

        Raises:
            EventsNotStored: the event log refused events.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            wait_for_thread(self._thread, seconds)
        with self._changed:
            unstored = self._storing + len(self._waiting)
            self._waiting.clear()
            self._require_stored()
        return unstored

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
        began = self._stopped_at()
        spent = 0.0 if began is None else time.monotonic() - began
        try:
            unstored = self.close(max(0.0, self._grace_seconds - spent))
        except EventsNotStored:
            return  # the error that ended the step is the one to report; the next run adopts the files either way
        if unstored:
            self._context.log.warning(
                f"{unstored:,} events were not stored within the grace time of {self._grace_seconds:g} s. Their files "
                "are published, and the next run adopts them."
            )

    def _put(self, event: Event | Callable[[], Event]) -> None:
        with self._changed:
            while len(self._waiting) >= _WAITING_EVENTS and self._error is None:
                self._changed.wait(TURN_SECONDS)
            self._require_stored()
            self._waiting.append(event)
            self._made_later += callable(event)
            # The thread sleeps otherwise: woken by each event, it would take turns from the encoder's thread.
            if len(self._waiting) in (1, BATCH_EVENTS) or (callable(event) and self._made_later == 1):
                self._changed.notify_all()

    def _require_stored(self) -> None:
        if self._error is not None:
            raise EventsNotStored(
                f"events could not be stored in Dagster's event log ({type(self._error).__name__}: {self._error}). "
                "The files that they report are published, and the next run adopts them without encoding them. "
                "Look whether the event log's database can be reached and written."
            ) from self._error

    def _run(self) -> None:
        try:
            if not can_batch():
                log.warning("Dagster %s stores events one by one, which takes about 10 ms each", dg.__version__)
            while batch := self._next():
                plain = [event for event in batch if not callable(event)]
                report_events(self._context.instance, self._context, plain)
                self._stored(plain)
                report_events(self._context.instance, self._context, [make() for make in batch if callable(make)])
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> Sequence[Event | Callable[[], Event]]:
        """Wait for a batch, or for the events that come within the time; empty when there will be no more.

        It waits for the first event of `log_after` too: a batch stores the events of SuperBatches before the partitions
        that point at them, and the first partition must not wait behind SuperBatches that are encoded after it.
        """
        with self._changed:
            self._storing = 0
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._wait_for_batch(_FLUSH_SECONDS, or_made_later=True)
            self._wait_for_batch(self._flushed + _FLUSH_SECONDS - time.monotonic())
            size = min(len(self._waiting), BATCH_EVENTS)
            if self._made_later and not self._shows_partitions:  # the first partition is a batch of its own
                size = min(size, next(place for place, event in enumerate(self._waiting, 1) if callable(event)))
                self._shows_partitions = True
            batch = [self._waiting.popleft() for _ in range(size)]
            self._made_later -= sum(map(callable, batch))
            self._flushed = time.monotonic()
            self._storing = len(batch)
            self._changed.notify_all()
            return batch

    def _wait_for_batch(self, seconds: float, *, or_made_later: bool = False) -> None:
        self._changed.wait_for(
            lambda: len(self._waiting) >= BATCH_EVENTS or self._closing or (or_made_later and self._made_later > 0),
            max(0.0, seconds),
        )
