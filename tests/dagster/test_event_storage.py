"""The SQLite event log in batches writes what Dagster's own class writes: the same rows in the same
tables."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.events import (
    AssetMaterializationPlannedData,
    AssetObservationData,
    DagsterEvent,
    StepMaterializationData,
)
from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log import SqliteEventLogStorage
from sqlalchemy.exc import SQLAlchemyError

from surge_dagster.event_storage import BatchingSqliteEventLogStorage
from tests.dagster.conftest import Workbench

RUNS = ("00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002")


def entries() -> list[EventLogEntry]:
    """Materializations, observations and planned events of several assets and of two runs."""
    found: list[EventLogEntry] = []
    for number in range(20):
        asset, partition = dg.AssetKey(["shop", "ab"[number % 2]]), f"p{number % 5}"
        tags = {
            "dagster/data_version": f"v{number}",
            "dagster/code_version": "1",
            "owner": "somebody",
        }
        kind, data = [
            (
                dg.DagsterEventType.ASSET_MATERIALIZATION,
                StepMaterializationData(
                    dg.AssetMaterialization(asset, partition=partition, tags=tags)
                ),
            ),
            (
                dg.DagsterEventType.ASSET_OBSERVATION,
                AssetObservationData(dg.AssetObservation(asset, partition=partition, tags=tags)),
            ),
            (
                dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED,
                AssetMaterializationPlannedData(asset, partition),
            ),
        ][number % 3]
        event = DagsterEvent(kind.value, "job", event_specific_data=data, step_key="step")
        found.append(
            EventLogEntry(
                error_info=None,
                level=10,
                user_message="",
                run_id=RUNS[number % 2],
                timestamp=1_800_000_000.0 + number,
                dagster_event=event,
            )
        )
    return found


def tables(folder: Path) -> dict[str, list[Any]]:
    """All rows of all tables of all databases of an event log."""
    found = {}
    for path in sorted(folder.glob("*.db")):
        with sqlite3.connect(path) as connection:
            names = [
                name
                for (name,) in connection.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table'"
                )
            ]
            for name in names:
                columns = [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
                compared = [
                    f'"{column}"'
                    for column in columns
                    if "create" not in column and "completed" not in column
                ]
                if name == "asset_keys":
                    # counts the assets as they come, and nothing points at it
                    compared.remove('"id"')
                rows = connection.execute(f"SELECT {', '.join(compared)} FROM {name}").fetchall()
                found[f"{path.name}/{name}"] = sorted(rows, key=repr)
    return found


def test_batch_stores_the_same_rows_as_dagsters_storage_event_by_event(tmp_path: Path) -> None:
    events = entries()
    for name, kind in (
        ("stock", SqliteEventLogStorage),
        ("batched", BatchingSqliteEventLogStorage),
    ):
        storage = kind(str(tmp_path / name))
        storage.store_event_batch(events[:9])
        storage.store_event_batch(events[9:])
    assert tables(tmp_path / "batched") == tables(tmp_path / "stock")


def test_tags_of_a_batch_belong_to_its_own_events_while_others_write(tmp_path: Path) -> None:
    """Other connections of this process and other processes write to the same databases between
    batches."""
    storage = BatchingSqliteEventLogStorage(str(tmp_path))
    events = [event for event in entries() if event.get_dagster_event().partition != "p3"]
    for start in range(0, len(events), 4):
        storage.store_event_batch(events[start : start + 4])
        SqliteEventLogStorage(str(tmp_path)).store_event(events[start])
    with sqlite3.connect(tmp_path / "index.db") as connection:
        rows = connection.execute(
            "SELECT event, value FROM event_logs JOIN asset_event_tags ON event_id = event_logs.id "
            "WHERE key = 'dagster/data_version'"
        ).fetchall()
    assert rows and all(f'"{version}"' in event for event, version in rows)


def test_events_that_one_runs_log_refuses_are_not_in_the_shared_log(tmp_path: Path) -> None:
    """Dagster stores a batch that was refused event by event, and none of them may count twice."""
    storage = BatchingSqliteEventLogStorage(str(tmp_path))
    events = [event for event in entries() if event.run_id == RUNS[0]]
    storage.store_event_batch(events[:1])
    with sqlite3.connect(tmp_path / f"{RUNS[0]}.db") as connection:
        connection.execute(
            "CREATE TRIGGER full BEFORE INSERT ON event_logs BEGIN SELECT RAISE(ABORT, 'full'); END"
        )
    with pytest.raises(SQLAlchemyError, match="full"):
        storage.store_event_batch(events[1:])
    with sqlite3.connect(tmp_path / "index.db") as connection:
        assert connection.execute("SELECT COUNT(*) FROM event_logs").fetchone() == (1,)


def test_instance_can_change_to_the_batching_storage_and_back(tmp_path: Path) -> None:
    """The settings name no folder: the databases of the instance are found where Dagster has made
    them."""
    settings = "event_log_storage:\n  module: surge_dagster.event_storage\n  class: BatchingSqliteEventLogStorage\n"
    events = entries()
    for first, lines in ((0, ""), (7, settings), (14, "")):
        (tmp_path / "dagster.yaml").write_text(lines)
        with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
            assert isinstance(instance.event_log_storage, BatchingSqliteEventLogStorage) is bool(
                lines
            )
            instance.event_log_storage.store_event_batch(events[first : first + 7])
            stored = events[: first + 7]
            for run_id in RUNS:
                assert instance.all_logs(run_id) == [
                    event for event in stored if event.run_id == run_id
                ]
            for asset in (dg.AssetKey(["shop", "a"]), dg.AssetKey(["shop", "b"])):
                ids = instance.get_latest_storage_id_by_partition(
                    asset, dg.DagsterEventType.ASSET_MATERIALIZATION
                )
                decoded = [event.get_dagster_event() for event in stored]
                made = [event for event in decoded if event.is_step_materialization]
                assert set(ids) == {event.partition for event in made if event.asset_key == asset}
    assert [path.name for path in tmp_path.glob("history/runs/*.db")].count("index.db") == 1


def test_launch_of_a_range_is_planned_with_one_event(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DAGSTER_EMIT_PARTITION_SUBSET_IN_PLANNED_EVENTS", raising=False)
    bench.fill(("a", "b", "c"))
    bench.refresh()

    ran = bench.embed("a", "c", force=True)

    assert ran.count(dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED) == 1
