"""The SQLite event log in batches writes what Dagster's own class writes: the same rows in the same
tables."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from sqlalchemy.exc import SQLAlchemyError

from surge_dagster.event_storage import BatchingSqliteEventLogStorage
from tests.dagster.conftest import Workbench
from tests.dagster.private_dagster import stock_event_log

ASSETS = (dg.AssetKey(["shop", "a"]), dg.AssetKey(["shop", "b"]))


def emit(context) -> dg.MaterializeResult:
    """Observe the partition twice and materialize it, each with another data version."""
    tags = {"owner": "somebody", "dagster/code_version": "1"}
    for number in range(2):
        version = {"dagster/data_version": f"observed {number}"}
        event = dg.AssetObservation(
            context.asset_key, partition=context.partition_key, tags=tags | version
        )
        context.log_event(event)
    return dg.MaterializeResult(data_version=dg.DataVersion(f"of {context.partition_key}"))


@pytest.fixture(scope="module")
def events() -> list[dg.EventLogEntry]:
    """Events of every kind that a real instance stores, of two assets, two partitions, two runs."""
    partitions = dg.StaticPartitionsDefinition(["p0", "p1"])
    assets = [dg.asset(key=key, partitions_def=partitions)(emit) for key in ASSETS]
    found: list[dg.EventLogEntry] = []
    with dg.DagsterInstance.ephemeral() as instance:
        for key in ("p0", "p1"):
            ran = dg.materialize(assets, instance=instance, partition_key=key)
            logged = instance.all_logs(ran.run_id)
            found += [entry for entry in logged if asset_of(entry) is not None]
    assert len(found) == 16
    return found


def asset_of(entry: dg.EventLogEntry) -> dg.AssetKey | None:
    return entry.dagster_event.asset_key if entry.dagster_event else None


def tables(folder: Path) -> dict[str, list[Any]]:
    """All rows of all tables of all databases of an event log."""
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.db")):
        with sqlite3.connect(path) as connection:
            connection.row_factory = sqlite3.Row
            listed = "SELECT name FROM sqlite_master WHERE type = 'table'"
            for (name,) in connection.execute(listed).fetchall():
                rows = map(dict, connection.execute(f"SELECT * FROM {name}"))
                found[f"{path.name}/{name}"] = sorted(map(compared, rows), key=repr)
    return found


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """A row without times, and without the number of an asset, at which nothing points."""
    left_out = {"id"} if "last_materialization" in row else set[str]()
    return {
        name: value
        for name, value in row.items()
        if name not in left_out and not re.search("create|completed", name)
    }


def test_batch_stores_the_same_rows_as_dagsters_storage_event_by_event(
    tmp_path: Path, events: list[dg.EventLogEntry]
) -> None:
    stock = stock_event_log(tmp_path / "stock")
    batched = BatchingSqliteEventLogStorage(str(tmp_path / "batched"))

    for storage in (stock, batched):
        storage.store_event_batch(events[:9])
        storage.store_event_batch(events[9:])

    assert tables(tmp_path / "batched") == tables(tmp_path / "stock")


def test_tags_of_a_batch_belong_to_its_events_while_others_write(
    tmp_path: Path, events: list[dg.EventLogEntry]
) -> None:
    storage = BatchingSqliteEventLogStorage(str(tmp_path))

    for start in range(0, len(events), 4):
        storage.store_event_batch(events[start : start + 4])
        stock_event_log(tmp_path).store_event(events[start])  # by another connection

    with sqlite3.connect(tmp_path / "index.db") as connection:
        rows = connection.execute(
            "SELECT event, value FROM event_logs JOIN asset_event_tags ON event_id = event_logs.id "
            "WHERE key = 'dagster/data_version'"
        ).fetchall()

    assert rows
    assert all(f'"{version}"' in event for event, version in rows)


def test_events_that_one_runs_log_refuses_are_not_in_the_shared_log(
    tmp_path: Path, events: list[dg.EventLogEntry]
) -> None:
    """Dagster stores a batch that was refused event by event, and none of them may count twice."""
    run_id = events[0].run_id
    of_run = [event for event in events if event.run_id == run_id]
    storage = BatchingSqliteEventLogStorage(str(tmp_path))
    storage.store_event_batch(of_run[:1])
    with sqlite3.connect(tmp_path / f"{run_id}.db") as connection:
        connection.execute(
            "CREATE TRIGGER full BEFORE INSERT ON event_logs BEGIN SELECT RAISE(ABORT, 'full'); END"
        )

    with pytest.raises(SQLAlchemyError, match="full"):
        storage.store_event_batch(of_run[1:])

    with sqlite3.connect(tmp_path / "index.db") as connection:
        assert connection.execute("SELECT COUNT(*) FROM event_logs").fetchone() == (1,)


def test_instance_can_change_to_the_batching_storage_and_back(
    tmp_path: Path, events: list[dg.EventLogEntry]
) -> None:
    settings = {"module": "surge_dagster.event_storage", "class": "BatchingSqliteEventLogStorage"}
    batched = yaml.safe_dump({"event_log_storage": settings})
    runs = {event.run_id for event in events}

    for first, lines in ((0, ""), (6, batched), (12, "")):
        (tmp_path / "dagster.yaml").write_text(lines)
        with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
            instance.event_log_storage.store_event_batch(events[first : first + 6])
            stored = events[: first + 6]
            read = [entry for run_id in runs for entry in instance.all_logs(run_id)]
            assert sorted(read, key=events.index) == stored

    assert [path.name for path in tmp_path.glob("history/runs/*.db")].count("index.db") == 1


def test_launch_of_a_range_is_planned_with_one_event(bench: Workbench) -> None:
    bench.fill(("a", "b", "c"))
    bench.refresh()

    ran = bench.embed("a", "c", force=True)

    assert ran.count(dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED) == 1
