"""Storing events in Dagster's event log: `report_events` while the caller waits, `EventWriter` in
its own thread.

Dagster stores a single event in about 10 ms on SQLite and 25 ms on Postgres, and a batch of them in
a twentieth of that per event. A run that waited for each event would embed at the speed of a
database, so its events wait in a bounded queue until a thread stores them, each second or when a
batch is complete. Many machines share one database, so all of them together store some twenty times
per second. A crash loses the queued events and no file: the next run finds the files and adopts
them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

import dagster as dg

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.waiting import TURN_SECONDS, wait_for_thread
from surge_dagster.orchestration.dagster_internals import Event, store_batch

# A batch is one transaction, and other processes wait for SQLite as long as it lasts.
BATCH_EVENTS = 1_000
_FLUSH_SECONDS = 1.0
# Two batches of some 4 kB per event; more would only take longer to store when a run is terminated.
_WAITING_EVENTS = 2 * BATCH_EVENTS

T = TypeVar("T")


class EventsNotStored(TransientError):
    """Dagster's event log refused events; the files that they report are published, and the next
    run adopts them."""


def report_events(
    instance: dg.DagsterInstance, context: dg.OpExecutionContext | None, events: Sequence[Event]
) -> None:
    """Store events by kind and asset, in their order, and observations before others.

    Dagster's storages update their table of assets only from the last event of a batch, and
    Postgres stores a batch of several kinds event by event. Events without a `context` belong to no
    run.
    """
    groups: dict[object, list[Event]] = {}
    for event in events:
        groups.setdefault((type(event), event.asset_key), []).append(event)
    for group in sorted(
        groups.values(), key=lambda group: not isinstance(group[0], dg.AssetObservation)
    ):
        store_batch(instance, context, group, BATCH_EVENTS)


class EventWriter(Generic[T]):
    """Stores what a step queues, in a thread; the end of `with` stores the rest.

    Args:
        grace_seconds: for the rest after an error.
    """

    def __init__(
        self,
        context: dg.OpExecutionContext,
        store: Callable[[Sequence[T]], None],
        grace_seconds: float,
    ) -> None:
        self._context = context
        self._store = store
        self._grace_seconds = grace_seconds
        self._waiting: deque[T] = deque()
        self._urgent = 0  # how many of them are stored without waiting for more
        self._storing = 0
        self._stored_at = float("-inf")
        self._changed = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="surge-events", daemon=True)

    def put(self, item: T, *, immediately: bool = False) -> None:
        """Queue an item, or wait while the queue is full; `immediately` ends the batch with it."""
        with self._changed:
            while len(self._waiting) >= _WAITING_EVENTS and self._error is None:
                self._changed.wait(TURN_SECONDS)
            self._require_stored()
            self._waiting.append(item)
            if immediately:
                self._urgent = len(self._waiting)
            # The thread sleeps otherwise: woken by each event, it would take turns from the
            # encoder's thread.
            if immediately or len(self._waiting) in (1, BATCH_EVENTS):
                self._changed.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        wait_for_thread(self._thread, None if error is None else self._grace_seconds)
        with self._changed:
            unstored = self._storing + len(self._waiting)
            self._waiting.clear()
            if error is None:
                self._require_stored()
            elif (
                unstored and self._error is None
            ):  # otherwise the error that ended the step is the one to report
                self._context.log.warning(
                    f"{counted(unstored, 'event')} not stored within {self._grace_seconds:g} s. "
                    "Their files are published, and the next run adopts them."
                )

    def _require_stored(self) -> None:
        if self._error is not None:
            raise EventsNotStored(
                "events could not be stored in Dagster's event log "
                f"({type(self._error).__name__}: {self._error}). The files that they report are "
                "published, and the next run adopts them without encoding them. Look whether the "
                "event log's database can be reached and written."
            ) from self._error

    def _run(self) -> None:
        try:
            while batch := self._next():
                self._store(batch)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> list[T]:
        """Wait for a batch, or for what is queued within the time; empty at the end."""
        with self._changed:
            self._storing = 0
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._changed.wait_for(
                lambda: self._urgent or len(self._waiting) >= BATCH_EVENTS or self._closing,
                max(0.0, self._stored_at + _FLUSH_SECONDS - time.monotonic()),
            )
            size = min(self._urgent or len(self._waiting), BATCH_EVENTS)
            batch = [self._waiting.popleft() for _ in range(size)]
            self._urgent = max(0, self._urgent - size)
            self._storing = size
            self._stored_at = time.monotonic()
            self._changed.notify_all()
            return batch
