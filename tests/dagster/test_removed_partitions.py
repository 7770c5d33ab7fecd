"""Partitions that leave the source: never forgotten silently, and never deleted because a listing was cut short."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.sensor_definition import SensorExecutionData

from surge_dagster.assets import embeddings
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.orchestration import refresh
from surge_dagster.orchestration.removed_partitions import Departures, Vanishing
from surge_dagster.orchestration.selection import failed_on_record
from surge_dagster.settings import load_settings
from tests.dagster.conftest import NAMES, Workbench, requested
from tests.small_catalogs import partition_folder


def remove(bench: Workbench, *keys: str) -> None:
    for key in keys:
        shutil.rmtree(partition_folder(bench.catalog, key))


def said(found: SensorExecutionData) -> list[tuple[str | None, str]]:
    """Partition and source version of each observation of a tick."""
    events = [event for event in found.asset_events if isinstance(event, dg.AssetObservation)]
    return [(event.partition, event.tags["dagster/data_version"]) for event in events]


def registered(bench: Workbench) -> list[str]:
    return list(bench.instance.get_dynamic_partitions(NAMES.partitions_name))


@pytest.mark.parametrize("policy", ["keep", "report"])
def test_the_key_stays_and_is_reported_once_where_that_is_wanted(bench: Workbench, policy: str) -> None:
    bench.settings["vanished"] = policy
    for key in "abc":
        bench.write(key)
    bench.tick()
    remove(bench, "b")
    looks = [bench.tick() for _ in range(5)]
    assert [said(look) for look in looks] == [[], [], [("b", "gone")] if policy == "report" else [], [], []]
    assert all("1 vanished from the source" in (look.skip_message or "") for look in looks)
    assert registered(bench) == ["a", "b", "c"]
    bench.write("b")
    back = bench.tick()
    assert said(back) == ([("b", "v1")] if policy == "report" else [])
    assert "vanished" not in (back.skip_message or "")


def test_one_that_is_back_at_the_third_look_was_never_gone(bench: Workbench) -> None:
    for key in "ab":
        bench.write(key)
    bench.tick()
    for _ in range(2):
        remove(bench, "b")
        assert [said(bench.tick()) for _ in range(2)] == [[], []]
        bench.write("b")
        assert said(bench.tick()) == []


@pytest.mark.parametrize("meanwhile", ["the sensor is off", "the source is down"])
@pytest.mark.parametrize("looks", [1, 4])
def test_a_time_in_which_nobody_looked_is_no_time_that_it_was_away(
    bench: Workbench, meanwhile: str, looks: int
) -> None:
    bench.settings["vanished"] = "delete"
    for key in "ab":
        bench.write(key)
    bench.tick()
    away = bench.root / "away"
    partition_folder(bench.catalog, "a").rename(away)
    for _ in range(looks):
        bench.later(seconds=31)
    away.rename(partition_folder(bench.catalog, "a"))
    if meanwhile == "the source is down":
        bench.catalog.rename(bench.root / "unmounted")
        assert all("no catalog" in (bench.later(days=1).skip_message or "") for _ in range(3))
        (bench.root / "unmounted").rename(bench.catalog)
    bench.now += timedelta(days=3)
    partition_folder(bench.catalog, "a").rename(away)
    again = [said(bench.later(seconds=31)) for _ in range(4)]
    assert again == ([[], [], [("a", "gone")], []] if looks == 1 else [[], [], [], []]), "the third look in a row"
    assert registered(bench) == ["a", "b"]


def test_output_and_key_are_deleted_after_the_grace_time_and_a_key_that_returns_works(bench: Workbench) -> None:
    bench.settings |= {"vanished": "delete", "vanished_grace_seconds": 1200}
    for key in "abc":
        bench.write(key)
    [ran] = bench.launch(bench.tick())
    assert ran.success
    file = bench.file("b")
    remove(bench, "b")
    bench.tick()
    bench.later(minutes=10)
    assert said(bench.later(minutes=9)) == [("b", "gone")]
    assert said(bench.tick()) == [] and file.exists()
    bench.now += timedelta(minutes=1)
    trial = bench.look()
    assert said(trial) == [("b", "deleted")] and file.exists(), "who tries the sensor out is told, and no more"
    deleted = bench.tick()
    assert said(deleted) == [("b", "deleted")] and not file.exists()
    [event] = deleted.asset_events
    assert isinstance(event, dg.AssetObservation) and str(file) in str(event.metadata["vanished"].value)
    assert "1 deleted" in (deleted.skip_message or "")
    assert registered(bench) == ["a", "c"]
    # A tick that is lost after its events were stored: the key is still there.
    bench.instance.add_dynamic_partitions(NAMES.partitions_name, ["b"])
    again = [bench.later(minutes=10) for _ in range(2)]
    assert registered(bench) == ["a", "c", "b"]
    again.append(bench.later(minutes=10))
    assert [said(tick) for tick in again] == [[], [], []] and registered(bench) == ["a", "c"]
    quiet = bench.later(days=2)
    assert not quiet.asset_events and "vanished" not in (quiet.skip_message or "")
    bench.write("b")
    back = bench.tick()
    assert requested(back) == [["b"]] and said(back) == [("b", "v1")]
    assert registered(bench) == ["a", "c", "b"], "the key has another place in Dagster's order now"
    [ran] = bench.launch(back)
    assert ran.success and set(ran.materialized()) == {"b"} and file.exists()


def test_a_long_key_whose_file_cannot_be_read_has_not_left(bench: Workbench) -> None:
    bench.settings |= {"vanished": "delete", "vanished_grace_seconds": 0}
    long = "x" * 300
    for key in ("a", long):
        bench.write(key)
    bench.tick()
    [file] = partition_folder(bench.catalog, long).iterdir()
    file.unlink()
    file.symlink_to(file.name)  # a disk that fails could not say less
    looks = [bench.later(minutes=1) for _ in range(4)]
    assert not any("vanished" in (look.skip_message or "") for look in looks)
    assert long in registered(bench)


def one_that_went(bench: Workbench) -> Path:
    """The file of "b", which was embedded beside "a" and has just left the source; it is to be deleted soon."""
    bench.settings |= {"vanished": "delete", "vanished_grace_seconds": 0}
    for key in "ab":
        bench.write(key)
    bench.launch(bench.tick())
    file = bench.file("b")
    remove(bench, "b")
    return file


def test_a_store_that_removes_nothing_holds_up_nothing_else(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    file = one_that_went(bench)
    for _ in range(2):
        bench.tick()
    bench.write("c")

    def refuse(self: LocalStore, name: str) -> None:
        raise TransientError("no right to remove")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", refuse)
        found = [bench.tick() for _ in range(2)]
    assert [key for tick in found for keys in requested(tick) for key in keys] == ["c"]
    assert file.exists() and "b" in registered(bench)
    bench.tick()
    assert not file.exists() and registered(bench) == ["a", "c"]


def test_one_that_comes_back_while_a_tick_goes_on_keeps_its_file(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = one_that_went(bench)
    plan = Vanishing.plan

    def planned(self: Vanishing, found: Departures, *args: Any) -> None:
        plan(self, found, *args)
        if found.delete:
            bench.write("b")

    monkeypatch.setattr(Vanishing, "plan", planned)
    found = [bench.tick() for _ in range(5)]
    assert ("b", "deleted") in [each for tick in found for each in said(tick)]
    assert file.exists() and registered(bench) == ["a", "b"]


def test_a_source_that_lists_far_less_deletes_nothing(bench: Workbench) -> None:
    bench.settings |= {"vanished": "delete", "vanished_grace_seconds": 0, "vanished_share": 0.5}
    for key in "abcd":
        bench.write(key)
    bench.tick()
    remove(bench, "a", "b", "c")
    found = bench.tick()
    for _ in range(5):
        found = bench.tick()
    assert "nothing is deleted, since more than vanished_share (0.5) of the catalog would be" in (
        found.skip_message or ""
    )
    assert registered(bench) == ["a", "b", "c", "d"]
    remove(bench, "d")
    assert "expected folders named partition=" in (bench.tick().skip_message or ""), "nothing is listed at all"
    assert registered(bench) == ["a", "b", "c", "d"]
    for key in "ad":
        bench.write(key)
    bench.tick()
    assert registered(bench) == ["a", "d"], "half of the catalog may go"


@pytest.mark.parametrize("asks", ["the sensor", "the night"])
def test_one_that_leaves_while_its_run_waits_fails_neither_the_run_nor_itself(bench: Workbench, asks: str) -> None:
    for key in "abc":
        bench.write(key)
    if asks == "the sensor":
        [request] = bench.tick().run_requests or []
        job, config = NAMES.embed_job, request.run_config
    else:
        job, config = NAMES.refresh_job, {"ops": {"refresh": {"config": {"unattended": True, "keys": ["a", "b", "c"]}}}}
    remove(bench, "b")
    ran = bench.run(job, config)
    assert ran.success and set(ran.materialized()) == {"a", "c"} and ran.figures()["partitions_gone"] == 1
    assert any("'b'" in entry.user_message for entry in bench.instance.all_logs(ran.run_id)), "it is told"
    assert failed_on_record(NAMES, bench.instance) == set()


def test_one_that_left_and_whose_file_the_store_does_not_give_is_no_more_passed_over_than_others(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in "ab":
        bench.write(key)
    [request] = bench.tick().run_requests or []
    remove(bench, "b")

    def silent(*_: object) -> None:
        raise TransientError("the store does not answer", "b")

    monkeypatch.setattr(refresh, "published", silent)
    monkeypatch.setattr(embeddings, "rest", lambda seconds: None)
    ran = bench.run(NAMES.embed_job, request.run_config)
    assert not ran.success and failed_on_record(NAMES, bench.instance) == {"b"}


def test_what_an_active_run_holds_is_not_deleted(bench: Workbench) -> None:
    bench.settings |= {"vanished": "delete", "vanished_grace_seconds": 0}
    for key in "ab":
        bench.write(key)
    bench.tick()
    remove(bench, "b")
    config = {"ops": {"embeddings": {"config": {"keys": ["b"]}}}}
    run = bench.pretend_run("embed_partitions", dg.DagsterRunStatus.STARTED, run_config=config)
    for _ in range(5):
        bench.later(minutes=1)
    assert registered(bench) == ["a", "b"]
    bench.instance.report_run_failed(run)
    bench.tick()
    assert registered(bench) == ["a"]


def test_a_file_is_deleted_after_it_is_on_record_that_it_is_and_a_store_that_refuses_is_asked_again(
    bench: Workbench, hash_pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.settings |= {"vanished": "delete", "vanished_grace_seconds": 0}
    for key in "ab":
        bench.write(key)
    settings = load_settings(source=str(bench.catalog), output=str(bench.output), model="hash://16")
    assert len(list(EmbeddingRun(settings.open_source(), settings.open_store(), hash_pool))) == 2
    bench.tick()
    file = bench.file("b")
    remove(bench, "b")
    for _ in range(3):
        bench.tick()

    def on_record() -> list[str]:
        """Source versions of b, the last one first."""
        seen = dg.AssetRecordsFilter(NAMES.source_partitions, asset_partitions=["b"])
        found = [record.asset_observation for record in bench.instance.fetch_observations(seen, limit=10).records]
        return [event.tags["dagster/data_version"] for event in found if event]

    def refuse(*_: object) -> None:
        assert on_record() == ["deleted", "gone", "v1"]
        raise TransientError("the disk does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", refuse)
        assert "does not answer" in (bench.evaluate("17").skip_message or "")
    assert file.exists() and registered(bench) == ["a", "b"]
    bench.tick()
    assert not file.exists() and registered(bench) == ["a"] and on_record() == ["deleted", "gone", "v1"]
