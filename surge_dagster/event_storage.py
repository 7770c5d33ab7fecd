"""Dagster's event log in SQLite, with a transaction per batch of events instead of one or two per event.

Dagster's own class stores a batch event by event: two commits, several connections and a look at the tables for each,
which is 8 to 12 ms. Files and tables here are exactly those of that class, so an instance can change to this one and
back at any time:

    event_log_storage:
      module: surge_dagster.event_storage
      class: BatchingSqliteEventLogStorage
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import sqlalchemy as db
from dagster._config.config_schema import UserConfigSchema
from dagster._core.events import DagsterEventType
from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log.schema import AssetEventTagsTable, SqlEventLogStorageTable
from dagster._core.storage.event_log.sqlite.sqlite_event_log import INDEX_SHARD_NAME, SqliteEventLogStorage
from dagster._core.storage.sql import create_engine
from dagster._core.storage.sqlite import SQLITE_BUSY_TIMEOUT_SECONDS
from dagster._serdes import ConfigurableClassData
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from surge_dagster.orchestration.event_rows import EventRows, RowWriter

log = logging.getLogger(__name__)

_FOLDER = Path("history", "runs")  # in the instance's own; where Dagster has it when nothing is configured
_IN_ONE_TRANSACTION = {
    DagsterEventType.ASSET_MATERIALIZATION,
    DagsterEventType.ASSET_OBSERVATION,
    DagsterEventType.ASSET_MATERIALIZATION_PLANNED,
}


class BatchingSqliteEventLogStorage(SqliteEventLogStorage):
    """The stock SQLite event log, except that a batch of asset events is one transaction in each of its databases.

    Args:
        base_dir: folder of the databases; None is where Dagster keeps them by default, `history/runs` of the instance.
    """

    def __init__(self, base_dir: str | None = None, inst_data: ConfigurableClassData | None = None) -> None:
        self._inst_data = inst_data
        self._instance_weakref = None
        self._waits_for_instance = base_dir is None
        if base_dir is not None:
            super().__init__(base_dir, inst_data)

    @classmethod
    def config_type(cls) -> UserConfigSchema:
        """As Dagster's own, but nothing has to be given."""
        return {"base_dir": dg.Field(dg.StringSource, is_required=False)}

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> BatchingSqliteEventLogStorage:
        """Called by Dagster with what dagster.yaml says."""
        return cls(inst_data=inst_data, **config_value)

    def register_instance(self, instance: dg.DagsterInstance) -> None:
        """Called by Dagster before anything is stored; only the instance knows which folder is its own."""
        if self._waits_for_instance:
            super().__init__(str(Path(instance.root_directory) / _FOLDER), self._inst_data)
            self._waits_for_instance = False
        super().register_instance(instance)

    def store_event_batch(self, events: Sequence[EventLogEntry]) -> None:
        """Called by Dagster to store events in their order."""
        if not all(event.is_dagster_event and event.dagster_event_type in _IN_ONE_TRANSACTION for event in events):
            super().store_event_batch(events)
            return
        rows = EventRows(
            rows=[self._event_to_row(event) for event in events],
            tags=[self._tags_for_asset_event(event) for event in events],
            latest=_latest(events),
        )
        # Looked at before: within the transaction it would wait for the lock that the transaction holds.
        has_tags = self.has_table(AssetEventTagsTable.name)
        with self.index_transaction() as shared:
            self._write_shared(shared, rows, has_tags)
        by_run: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows.rows:
            by_run[row["run_id"]].append(row)
        for run_id, of_run in by_run.items():
            with _told_when_it_fails(run_id), self.run_connection(run_id) as connection:
                _insert(connection, SqlEventLogStorageTable, of_run)

    @contextmanager
    def row_writer(self, run_id: str) -> Iterator[RowWriter]:
        """What writes rows of one run, for one thread.

        Its connections stay open, since SQLite copies its log into the database and waits for the disk whenever the
        last connection closes. It does not wait for the disk at each commit either. What a power failure takes are the
        last events, as when the run is killed before it has stored them.
        """
        has_tags = self.has_table(AssetEventTagsTable.name)
        with self._kept_open(INDEX_SHARD_NAME) as shared, self._kept_open(run_id) as of_run:

            def write(events: EventRows) -> list[int]:
                with shared.begin():
                    ids = self._write_shared(shared, events, has_tags)
                with _told_when_it_fails(run_id), of_run.begin():
                    _insert(of_run, SqlEventLogStorageTable, events.rows)
                return ids

            yield write

    @contextmanager
    def _kept_open(self, shard: str) -> Iterator[Connection]:
        with self._connect(shard):
            pass  # makes the tables
        engine = create_engine(
            self.conn_string_for_shard(shard),
            poolclass=db.NullPool,
            connect_args={"timeout": SQLITE_BUSY_TIMEOUT_SECONDS},
        )
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA synchronous = NORMAL")
            connection.rollback()
            yield connection

    def _write_shared(self, connection: Connection, events: EventRows, has_tags: bool) -> list[int]:
        """Write to the database that all runs share, first: where others may hold the lock, nothing is stored yet."""
        _insert(connection, SqlEventLogStorageTable, events.rows)
        # Nobody else writes while this transaction does, so the rows got ids without gaps.
        last = connection.exec_driver_sql("SELECT last_insert_rowid()").scalar_one()
        ids = list(range(last - len(events.rows) + 1, last + 1))
        if has_tags and (tags := events.tag_rows(ids)):
            _insert(connection, AssetEventTagsTable, tags)
        for place, event in events.latest:
            self._store_asset_event(connection, event, ids[place])
        return ids


def _insert(connection: Connection, table: db.Table, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows, which have the same columns in the same order.

    SQLAlchemy's own insert looks at each value of each row, which takes as long as everything else does.
    """
    columns: list[list[Any]] = []
    for name in rows[0]:
        values = [row[name] for row in rows]
        dialect = connection.dialect
        if written := table.c[name].type.dialect_impl(dialect).bind_processor(dialect):
            as_written = {value: written(value) for value in set(values)}
            values = [as_written[value] for value in values]
        columns.append(values)
    statement = f"INSERT INTO {table.name} ({', '.join(rows[0])}) VALUES ({', '.join('?' * len(rows[0]))})"
    connection.exec_driver_sql(statement, list(zip(*columns, strict=True)))


def _latest(events: Sequence[EventLogEntry]) -> list[tuple[int, EventLogEntry]]:
    """The last event of each kind and asset; only that leaves anything in the table of assets."""
    latest: dict[object, tuple[int, EventLogEntry]] = {}
    for place, event in enumerate(events):
        kind = (event.get_dagster_event().asset_key, event.dagster_event_type)
        latest.pop(kind, None)  # so that what comes last is also written last
        latest[kind] = (place, event)
    return list(latest.values())


@contextmanager
def _told_when_it_fails(run_id: str) -> Iterator[None]:
    """The log of one run is what its page shows; what the shared log holds counts, and must not be stored again."""
    try:
        yield
    except SQLAlchemyError as error:
        log.warning("the log of run %s lacks events that the log of all runs has: %s", run_id, error)
