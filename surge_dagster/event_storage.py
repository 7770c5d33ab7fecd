"""Dagster's event log in SQLite, with a transaction per batch of events instead of one or two per event.

Dagster's own class stores a batch event by event: two commits, several connections and a look at the tables for each,
which is 8 to 12 ms. Files and tables here are exactly those of that class, so an instance can change to this one and
back at any time:

    event_log_storage:
      module: surge_dagster.event_storage
      class: BatchingSqliteEventLogStorage
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._config.config_schema import UserConfigSchema
from dagster._core.events import DagsterEventType
from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log.schema import AssetEventTagsTable, SqlEventLogStorageTable
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._serdes import ConfigurableClassData
from sqlalchemy.engine import Connection

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
        """Store asset events in their order: in the database of their run, then in the one that all runs share."""
        if not all(event.is_dagster_event and event.dagster_event_type in _IN_ONE_TRANSACTION for event in events):
            super().store_event_batch(events)
            return
        rows = [self._event_to_row(event) for event in events]
        by_run: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            by_run[row["run_id"]].append(row)
        for run_id, of_run in by_run.items():
            with self.run_connection(run_id) as connection:
                connection.execute(SqlEventLogStorageTable.insert(), of_run)
        # Looked at before: within the transaction it would wait for the lock that the transaction holds.
        has_tags = self.has_table(AssetEventTagsTable.name)
        with self.index_transaction() as connection:
            insert = SqlEventLogStorageTable.insert()
            ids = [connection.execute(insert, row).lastrowid for row in rows]
            tags = self._tag_rows(events, ids) if has_tags else []
            if tags:
                connection.execute(AssetEventTagsTable.insert(), tags)
            self._store_latest(connection, events, ids)

    def _tag_rows(self, events: Sequence[EventLogEntry], ids: Sequence[int]) -> list[dict[str, Any]]:
        return [
            {
                "event_id": event_id,
                "asset_key": asset_key.to_string(),
                "key": key,
                "value": value,
                "event_timestamp": self._event_insert_timestamp(event),
            }
            for event_id, event in zip(ids, events, strict=True)
            if (asset_key := event.get_dagster_event().asset_key) is not None
            for key, value in self._tags_for_asset_event(event).items()
        ]

    def _store_latest(self, connection: Connection, events: Sequence[EventLogEntry], ids: Sequence[int]) -> None:
        """Bring the table of assets up to date; only the last event of its kind leaves anything there."""
        latest: dict[object, tuple[EventLogEntry, int]] = {}
        for event, event_id in zip(events, ids, strict=True):
            kind = (event.get_dagster_event().asset_key, event.dagster_event_type)
            latest.pop(kind, None)  # so that what comes last is also written last
            latest[kind] = (event, event_id)
        for event, event_id in latest.values():
            self._store_asset_event(connection, event, event_id)
