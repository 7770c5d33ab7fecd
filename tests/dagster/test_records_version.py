"""A sensor that fetches records only when there may be others must see every change of them at its next tick."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.sensor_definition import SensorExecutionData
from dagster._core.storage.event_log.schema import AssetEventTagsTable, SqlEventLogStorageTable
from sqlalchemy import event
from sqlalchemy.engine import Engine

from surge_dagster.orchestration import lineage, records_version
from surge_dagster.orchestration.lineage import read_catalogued_again
from surge_dagster.orchestration.records_version import records_mark, registered_version
from surge_dagster.orchestration.records_version import records_version as token
from surge_dagster.orchestration.refusals import refusal, refusal_terms
from surge_dagster.orchestration.runless_events import store_runless
from tests.dagster.conftest import NAMES, Workbench

_KEYS = ["a", "b"]


def told(found: SensorExecutionData) -> list[tuple[str, str | None]]:
    """Asset and partition of each event of a tick."""
    return sorted((event.asset_key.to_user_string(), event.partition) for event in found.asset_events)


def embedded(bench: Workbench) -> str:
    """Two partitions, embedded and on record; gives the id of their run."""
    for key in _KEYS:
        bench.write(key)
    [ran] = bench.launch(bench.tick())
    assert [told(bench.tick()) for _ in range(2)] == [[], []]
    return ran.run_id


def test_every_change_of_the_records_is_seen_at_the_next_tick(bench: Workbench) -> None:
    run_id = embedded(bench)
    both = [("embeddings", key) for key in _KEYS]

    bench.instance.delete_run(run_id)
    assert told(bench.tick()) == both, "their materializations went with the run"
    assert told(bench.tick()) == []

    bench.instance.wipe_assets([NAMES.embeddings])
    assert told(bench.tick()) == both
    assert told(bench.tick()) == []

    other = {"dagster/data_version": "of somebody else"}
    bench.instance.report_runless_asset_event(dg.AssetObservation(NAMES.source_partitions, partition="a", tags=other))
    assert told(bench.tick()) == [("source_partitions", "a")]
    assert told(bench.tick()) == [("embeddings", "a")], "made from what was observed before"
    assert told(bench.tick()) == []

    bench.instance.report_runless_asset_event(dg.AssetMaterialization(NAMES.embeddings, partition="b", tags=other))
    assert told(bench.tick()) == [("embeddings", "b")]
    assert told(bench.tick()) == []

    resources = NAMES.resources(SimpleNamespace(**bench.definitions.resources or {}))
    partition = next((found for found in resources.catalog.open() if found.key == "b"), None)
    assert partition is not None
    bench.instance.report_runless_asset_event(refusal(NAMES, partition, "odd", refusal_terms(resources)))
    bench.file("b").unlink()
    assert "1 refused as they are" in (bench.tick().skip_message or "")

    bench.instance.delete_dynamic_partition(NAMES.partitions_name, "a")
    bench.tick()
    assert bench.instance.has_dynamic_partition(NAMES.partitions_name, "a")


def test_partitions_that_were_added_deleted_or_moved_are_seen_at_the_next_tick(bench: Workbench) -> None:
    """SQLite gives the number of a deleted last row to the next one, within the same second too."""
    embedded(bench)
    name, instance = NAMES.partitions_name, bench.instance
    orders = [["b", "a"], ["b", "a", "x"], ["b", "a", "y"], ["b", "a", "y,4:1:z"], ["b", "a", "y", "z"], ["a", "b"], []]
    seen = [registered_version(NAMES, instance)]
    for order in orders:
        for key in instance.get_dynamic_partitions(name):
            instance.delete_dynamic_partition(name, key)
        for key in order:
            instance.add_dynamic_partitions(name, [key])
        assert list(read_catalogued_again(NAMES, instance).registered) == order
        assert list(read_catalogued_again(NAMES, instance).registered) == order
        seen.append(registered_version(NAMES, instance))
    assert len(set(seen[1:])) == len(orders)


def test_a_tick_that_finds_the_records_unchanged_fetches_none(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded(bench)
    fetched: list[str] = []
    storage = bench.instance.event_log_storage
    for name in ("get_latest_tags_by_partition", "get_latest_storage_id_by_partition"):
        monkeypatch.setattr(storage, name, lambda *_, name=name: fetched.append(name) or {})
    monkeypatch.setattr(lineage, "_registered", lambda *_: fetched.append("keys") or dict.fromkeys(_KEYS))
    assert told(bench.look()) == [] == fetched
    monkeypatch.setattr(records_version, "CHECKED_VERSIONS", ())
    bench.look()
    assert fetched, "with another version of Dagster they are fetched at each tick"


def test_an_event_that_got_the_id_of_a_deleted_one_is_another(bench: Workbench) -> None:
    def report(version: str) -> None:
        tags = {"dagster/data_version": version}
        event = dg.AssetMaterialization(NAMES.embeddings, partition="a", tags=tags)
        bench.instance.report_runless_asset_event(event)

    def newest() -> int:
        [record] = bench.instance.fetch_materializations(NAMES.embeddings, limit=1).records
        return record.storage_id

    report("v1")
    before, storage_id = token(NAMES, bench.instance), newest()
    assert before is not None and before == token(NAMES, bench.instance)
    with bench.instance.event_log_storage.index_connection() as connection:  # pyright: ignore[reportAttributeAccessIssue]
        connection.execute(SqlEventLogStorageTable.delete().where(SqlEventLogStorageTable.c.id == storage_id))
        connection.execute(AssetEventTagsTable.delete().where(AssetEventTagsTable.c.event_id == storage_id))
    report("v2")
    assert newest() == storage_id
    assert token(NAMES, bench.instance) != before


@contextmanager
def steps_of_sqlite() -> Iterator[list[int]]:
    """Counts what SQLite's virtual machine does: the same for the same work, on any machine."""
    steps = [0]

    def count() -> int:
        steps[0] += 1
        return 0

    def connected(connection: Any, record: Any) -> None:
        connection.set_progress_handler(count, 1)

    event.listen(Engine, "connect", connected)
    try:
        yield steps
    finally:
        event.remove(Engine, "connect", connected)


def add_history(bench: Workbench, nights: int) -> None:
    """Events of so many nights, each of which made both partitions again."""
    tags = {"dagster/data_version": "v"}
    kinds = ((NAMES.source_partitions, dg.AssetObservation), (NAMES.embeddings, dg.AssetMaterialization))
    events = [made(asset, partition=key, tags=tags) for _ in range(nights) for asset, made in kinds for key in _KEYS]
    assert store_runless(bench.instance, events)


def test_an_idle_look_at_the_records_costs_the_same_however_many_nights_there_were(bench: Workbench) -> None:
    def idle() -> int:
        for _ in range(2):
            read_catalogued_again(NAMES, bench.instance)
        with steps_of_sqlite() as steps:
            records_mark(NAMES, bench.instance)
            alone = steps[0]
            read_catalogued_again(NAMES, bench.instance)
        assert steps[0] <= 2 * alone + 400, "the keys are looked at, and nothing else"
        return alone

    add_history(bench, 1)
    first = idle()
    add_history(bench, 50)
    assert idle() == first > 0


def test_events_that_go_after_their_run_are_seen_to_go(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    version = ["with the events of the deleted run"]
    mark = ["with the run"]
    monkeypatch.setattr(lineage, "records_mark", lambda *_: mark[0])
    monkeypatch.setattr(lineage, "records_version", lambda *_: version[0])
    monkeypatch.setattr(lineage, "read_catalogued", lambda *_: fetched.append(version[0]) or nothing)
    nothing = lineage.Catalogued({}, {}, {}, {}, {}, {}, {})
    for _ in range(3):
        read_catalogued_again(NAMES, bench.instance)
    mark[0] = "without the deleted run"
    read_catalogued_again(NAMES, bench.instance)
    version[0] = "without them"
    for _ in range(3):
        read_catalogued_again(NAMES, bench.instance)
    assert fetched == ["with the events of the deleted run", "without them"]
