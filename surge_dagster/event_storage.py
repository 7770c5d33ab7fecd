"""Dagster's SQLite event log with one transaction per batch of events instead of several per event.

Dagster's own class stores a batch event by event: two commits and several connections for each,
which takes about 10 ms. Files and tables are exactly those of that class, so an instance can change
to this one and back at any time:

    event_log_storage:
      module: surge_dagster.event_storage
      class: BatchingSqliteEventLogStorage

Like `orchestration/dagster_internals.py` it uses private modules of Dagster, tried with 1.13.20,
1.13.27 and 1.13.29.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import sqlalchemy as sql
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._serdes import ConfigurableClassData

# within the instance's folder; Dagster's own place where nothing is configured
_FOLDER = Path("history", "runs")
_BATCHED = {
    dg.DagsterEventType.ASSET_MATERIALIZATION,
    dg.DagsterEventType.ASSET_OBSERVATION,
    dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED,
}


class BatchingSqliteEventLogStorage(SqliteEventLogStorage):
    """Stores a batch of asset events in one transaction per database; by default in Dagster's own
    folder."""

    def __init__(
        self, base_dir: str | None = None, inst_data: ConfigurableClassData | None = None
    ) -> None:
        self._inst_data = inst_data
        self._instance_weakref = None
        self._waits_for_instance = base_dir is None
        if base_dir is not None:
            super().__init__(base_dir, inst_data)

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        return {"base_dir": dg.Field(dg.StringSource, is_required=False)}

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> BatchingSqliteEventLogStorage:
        return cls(inst_data=inst_data, **config_value)

    def register_instance(self, instance: dg.DagsterInstance) -> None:
        """Take the folder of the instance; Dagster calls this before it stores anything."""
        if self._waits_for_instance:
            super().__init__(str(Path(instance.root_directory) / _FOLDER), self._inst_data)
            self._waits_for_instance = False
        super().register_instance(instance)

    @property
    def supports_partition_subset_in_asset_materialization_planned_events(self) -> bool:
        """Return True: one planned event per run, not one of 10 ms per partition.

        With an event per partition, those that a failing run only skipped are shown as failed.
        """
        return True

    def store_event_batch(self, events: Sequence[dg.EventLogEntry]) -> None:
        """Store events in their order: in the logs of their runs, then all or none in the log of
        all runs.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: a database could not be written. Dagster then stores the
                events one by one; the page of a run may show some of them twice, and everything
                else counts each once.
        """
        if not all(
            event.is_dagster_event and event.dagster_event_type in _BATCHED for event in events
        ):
            super().store_event_batch(events)
            return
        rows = [self._event_to_row(event) for event in events]
        by_run: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            by_run[row["run_id"]].append(row)
        for run_id, of_run in by_run.items():
            with self.run_connection(run_id) as connection:
                connection.execute(SqlEventLogStorageTable.insert(), of_run)
        with self.index_transaction() as connection:
            connection.execute(SqlEventLogStorageTable.insert(), rows)
            # SQLite has one writer at a time, so the rows have consecutive ids.
            last = connection.execute(
                sql.select(sql.func.max(SqlEventLogStorageTable.c.id))
            ).scalar_one()
            ids = range(last - len(rows) + 1, last + 1)
            self._store_asset_event_tags(connection, events, ids)
            # The last event of each kind and asset; earlier ones leave nothing in the table of
            # assets.
            latest = {
                (row["dagster_event_type"], row["asset_key"]): place
                for place, row in enumerate(rows)
            }
            for place in sorted(latest.values()):
                self._store_asset_event(connection, events[place], ids[place])
