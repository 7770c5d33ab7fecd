"""Many events as rows of Dagster's event log, ready to be written with one statement per table."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log.schema import AssetEventTagsTable, SqlEventLogStorageTable
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from sqlalchemy.engine import Connection


@dataclass(frozen=True, slots=True)
class EventRows:
    """Asset events in their order.

    Attributes:
        rows: columns of the table of events, a row per event.
        tags: those that Dagster looks the event up by, for each row.
        latest: what brings the table of assets up to date: places in `rows`, and the events that are there.
    """

    rows: Sequence[dict[str, Any]]
    tags: Sequence[Mapping[str, str]]
    latest: Sequence[tuple[int, EventLogEntry]]

    def tag_rows(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Columns of the table of tags; `ids` are those that the events got."""
        return [
            {
                "event_id": event_id,
                "asset_key": row["asset_key"],
                "key": key,
                "value": value,
                "event_timestamp": row["timestamp"],
            }
            for event_id, row, tags in zip(ids, self.rows, self.tags, strict=True)
            for key, value in tags.items()
        ]


RowWriter = Callable[[EventRows], list[int]]
"""Stores events, all or none, and gives their storage ids in their order."""

_COPY_CHARACTERS = 1 << 20  # at a time
_IDS = "SELECT nextval(pg_get_serial_sequence(%s, 'id')) FROM generate_series(1, %s)"
_LOCK = int.from_bytes(b"surgelog")  # a number that nothing else in the database locks
_LOCK_SECONDS = 10  # many turns of other writers; of a sensor's tick, which has a minute, the rest is needed too
# Many times what a batch takes; the server then ends the turn of a frozen writer, unless it waits for rows to copy.
_TURN_SECONDS = 30
# A server that crashes may lose the last events, as a run does that is killed before it has stored them.
_BEGIN = f"""
SET LOCAL synchronous_commit TO off;
SET LOCAL lock_timeout TO '{_LOCK_SECONDS}s';
SET LOCAL statement_timeout TO '{_TURN_SECONDS}s';
SET LOCAL idle_in_transaction_session_timeout TO '{_TURN_SECONDS}s';
SELECT pg_advisory_xact_lock({_LOCK});
"""


@contextmanager
def postgres_writer(storage: SqlEventLogStorage) -> Iterator[RowWriter]:
    """What writes rows into Dagster's Postgres event log, with a connection for each batch.

    Dagster's own class commits events first and their tags later, so that versions are missing when it is killed in
    between. Its statements have as many parameters as a batch has values; rows are copied here, which takes a seventh
    of the time in this process and two thirds of it in the server. Ids are drawn before, since COPY does not tell them.

    Whoever reads what is new asks for ids above the last one that he has seen, as Dagster's status of partitions does:
    events that come to light later with lower ids are never counted. So writers take turns, and a batch draws its ids
    when every one before it is there to be seen. One whose turn does not come in time is refused: a writer that is
    stuck stops no other for long. Dagster's own calls take no turns, so what they store amid a batch, as for a run of
    the asset that is launched by hand, may still hide that batch.
    """

    def write(events: EventRows) -> list[int]:
        with storage.index_transaction() as connection:
            connection.exec_driver_sql(_BEGIN)
            table = SqlEventLogStorageTable.name
            ids = sorted(connection.exec_driver_sql(_IDS, (table, len(events.rows))).scalars())
            _copy(connection, table, [{"id": event_id, **row} for event_id, row in zip(ids, events.rows, strict=True)])
            if tags := events.tag_rows(ids):
                _copy(connection, AssetEventTagsTable.name, tags)
            # Rows of assets stay locked until the end: in one order, so that two writers never wait for each other.
            for place, event in sorted(events.latest, key=lambda latest: events.rows[latest[0]]["asset_key"]):
                storage._store_asset_event(connection, event, ids[place])
        return ids

    yield write


@contextmanager
def postgres_turn(storage: SqlEventLogStorage) -> Iterator[None]:
    """While no writer is amid a batch; for events that Dagster itself stores, and whose ids it looks below no more."""
    with storage.index_transaction() as connection:
        connection.exec_driver_sql(_BEGIN)
        yield


def _copy(connection: Connection, table: str, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows, which have the same columns in the same order."""
    lines = "".join(["\t".join(map(_field, row.values())) + "\n" for row in rows])
    statement = f"COPY {table} ({', '.join(rows[0])}) FROM STDIN"
    connection.connection.cursor().copy_expert(statement, io.StringIO(lines), _COPY_CHARACTERS)


def _field(value: Any) -> str:
    """A value as COPY reads it."""
    if value is None:
        return "\\N"
    return str(value).replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")
