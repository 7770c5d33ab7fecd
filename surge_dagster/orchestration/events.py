"""Storing events in Dagster's event log: `report_events` while the caller waits, `EventWriter` in
the background.

Dagster stores a single event in about 10 ms on SQLite and 25 ms on Postgres, and a batch of them in
a twentieth of that per event. A run that waited for each event would embed at the speed of a
database, so its events are stored in batches, each second or when a batch is complete. Many
machines share one database, so all of them together store some twenty times per second. A crash
loses the events that wait and no file: the next run finds the files and adopts them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

import dagster as dg

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.support.waiting import every, in_background, result_of, wait_in_turns
from surge_dagster.orchestration.dagster_internals import Event, store_batch

# A batch is one transaction, and other processes wait for SQLite as long as it lasts. While one is
# stored, another one waits, of some 4 kB per event: more would only take longer to store when a run
# is terminated.
BATCH_EVENTS = 1_000
_FLUSH_SECONDS = 1.0
_THREAD = "surge-events"

T = TypeVar("T")


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
    """Stores what a step puts, in the background; the end of `with` stores the rest.

    Args:
        grace_seconds: for the rest after an error.
    """

    def __init__(self, store: Callable[[Sequence[T]], None], grace_seconds: float) -> None:
        self._store = store
        self._grace_seconds = grace_seconds
        self._waiting: list[T] = []
        self._storing: Future[None] = Future()
        self._storing.set_result(None)
        self._lock = threading.Lock()
        self._flushing = ExitStack()

    def put(self, item: T) -> None:
        """Add an item; wait if a batch is complete and the one before it is still being stored."""
        with self._lock:
            self._waiting.append(item)
            is_complete = len(self._waiting) >= BATCH_EVENTS
        if is_complete or self._storing.done():
            self._require_stored()
        if is_complete:
            self._begin()

    def __enter__(self) -> Self:
        self._flushing.enter_context(every(_FLUSH_SECONDS, self._begin, _THREAD))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._flushing.close()
        if error is None:
            self._finish()
            return

        # If that fails or takes longer, the error that ended the step is the one to report, and the
        # next run adopts the files.
        finishing = in_background(self._finish, _THREAD)
        wait_in_turns(lambda turn: bool(futures_wait([finishing], turn).done), self._grace_seconds)

    def _begin(self) -> None:
        """Begin to store what waits, unless a batch is being stored or could not be."""
        with self._lock:
            is_ready = self._storing.done() and self._storing.exception() is None
            if self._waiting and is_ready:
                batch = self._waiting
                self._waiting = []
                self._storing = in_background(partial(self._store, batch), _THREAD)

    def _finish(self) -> None:
        self._require_stored()
        self._begin()
        self._require_stored()

    def _require_stored(self) -> None:
        """Wait for the batch that is being stored."""
        try:
            result_of(self._storing)
        except Exception as error:
            raise TransientError(
                "events could not be stored in Dagster's event log "
                f"({type(error).__name__}: {error}). The files that they report are "
                "published, and the next run adopts them without encoding them. Look whether the "
                "event log's database can be reached and written."
            ) from error
