"""Many events as rows of Dagster's event log, ready to be written with one statement per table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log.schema import AssetEventTagsTable, SqlEventLogStorageTable
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage


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


@contextmanager
def postgres_writer(storage: SqlEventLogStorage) -> Iterator[RowWriter]:
    """What writes rows into Dagster's Postgres event log, with a connection for each batch.

    Dagster's own class commits events first and their tags later, so that versions are missing when it is killed in
    between, and it has SQLAlchemy make a statement with as many parameters as a batch has values, each time anew.
    """
    insert = SqlEventLogStorageTable.insert().returning(SqlEventLogStorageTable.c.id, sort_by_parameter_order=True)

    def write(events: EventRows) -> list[int]:
        with storage.index_transaction() as connection:
            # A server that crashes may lose the last events, as a run does that is killed before it has stored them.
            connection.exec_driver_sql("SET LOCAL synchronous_commit TO off")
            ids: list[int] = list(connection.execute(insert, events.rows).scalars())
            if tags := events.tag_rows(ids):
                connection.execute(AssetEventTagsTable.insert(), tags)
            for place, event in events.latest:
                storage._store_asset_event(connection, event, ids[place])
        return ids

    yield write
