"""What the sensor asks for, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.sources.parquet import ParquetCatalog
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import open_store
from surge_dagster.orchestration import runless_events
from surge_dagster.orchestration.active_runs import _PROCESS_TAG, _process, process_tags
from surge_dagster.orchestration.expected_settings import require_columns, require_encoding, with_settings
from surge_dagster.resources import CatalogSource, Encoder
from surge_dagster.settings import load_settings
from tests.dagster.conftest import NAMES, Workbench, requested
from tests.small_catalogs import partition_folder


def test_new_partitions_are_registered_observed_and_embedded_in_one_run(bench: Workbench) -> None:
    for key in ("a", "b", 'x "1"'):
        bench.write(key)
    found = bench.tick()
    assert requested(found) == [["a", "b", "x %221%22"]]
    assert bench.instance.get_dynamic_partitions("catalog") == ["a", "b", "x %221%22"]
    [request] = found.run_requests or []
    assert request.tags["dagster/asset_partition_range_start"] == "a"
    assert request.tags["dagster/asset_partition_range_end"] == "x %221%22"
    [ran] = bench.launch(found)
    assert ran.success and set(ran.materialized()) == {"a", "b", "x %221%22"}
    assert ran.observed() == {}, "the sensor had observed them"
    quiet = bench.tick()
    assert not quiet.run_requests and not quiet.asset_events and not quiet.dynamic_partitions_requests
    assert "3 partitions: 0 to be embedded" in (quiet.skip_message or "")


def test_a_folder_name_that_is_not_utf8_has_a_key_and_hides_no_other(bench: Workbench) -> None:
    bench.write("a")
    bench.write("z")
    bench.write("k")
    partition_folder(bench.catalog, "k").rename(bench.catalog / os.fsdecode(b"partition=caf\xe9"))
    assert requested(bench.tick()) == [["a", "caf%25E9", "z"]]
    assert bench.instance.get_dynamic_partitions("catalog") == ["a", "caf%25E9", "z"]


def test_looking_changes_nothing(bench: Workbench) -> None:
    bench.write("a")
    assert requested(bench.look()) == [["a"]] == requested(bench.look())
    assert bench.instance.get_dynamic_partitions("catalog") == []


def test_the_same_state_is_asked_for_once(bench: Workbench) -> None:
    bench.write("a")
    assert requested(bench.tick()) == [["a"]]
    assert requested(bench.tick()) == [], "asked for before, though no run has begun"
    bench.write("a", 4, version="v2")
    bench.write("b")
    assert requested(bench.tick()) == [["b"]], "the first run may still be made, and reads what is there then"
    assert requested(bench.later(minutes=1)) == [["a", "b"]]


def test_a_cursor_that_is_not_one_counts_as_none(bench: Workbench) -> None:
    bench.write("a")
    bench.cursor = "edited by hand"
    assert requested(bench.tick()) == [["a"]]


def test_a_file_that_is_lost_after_it_was_made_is_asked_for_again(bench: Workbench) -> None:
    bench.write("a")
    bench.launch(bench.tick())
    bench.tick()
    bench.file("a").unlink()
    assert requested(bench.tick()) == [["a"]]


def test_keys_of_an_active_run_are_left_to_it(bench: Workbench) -> None:
    for key in "abcdef":
        bench.write(key)
    bench.instance.add_dynamic_partitions("catalog", list("abcdef"))
    tags = {"dagster/asset_partition_range_start": "b", "dagster/asset_partition_range_end": "d"}
    queued = bench.pretend_run("embed_partitions", dg.DagsterRunStatus.QUEUED, tags=tags)

    def naming(*keys: str) -> dict[str, Any]:
        return {"ops": {"embeddings": {"config": {"keys": list(keys)}}}}

    whole = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "f"}
    bench.pretend_run("embed_partitions", dg.DagsterRunStatus.CANCELING, tags=whole, run_config=naming("e"))
    assert requested(bench.look()) == [["a", "f"]]
    everything = bench.pretend_run("catalog_refresh", dg.DagsterRunStatus.STARTED)
    assert requested(bench.look()) == []
    bench.instance.report_run_canceled(everything)
    bench.instance.report_run_canceled(queued)
    assert requested(bench.look()) == [["a", "b", "c", "d", "f"]]
    bench.write("g, typed")
    bench.pretend_run("embed_partitions", dg.DagsterRunStatus.QUEUED, run_config=naming("g, typed", "f"))
    assert requested(bench.look()) == [["a", "b", "c", "d"]]


def test_a_run_whose_process_was_killed_holds_nothing_and_is_declared_failed(bench: Workbench) -> None:
    bench.write("a")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        tags = process_tags()
        assert tags[_PROCESS_TAG].partition("@")[0] == str(os.getpid())
        its_own = tags | {_PROCESS_TAG: _process(process.pid)}
        gone = bench.pretend_run("catalog_refresh", dg.DagsterRunStatus.STARTED, tags=its_own)
        process.kill()
    alive = bench.pretend_run("catalog_refresh", dg.DagsterRunStatus.STARTED, tags=tags)
    assert requested(bench.look()) == [], "the living one may touch everything"
    assert bench.instance.get_run_by_id(gone.run_id).status == dg.DagsterRunStatus.FAILURE  # pyright: ignore
    assert bench.instance.get_run_by_id(alive.run_id).status == dg.DagsterRunStatus.STARTED  # pyright: ignore


def test_runs_whose_process_is_gone_are_found_without_the_sensor_being_on(bench: Workbench) -> None:
    bench.write("a")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        tags = process_tags()
        gone = tags | {_PROCESS_TAG: _process(process.pid)}
        process.kill()

    def pretend(status: dg.DagsterRunStatus, tags: dict[str, str]) -> str:
        return bench.pretend_run("embed_partitions", status, tags=tags).run_id

    alive = pretend(dg.DagsterRunStatus.STARTED, tags)
    lost = pretend(dg.DagsterRunStatus.STARTED, gone)
    assert bench.refresh().success, "a run that begins looks"
    canceled = pretend(dg.DagsterRunStatus.CANCELING, gone)
    also_lost = pretend(dg.DagsterRunStatus.STARTED, gone)
    signed = next(name for name in process_tags(run_id="") if name not in tags)
    retry = pretend(dg.DagsterRunStatus.STARTED, gone | {signed: also_lost})  # with the tags of the run before it
    repository = bench.definitions.get_repository_def()
    sensor = repository.get_sensor_def(NAMES.lost_runs_sensor)
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
    with dg.build_sensor_context(bench.instance, repository_def=repository) as context:
        assert "2 runs are waiting or going on" in (sensor.evaluate_tick(context).skip_message or "")
    status = {run.run_id: run.status.value for run in bench.instance.get_runs()}
    assert [status[run] for run in (lost, canceled, also_lost)] == ["FAILURE", "CANCELED", "FAILURE"]
    assert [status[run] for run in (alive, retry)] == ["STARTED", "STARTED"]


@pytest.mark.parametrize("looks", ["the sensor for lost runs", "the one for new partitions"])
def test_the_pool_has_its_limit_before_the_first_run_waits_for_it(bench: Workbench, looks: str) -> None:
    """Dagster would let all go that wait when it first looks at its queue."""
    bench.write("a")
    storage = bench.instance.event_log_storage
    assert storage.get_pool_limits() == []
    if looks == "the one for new partitions":
        bench.tick()
    else:
        repository = bench.definitions.get_repository_def()
        with dg.build_sensor_context(bench.instance, repository_def=repository) as context:
            repository.get_sensor_def(NAMES.lost_runs_sensor).evaluate_tick(context)
    assert [(pool.name, pool.limit, pool.from_default) for pool in storage.get_pool_limits()] == [("gpu", 1, True)]


def test_a_tick_that_asks_for_runs_says_that_nothing_limits_how_many_encode_at_once(
    bench: Workbench, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an instance without the project's dagster.yaml."""
    monkeypatch.setattr(dg.DagsterInstance, "global_op_concurrency_default_limit", None)
    for expected in (0, 1):
        bench.tick()
        assert capfd.readouterr().err.count("no limit for the pool 'gpu'") == expected
        bench.write("a")


def test_a_run_gets_at_most_the_configured_number_of_partitions(bench: Workbench) -> None:
    bench.settings["max_partitions_per_run"] = 2
    for key in "abcde":
        bench.write(key)
    assert [requested(bench.tick()) for _ in range(4)] == [[["a", "b"]], [["c", "d"]], [["e"]], []]


def test_many_keys_travel_in_a_file(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surge_dagster.orchestration.launch._INLINE_KEYS", 3)
    for key in "abcd":
        bench.write(key)
    [request] = bench.tick().run_requests or []
    listed = Path(request.run_config["ops"]["embeddings"]["config"]["keys_file"])
    assert listed.is_relative_to(bench.instance.root_directory)
    bench.pretend_run("embed_partitions", dg.DagsterRunStatus.QUEUED, tags=request.tags, run_config=request.run_config)
    bench.cursor = None
    assert requested(bench.tick()) == [], "the queued run holds them"


def test_changed_partitions_are_observed_and_asked_for_only_when_told_to(bench: Workbench) -> None:
    for key in "ab":
        bench.write(key)
    bench.launch(bench.tick())
    bench.write("b", 4, version="v2")
    found = bench.tick()
    assert [(e.partition, versions(e)) for e in found.asset_events] == [("b", "v2")]
    assert requested(found) == []
    bench.settings["refresh_stale"] = True
    found = bench.tick()
    assert requested(found) == [["b"]] and not found.asset_events
    [ran] = bench.launch(found)
    assert set(ran.materialized()) == {"b"} and ran.figures()["texts_encoded"] == 4
    bench.write("b", 4, version="v3")
    [ran] = bench.launch(bench.tick())
    assert ran.figures()["texts_encoded"] == 0, "equal content"


@pytest.mark.parametrize("failed_in", ["a run of the sensor", "another run"])
def test_a_partition_that_failed_is_left_alone_until_its_source_changes(bench: Workbench, failed_in: str) -> None:
    bench.write("bad", [("x", None)])
    if failed_in == "another run":
        assert not bench.refresh().success
        assert requested(bench.tick()) == []
    else:
        [ran] = bench.launch(bench.tick())
        assert not ran.success
    for _ in range(2):
        assert requested(bench.tick()) == []
    bench.cursor = None
    assert requested(bench.tick()) == [], "not even when the cursor is reset"
    bench.write("bad", [("x", "mended")], version="v2")
    [ran] = bench.launch(bench.tick()) or [None]
    assert ran and ran.success


def embed_without_dagster(bench: Workbench, pool: EncoderPool) -> None:
    settings = load_settings(source=str(bench.catalog), output=str(bench.output), model="hash://16")
    for _ in EmbeddingRun(settings.open_source(), settings.open_store(), pool):
        pass


def test_a_valid_file_that_dagster_does_not_know_is_adopted_without_a_run(
    bench: Workbench, hash_pool: EncoderPool
) -> None:
    bench.write("a", 5)
    bench.write("b", 5)
    embed_without_dagster(bench, hash_pool)
    first = bench.tick()
    assert requested(first) == [] and {type(event) for event in first.asset_events} == {dg.AssetObservation}
    second = bench.tick()
    adopted = {event.partition: event for event in second.asset_events}
    assert set(adopted) == {"a", "b"}
    event = adopted["a"]
    assert isinstance(event, dg.AssetMaterialization)
    assert event.metadata["rows"].value == 5 and event.metadata["action"].value == "adopted"
    assert (event.tags or {})["dagster/input_event_pointer/source_partitions"].isdigit()
    assert bench.instance.get_materialized_partitions(NAMES.embeddings) == {"a", "b"}
    third = bench.tick()
    assert not third.asset_events and not third.run_requests


def test_a_tick_reads_back_what_it_adopts_and_no_more_than_it_has_time_for(
    bench: Workbench, hash_pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, rows in (("a", 5), ("b", 5), ("c", 5), ("large", 500)):
        bench.write(key, rows)
    embed_without_dagster(bench, hash_pool)
    bench.tick()
    with bench.file("a").open("r+b") as file:
        file.seek(600)
        file.write(b"\xff\xff\xff\xff")
    size = bench.file("b").stat().st_size + 50
    monkeypatch.setattr("surge_dagster.orchestration.adoption._BYTES", 2 * size)
    monkeypatch.setattr("surge_dagster.orchestration.adoption._FILE_BYTES", size)
    first, second = bench.tick(), bench.tick()
    assert [event.partition for event in first.asset_events] == ["b"], "and a was read in the same tick"
    assert requested(first) == [["a"]]
    assert [event.partition for event in second.asset_events] == ["c"]
    assert "1 to be adopted by the next refresh, since their files are large" in (second.skip_message or "")
    assert bench.instance.get_materialized_partitions(NAMES.embeddings) == {"b", "c"}
    assert not bench.tick().asset_events


def test_a_partition_that_was_refused_is_not_adopted(bench: Workbench, hash_pool: EncoderPool) -> None:
    bench.write("b")
    embed_without_dagster(bench, hash_pool)
    bench.write("b", [("x", None)])  # under the version that its file was made from
    assert "the text is null" in bench.refresh().failure()
    found = bench.tick()
    assert requested(found) == [] and not found.asset_events
    assert bench.instance.get_materialized_partitions(NAMES.embeddings) == set()


def test_another_model_starts_nothing_by_itself(bench: Workbench) -> None:
    bench.write("a")
    bench.launch(bench.tick())
    bench.settings["model"] = "hash://24"
    bench.write("b")
    found = bench.tick()
    assert not found.run_requests and "launch catalog_refresh by hand" in (found.skip_message or "")
    assert "b" in bench.instance.get_dynamic_partitions("catalog"), "new partitions are registered all the same"
    assert bench.refresh().success  # the explicit launch
    bench.write("c")
    [ran] = bench.launch(bench.tick())
    assert ran.success and ran.materialized()["c"].metadata["dimension"].value == 24


def test_a_run_of_the_sensor_refuses_a_space_or_columns_that_were_not_meant(bench: Workbench) -> None:
    bench.write("a")
    bench.launch(bench.tick())
    bench.write("b")
    found = bench.tick()
    [space] = list_spaces(open_store(bench.output))
    assert (found.run_requests or [])[0].run_config["ops"]["embeddings"]["config"]["expected_space"] == space.name
    bench.settings["text_column"] = "id"  # edited between the tick and the run
    [ran] = bench.launch(found)
    assert not ran.success and not ran.materialized()
    assert all(
        part in ran.failure() for part in ('"text_column": "text"', '"text_column": "id"', "Nothing was encoded")
    )
    bench.settings |= {"text_column": "text", "model": "hash://24"}
    [ran] = bench.launch(found)
    assert not ran.success and "hash://16" in ran.failure()
    assert len(list_spaces(open_store(bench.output))) == 1


def test_a_first_space_is_begun_by_no_run_that_has_other_settings_than_were_asked_for(bench: Workbench) -> None:
    bench.write("a")
    [asked] = bench.tick().run_requests or []
    night = schedule_tick(bench)
    assert isinstance(night, dg.RunRequest)
    bench.settings["model"] = "hash://24"  # as a container has it that gets other variables than the code server
    for job, request in ((NAMES.embed_job, asked), (NAMES.refresh_job, night)):
        ran = bench.run(job, request.run_config, request.tags)
        assert not ran.success and all(
            part in ran.failure() for part in ("hash://16", "hash://24", "same SURGE_ variables")
        )
        assert list_spaces(open_store(bench.output)) == []
    bench.settings["model"] = "hash://16"
    assert bench.run(NAMES.embed_job, asked.run_config, asked.tags).success
    [space] = list_spaces(open_store(bench.output))
    assert space.requested.model == "hash://16"


def test_settings_are_the_same_wherever_the_folder_of_the_model_lies_and_however_long_they_are() -> None:
    def catalog(**settings: Any) -> CatalogSource:
        return CatalogSource(**settings)

    mine = catalog(url="/mnt/catalog", text_column="x" * 5000)
    encoder: dict[str, Any] = {"model": "/models/minilm", "prompt": "x" * 5000}
    [request] = with_settings([dg.RunRequest()], mine, Encoder(**encoder))
    asked = dict(request.tags)
    assert all(len(value) < 1000 for value in asked.values())
    require_columns(asked, catalog(url="/data/catalog", text_column="x" * 5000))
    require_encoding(asked, EncodingSpec(model="/mnt/e5", prompt="x" * 5000))
    others = catalog(url="/mnt/catalog", text_column="x" * 4999)
    other = EncodingSpec(model="/mnt/minilm", prompt="x" * 4999)
    for again in ({}, {"dagster/parent_run_id": "r", "dagster/retry_number": "1"}):
        with pytest.raises(ConfigError, match="the same SURGE_ variables"):
            require_columns(asked | again, others)
        with pytest.raises(ConfigError, match="the same SURGE_ variables"):
            require_encoding(asked | again, other)
    # "Re-execute", once a setting is mended; and a run that a person launched.
    for tags in (asked | {"dagster/parent_run_id": "r"}, {}):
        require_columns(tags, others)
        require_encoding(tags, other)


def test_without_a_catalog_the_tick_says_so(bench: Workbench) -> None:
    assert "no catalog at" in (bench.look().skip_message or "")


def versions(event: object) -> str:
    """The data version of an observation."""
    assert isinstance(event, dg.AssetObservation)
    return event.tags["dagster/data_version"]


def schedule_tick(bench: Workbench) -> dg.RunRequest | dg.SkipReason | None:
    schedule = bench.definitions.get_repository_def().get_schedule_def("nightly_refresh")
    with dg.build_schedule_context(bench.instance, resources=bench.definitions.resources) as context:
        found = schedule.evaluate_tick(context)
    return found.run_requests[0] if found.run_requests else dg.SkipReason(found.skip_message)


def test_the_night_embeds_what_is_missing_and_what_has_changed(bench: Workbench) -> None:
    for key in "abc":
        bench.write(key)
    bench.refresh()
    bench.write("b", 4, version="v2")
    bench.write("d")
    request = schedule_tick(bench)
    assert isinstance(request, dg.RunRequest)
    ran = bench.run("catalog_refresh", request.run_config)
    assert ran.success and set(ran.materialized()) == {"b", "d"}


def test_the_night_begins_no_second_space(bench: Workbench) -> None:
    bench.write("a")
    bench.refresh()
    bench.settings["model"] = "hash://24"
    skipped = schedule_tick(bench)
    assert isinstance(skipped, dg.SkipReason) and "by hand" in (skipped.skip_message or "")


def test_cron_and_timezone_come_from_the_settings(bench: Workbench) -> None:
    bench.settings |= {"nightly_cron": "30 4 * * 1", "timezone": "Europe/Berlin"}
    schedule = bench.definitions.get_repository_def().get_schedule_def("nightly_refresh")
    assert (schedule.cron_schedule, schedule.execution_timezone) == ("30 4 * * 1", "Europe/Berlin")


def test_settings_that_cannot_be_read_are_an_error_not_a_default(bench: Workbench) -> None:
    bench.settings["max_partitions_per_run"] = 0
    with pytest.raises(ConfigError, match="max_partitions_per_run"):
        _ = bench.definitions


def test_a_tick_of_the_daemon_stores_its_events_at_once_and_a_trial_shows_them(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["a", "c", "größe"]
    for key in keys:
        bench.write(key)
    reported: list[object] = []
    monkeypatch.setattr(dg.DagsterInstance, "report_runless_asset_event", lambda _, event: reported.append(event))

    trial = bench.look()
    assert {event.partition for event in trial.asset_events} == set(keys)
    assert [list(request.partition_keys) for request in trial.dynamic_partitions_requests or []] == [keys]
    assert bench.instance.get_dynamic_partitions(NAMES.partitions_name) == []

    found = bench.evaluate("17")
    assert not found.asset_events and not found.dynamic_partitions_requests
    assert requested(found) == requested(trial) == [keys]
    assert bench.instance.get_dynamic_partitions(NAMES.partitions_name) == keys
    records = bench.instance.fetch_observations(NAMES.source_partitions, limit=10).records
    assert {record.partition_key for record in records} == set(keys)
    assert reported == [] and not bench.evaluate("18").asset_events

    monkeypatch.setattr(runless_events, "row_writer", lambda *_: None)
    bench.write("d")
    assert [event.partition for event in bench.evaluate("19").asset_events] == ["d"], "left to the daemon"


def test_a_run_that_works_while_the_catalog_is_listed_is_not_told_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.settings["refresh_stale"] = True
    bench.write("a")
    assert bench.refresh().success
    bench.write("a", version="v2")
    listing, ran = ParquetCatalog.__iter__, []

    def listed_beside_a_run(catalog: ParquetCatalog) -> Iterator[Partition]:
        if not ran:
            ran.append(None)
            assert bench.refresh().success
        yield from listing(catalog)

    monkeypatch.setattr(ParquetCatalog, "__iter__", listed_beside_a_run)
    for found in (bench.tick(), bench.later(minutes=1)):
        assert ran and requested(found) == [] and found.asset_events == []
