"""A sensor that reads records only when there may be new ones sees every change of them at its next tick."""

from __future__ import annotations

import dagster as dg
import pytest

from surge_dagster.orchestration import records
from surge_dagster.orchestration.records import read_catalogued_again
from tests.dagster.conftest import NAMES, Workbench

_KEYS = ["a", "b"]


def embedded(bench: Workbench) -> str:
    """Two partitions, embedded and on record; gives the id of their run."""
    for key in _KEYS:
        bench.write(key)
    ran = bench.refresh()
    assert set(read_catalogued_again(NAMES, bench.instance).embedded) == set(_KEYS)
    return ran.run_id


def test_new_events_and_deleted_runs_are_seen_immediately(bench: Workbench) -> None:
    run_id = embedded(bench)
    bench.instance.delete_run(run_id)
    assert read_catalogued_again(NAMES, bench.instance).embedded == {}
    version = {"dagster/data_version": "another"}
    bench.instance.report_runless_asset_event(dg.AssetObservation(NAMES.source_partitions, partition="a", tags=version))
    assert read_catalogued_again(NAMES, bench.instance).observed["a"] == "another"
    bench.instance.report_runless_asset_event(dg.AssetMaterialization(NAMES.embeddings, partition="b", tags=version))
    assert read_catalogued_again(NAMES, bench.instance).embedded == {"b": "another"}
    bench.instance.report_runless_asset_event(dg.AssetObservation(NAMES.embeddings, partition="b", tags=version))
    assert read_catalogued_again(NAMES, bench.instance).refused == {"b": "another"}
    bench.instance.wipe_assets([NAMES.embeddings])
    assert read_catalogued_again(NAMES, bench.instance).embedded == {}


def test_added_and_deleted_partitions_are_seen_immediately(bench: Workbench) -> None:
    embedded(bench)
    name, instance = NAMES.partitions_name, bench.instance
    for order in (["b", "a"], ["b", "a", "x"], ["b", "a", "y"], []):
        for key in instance.get_dynamic_partitions(name):
            instance.delete_dynamic_partition(name, key)
        instance.add_dynamic_partitions(name, order)
        assert list(read_catalogued_again(NAMES, instance).registered) == order


def test_records_that_did_not_change_are_read_again_after_five_minutes(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded(bench)
    read: list[None] = []
    whole = records.read_catalogued
    monkeypatch.setattr(records, "read_catalogued", lambda *given: read.append(None) or whole(*given))
    first = read_catalogued_again(NAMES, bench.instance)
    assert read_catalogued_again(NAMES, bench.instance) == first and len(read) <= 1
    del read[:]
    monkeypatch.setattr(records, "_TRUSTED_SECONDS", -1)
    assert read_catalogued_again(NAMES, bench.instance) == first and len(read) == 1


def test_records_of_an_instance_without_a_folder_are_read_each_time() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        assert read_catalogued_again(NAMES, instance).registered == {}
        tags = {"dagster/data_version": "v"}
        event = dg.AssetObservation(NAMES.source_partitions, partition="a", tags=tags)
        instance.report_runless_asset_event(event)
        assert read_catalogued_again(NAMES, instance).observed == {"a": "v"}
