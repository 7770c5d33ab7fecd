"""Partitions removed from the source: reported, and deleted only if that is set and the listing can
be trusted."""

from __future__ import annotations

import shutil

import dagster as dg
import pytest

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.orchestration.records import failed_on_record
from tests.dagster.conftest import NAMES, Workbench, data_version, numbered_keys, stale_status
from tests.small_catalogs import partition_folder


def remove(bench: Workbench, *keys: str) -> None:
    for key in keys:
        shutil.rmtree(partition_folder(bench.catalog, key))


def registered(bench: Workbench) -> list[str]:
    return list(bench.instance.get_dynamic_partitions(NAMES.partitions_name))


def history(bench: Workbench, key: str) -> list[str]:
    """Source versions that were reported of a partition, the last one first."""
    return list(map(data_version, events_of(bench, key, NAMES.source_partitions)))


def events_of(
    bench: Workbench, key: str, asset: dg.AssetKey = NAMES.embeddings
) -> list[dg.AssetMaterialization]:
    """Materializations of a partition of an asset, the last one first."""
    seen = dg.AssetRecordsFilter(asset, asset_partitions=[key])
    records = bench.instance.fetch_materializations(seen, limit=10).records
    return [record.asset_materialization for record in records if record.asset_materialization]


def catalog_of(bench: Workbench, *keys: str) -> None:
    bench.fill(keys)
    assert bench.refresh().success


def test_removed_partition_is_reported_once_and_stays(bench: Workbench) -> None:
    catalog_of(bench, *"abc")
    remove(bench, "b")

    for _ in range(2):
        assert bench.nightly().success
        assert history(bench, "b") == ["removed", "v1"]

    assert registered(bench) == ["a", "b", "c"]
    assert bench.file("b").exists()

    quiet = bench.tick()
    assert quiet.skip_message == "3 partitions: 2 up to date, 1 removed from the source"
    assert not quiet.run_requests


def test_removed_partition_that_returns_is_reported_again(bench: Workbench) -> None:
    catalog_of(bench, *"ab")
    remove(bench, "b")

    assert bench.nightly().success

    bench.write("b")

    bench.tick()

    assert history(bench, "b") == ["v1", "removed", "v1"]


def test_file_of_a_partition_that_dagster_does_not_have_is_deleted(bench: Workbench) -> None:
    catalog_of(bench, *"ab")
    file = bench.file("b")
    remove(bench, "b")

    bench.instance.delete_dynamic_partition(NAMES.partitions_name, "b")

    assert bench.refresh(removed_partitions="delete").success
    assert registered(bench) == ["a"]
    assert not file.exists()


def test_removed_partition_is_deleted_with_its_file_if_that_is_set(bench: Workbench) -> None:
    bench.settings["removed_partitions"] = "delete"
    catalog_of(bench, *"abc")
    file = bench.file("b")
    remove(bench, "b")

    assert bench.nightly().success

    assert registered(bench) == ["a", "c"]
    assert not file.exists()
    assert history(bench, "b") == ["removed", "v1"]


def test_a_run_that_no_schedule_requested_leaves_removed_partitions_alone(bench: Workbench) -> None:
    bench.settings["removed_partitions"] = "delete"
    catalog_of(bench, *"ab")
    remove(bench, "b")

    assert bench.refresh().success
    assert registered(bench) == ["a", "b"]
    assert history(bench, "b") == ["v1"]


def test_more_than_a_tenth_of_the_catalog_is_not_deleted(bench: Workbench) -> None:
    bench.settings["removed_partitions"] = "delete"
    keys = numbered_keys(20)
    catalog_of(bench, *keys)
    remove(bench, *keys[:3])
    bench.write("new")

    ran = bench.nightly()

    assert not ran.success
    assert "new" in ran.materialized(), "everything else is embedded"

    refusal = "3 of 21 partitions were removed from the source, such as 'p00'. Nothing was deleted"
    assert refusal in ran.failure()
    assert set(registered(bench)) == {*keys, "new"}
    assert bench.file("p00").exists()
    assert history(bench, "p00")[0] == "removed"


def test_file_is_deleted_after_its_deletion_is_logged(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog_of(bench, *"ab")
    file = bench.file("b")
    remove(bench, "b")

    def refuse(*_: object) -> None:
        raise TransientError("the disk does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", refuse)
        ran = bench.refresh(removed_partitions="delete")

    assert not ran.success
    assert f"{file} and its key are deleted" in "\n".join(ran.logged())
    assert registered(bench) == ["a", "b"]
    assert bench.refresh(removed_partitions="delete").success
    assert not file.exists()
    assert registered(bench) == ["a"]


def test_partition_removed_while_its_run_waits_is_no_failure(bench: Workbench) -> None:
    bench.fill("abc")
    found = bench.tick()
    remove(bench, "b")

    [ran] = bench.launch(found)

    assert ran.success
    assert set(ran.materialized()) == {"a", "c"}
    assert ran.metrics()["partitions_removed"] == 1
    assert "'b'" in "\n".join(ran.logged()), "the log names it"
    assert failed_on_record(NAMES.embeddings, bench.instance) == set()


@pytest.mark.parametrize("model", ["hash://16", "hash://24"])
def test_backfill_leaves_a_removed_partition_as_it_is(bench: Workbench, model: str) -> None:
    """Dagster fails a backfill if a partition has no event in it."""
    catalog_of(bench, *"abc")
    [before] = events_of(bench, "b")
    remove(bench, "b")

    assert bench.nightly().success

    bench.settings["model"] = model

    ran = bench.embed("a", "c", backfill="x")

    assert ran.success
    assert set(ran.materialized()) == {"a", "b", "c"}
    assert ran.metrics()["partitions_removed"] == 1

    repeated, _ = events_of(bench, "b")
    assert repeated.tags == before.tags
    assert repeated.metadata == before.metadata
    assert stale_status(bench, "a") == "FRESH"
    assert stale_status(bench, "b") == "STALE"
    assert history(bench, "b") == ["removed", "v1"]
    assert failed_on_record(NAMES.embeddings, bench.instance) == set()
