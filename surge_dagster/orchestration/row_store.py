"""Events as rows of Dagster's tables, many with one statement: for SQLite and Postgres.

The rows are those that Dagster would make. The first and the last event of each kind in a batch are made into rows by
Dagster too; should these differ, nothing more is stored this way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeGuard

import dagster as dg
from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from dagster._serdes import serialize_value
from sqlalchemy.exc import SQLAlchemyError

from surge_dagster.event_storage import BatchingSqliteEventLogStorage
from surge_dagster.orchestration.event_rows import EventRows, RowWriter, postgres_turn, postgres_writer
from surge_dagster.orchestration.event_texts import EventTexts
from surge_dagster.orchestration.partition_events import AnyEvent, Event, class_of, made

log = logging.getLogger(__name__)


class RowStore:
    """Stores events of one run.

    Args:
        storage: Dagster's event log; its methods say how events become rows.
        write: writes rows.
        entry: what Dagster would store for an event at a time (seconds since 1970).
    """

    def __init__(
        self, storage: SqlEventLogStorage, write: RowWriter, entry: Callable[[Event, float], EventLogEntry]
    ) -> None:
        self._storage = storage
        self._write = write
        self._entry = lambda event, timestamp: entry(made(event), timestamp)
        self._texts = EventTexts(lambda event, timestamp: serialize_value(self._entry(event, timestamp)))
        self._indexed: dict[tuple[str, ...], list[str]] = {}
        self._trusted = True

    def store(self, events: Sequence[AnyEvent]) -> Sequence[int] | None:
        """Store events in their order; gives their storage ids, or None if they could not be stored this way."""
        if not self._trusted:
            return None
        try:
            rows = self._rows(events, time.time())
            if rows is not None:
                return self._write(rows)
            self._trusted = False
            log.warning("Dagster stores other rows than were made for it: all events go through its own calls now")
        except Exception as error:
            # Dagster stores the events of a batch that fails one by one, and a disk that is full refuses them again.
            log.warning(
                "%d events go through Dagster's own calls, since their rows were refused: %s", len(events), error
            )
        return None

    def _rows(self, events: Sequence[AnyEvent], now: float) -> EventRows | None:
        """None if they are not what Dagster makes of the events."""
        first: dict[object, int] = {}
        last: dict[object, int] = {}
        alike: dict[object, dict[str, Any]] = {}
        rows, tags = [], []
        for place, event in enumerate(events):
            kind = (class_of(event), event.asset_key)
            if kind not in first:
                first[kind] = place
                alike[kind] = self._storage._event_to_row(self._entry(event, now))
            last.pop(kind, None)
            last[kind] = place
            rows.append({**alike[kind], "event": self._texts.text(event, now), "partition": event.partition})
            told = event.tags or {}
            keys = tuple(told)
            if keys not in self._indexed:
                indexed = self._storage.get_asset_tags_to_index(set(keys))
                self._indexed[keys] = [key for key in keys if key in indexed]
            tags.append({key: told[key] for key in self._indexed[keys]})
        for place in {*first.values(), *last.values()}:
            entry = self._entry(events[place], now)
            if rows[place] != self._storage._event_to_row(entry):
                return None
            if tags[place] != dict(self._storage._tags_for_asset_event(entry)):
                return None
        return EventRows(rows, tags, [(place, self._entry(events[place], now)) for place in last.values()])


def row_writer(instance: dg.DagsterInstance, run_id: str) -> AbstractContextManager[RowWriter] | None:
    """What writes rows of events of a run; None where that is not known, or where somebody listens to each event."""
    storage = instance.event_log_storage
    if instance._subscribers.get(run_id):
        return None
    if isinstance(storage, BatchingSqliteEventLogStorage):
        return storage.row_writer(run_id)
    return postgres_writer(storage) if _is_postgres(storage) else None


@contextmanager
def writers_turn(instance: dg.DagsterInstance) -> Iterator[None]:
    """For a few events that go through Dagster's own calls: no row writer is amid a batch, if its turn ends in time."""
    storage = instance.event_log_storage
    turn = ExitStack()
    if _is_postgres(storage):
        try:
            turn.enter_context(postgres_turn(storage))
        except SQLAlchemyError as error:
            log.warning("events are stored while another writer is amid a batch: %s", error)
    try:
        yield
    finally:
        try:
            turn.close()
        except SQLAlchemyError as error:  # its connection was lost, and with it the turn; the events are stored
            log.warning("a turn among writers of events ended early: %s", error)


def _is_postgres(storage: object) -> TypeGuard[SqlEventLogStorage]:
    # By its name: the package that it is in need not be installed.
    if not isinstance(storage, SqlEventLogStorage) or type(storage).__qualname__ != "PostgresEventLogStorage":
        return False
    engine = getattr(storage, "_engine", None)
    return engine is not None and engine.dialect.driver == "psycopg2"
