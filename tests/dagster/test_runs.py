"""What a run does and what Dagster knows afterwards."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest import mock

import dagster as dg
import pytest
from dagster._core.definitions.data_version import StaleStatus

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.run.meters import InFlight
from surge_dagster.engine.run.report import Action, Failure, Receipt, RunReport
from surge_dagster.engine.run.staging import STAGING
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import open_store
from surge_dagster.orchestration.launch import Unattended
from surge_dagster.orchestration.progress import Progress
from surge_dagster.resources import EncoderResource
from tests.dagster.conftest import NAMES, Workbench, stale_status
from tests.small_catalogs import assert_embedded, numbered_rows


def test_launch_without_keys_embeds_everything_even_unregistered_partitions(
    bench: Workbench,
) -> None:
    bench.fill(("a", "b", 'Köln, "x" [1]'), 5)
    ran = bench.refresh()
    assert ran.success
    assert set(ran.materialized()) == {"a", "b", "Köln%2C %22x%22 %5B1%5D"}
    assert ran.sources() == dict.fromkeys(ran.materialized(), "v1")
    assert set(bench.instance.get_dynamic_partitions("catalog")) == set(ran.materialized())
    assert_embedded(bench.output, bench.space, "b", numbered_rows("b", 5))


def test_superbatches_and_run_report_their_metrics(bench: Workbench) -> None:
    bench.write("a", 5)
    bench.write("b", 7)
    ran = bench.refresh()
    [batch] = ran.superbatches()
    assert (batch["texts"], batch["partitions"], batch["space"]) == (12, 2, bench.space)
    measured = {
        "tokens",
        "encode_seconds",
        "serialize_seconds",
        "upload_seconds",
        "fill_ratio",
        "overlap_ratio",
    }
    assert measured <= batch.keys()
    metrics = ran.metrics()
    assert (metrics["partitions_written"], metrics["texts_encoded"], metrics["superbatches"]) == (
        2,
        12,
        1,
    )
    assert {each["space_title"] for each in (batch, metrics)} == {"hash-16, 16 float32"}
    assert metrics["device"] == "cpu" and "CPU core" in metrics["hardware"]
    assert not metrics["partitions_failed"] and metrics["max_in_flight_texts"] == 12
    assert ran.checks()[NAMES.run_check.name].passed


def test_run_with_a_price_reports_its_cost_in_its_check(bench: Workbench) -> None:
    bench.fill("ab")
    bench.settings["price_per_hour"] = 0.36

    encoded = bench.refresh().metrics()
    fresh = bench.refresh().metrics()

    assert encoded["cost"] == pytest.approx(0.36 * encoded["run_seconds"] / 3600, rel=1e-2)
    assert encoded["cost_per_million_texts"] > encoded["cost"] > 0
    assert fresh["cost"] > 0
    assert "cost_per_million_texts" not in fresh


def test_fresh_partitions_are_shown_as_fresh_when_the_settings_go_back_to_an_older_space(
    bench: Workbench,
) -> None:
    bench.fill("ab")
    bench.refresh()
    bench.settings["model"] = "hash://24"
    assert set(bench.refresh().materialized()) == {"a", "b"}
    assert {stale_status(bench, key) for key in "ab"} == {StaleStatus.FRESH}
    del bench.settings["model"]
    assert [
        event.metadata["action"].value for event in bench.refresh().materialized().values()
    ] == ["adopted"] * 2
    assert {stale_status(bench, key) for key in "ab"} == {StaleStatus.FRESH}


def test_a_second_launch_succeeds_without_encoding_or_repeating_anything(bench: Workbench) -> None:
    bench.write("a")
    bench.refresh()
    [space] = bench.output.glob("hash-*")
    (space / ".tmp-1-0123456789ab0").write_bytes(b"left by a dead run")
    again = bench.refresh()
    assert not list(space.glob(".tmp-*"))
    assert again.success and again.checks()[NAMES.run_check.name].passed
    assert again.materialized() == {} and again.superbatches() == [] and again.sources() == {}
    assert again.metrics()["space_title"] == "hash-16, 16 float32"
    assert (again.metrics()["partitions_skipped"], again.metrics()["pool_start_seconds"]) == (
        1,
        0.0,
    )


def test_run_says_in_one_line_what_it_did_with_each_partition(bench: Workbench) -> None:
    bench.fill(("a", "bad", "fresh", "equal"), 5)
    bench.refresh()
    bench.write("a", 7, version="v2")
    bench.write("equal", 5, version="v2")
    bench.write("bad", [("1", ""), ("1", "twice")], version="v2")
    ran = bench.refresh()
    done = r"4 partitions: 1 encoded \(2 texts, 5 others kept their vectors\), 1 up to date, 1 republished"
    expected = done + r", 1 failed \(bad\), [\d.]+ s"
    [line] = [line for line in ran.logged() if re.fullmatch(expected, line)]
    assert ran.checks()[NAMES.run_check.name].description == line
    selected = bench.refresh(select="missing")
    assert "3 up to date, 1 left out by select, 0 failed" in (
        selected.checks()[NAMES.run_check.name].description or ""
    )


def test_run_without_work_reports_no_number_that_dagster_would_plot_as_zero(
    bench: Workbench,
) -> None:
    bench.write("a")
    bench.refresh()
    ran = bench.refresh()
    for name, check in ran.checks().items():
        numbers = {
            label: value.value
            for label, value in check.metadata.items()
            if isinstance(value.value, int | float)
        }
        assert all(numbers.values()), name
    assert "1 partition: 0 encoded, 1 up to date, 0 failed" in (
        ran.checks()[NAMES.run_check.name].description or ""
    )


def test_line_of_progress_has_the_share_done_and_the_time_left_also_within_a_superbatch() -> None:
    def receipt(key: str, action: Action) -> Receipt:
        return Receipt(key, action, "", 100, 16, 0, "", 0, "", "", "", "")

    clock = iter([0.0, 8.0, 10.0, 20.0, 20.0, 31.0])
    todo = [Partition(key, "v", lambda: iter(()), lambda: "v", rows=100) for key in "abcd"]
    in_flight, run = (
        InFlight(),
        mock.Mock(in_flight=None, preparing="the encoder is starting", report=RunReport()),
    )
    progress = Progress(todo, run, lambda: next(clock))
    assert progress.line() == "Progress: 0 of 4 partitions in 8 s; the encoder is starting"
    run.preparing, run.report.costs = "2 machines at work", Costs(texts_encoded=80)
    assert (
        progress.line()
        == "Progress: 0 of 4 partitions, 80 of 400 texts, 8 texts/s, about 40 s left; 2 machines at work"
    )
    run.in_flight = in_flight
    in_flight.add(150)
    assert progress.line() == "Progress: 0 of 4 partitions, 0 of 400 texts; 150 in flight"
    in_flight.encoded = 50
    assert (
        progress.line()
        == "Progress: 0 of 4 partitions, 50 of 400 texts, 2 texts/s, about 2 min left; 150 in flight"
    )
    in_flight.encoded = 150
    in_flight.remove(150)
    for event in (receipt("a", "encoded"), receipt("b", "republished"), Failure("d", "bad")):
        progress.count(event)
    assert (
        progress.line()
        == "Progress: 3 of 4 partitions, 350 of 400 texts, 11 texts/s, about 4 s left; 0 in flight"
    )


@pytest.mark.usefixtures("gated")
def test_progress_is_logged_while_the_first_superbatch_is_being_encoded(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, line = bench.root / "gate", Progress.line

    def line_that_opens_the_gate(progress: Progress) -> str:
        if gate.with_suffix(".reached").exists():
            gate.touch()
        return line(progress)

    monkeypatch.setattr(Progress, "line", line_that_opens_the_gate)
    monkeypatch.setattr("surge_dagster.orchestration.refresh.LINE_SECONDS", 0.1)
    bench.write("a", [("0", f"wait for {gate}"), ("1", "x")])
    ran = bench.refresh()
    assert ran.success and "Progress: 0 of 1 partition, 0 of 2 texts; 2 in flight" in ran.logged()


def test_a_replaced_partition_is_the_only_one_encoded_and_fresh_again_afterwards(
    bench: Workbench,
) -> None:
    bench.fill("abc")
    first = bench.refresh()
    bench.write("b", 4, version="v2")
    second = bench.refresh()
    assert set(second.materialized()) == {"b"} and second.metrics()["texts_encoded"] == 1
    assert second.sources() == {"b": "v2"}
    before, after = (ran.materialized()["b"].tags or {} for ran in (first, second))
    assert before["dagster/data_version"] != after["dagster/data_version"]
    assert {stale_status(bench, key) for key in "abc"} == {StaleStatus.FRESH}


def test_a_partition_rewritten_with_equal_content_is_not_encoded_and_keeps_its_data_version(
    bench: Workbench,
) -> None:
    bench.write("a")
    first = bench.refresh()
    bench.write("a", version="v2")
    second = bench.refresh()
    assert (
        second.metrics()["texts_encoded"] == 0 and second.metrics()["partitions_republished"] == 1
    )
    event = second.materialized()["a"]
    assert event.metadata["action"].value == "republished"
    assert (event.tags or {})["dagster/data_version"] == (first.materialized()["a"].tags or {})[
        "dagster/data_version"
    ]
    assert stale_status(bench, "a") == StaleStatus.FRESH


def test_a_range_embeds_its_partitions_and_named_keys_nothing_else_in_it(bench: Workbench) -> None:
    bench.fill("abcde")
    bench.instance.add_dynamic_partitions("catalog", list("abcde"))
    assert set(bench.embed("b", "d", keys=["c"]).materialized()) == {"c"}
    assert set(bench.embed("b", "d").materialized()) == {"b", "d"}


def test_in_a_backfill_fresh_partitions_say_that_they_were_reused(bench: Workbench) -> None:
    bench.fill("abc")
    first = bench.refresh()
    bench.write("b", 9, version="v2")
    ran = bench.embed("a", "c", backfill="x")
    assert ran.success
    events = ran.materialized()
    assert set(events) == {"a", "b", "c"}
    assert {key for key, event in events.items() if "reused" in event.metadata} == {"a", "c"}
    version = "dagster/data_version"
    assert (events["a"].tags or {})[version] == (first.materialized()["a"].tags or {})[version]
    assert (ran.metrics()["texts_encoded"], ran.metrics()["rows_reused"]) == (6, 3)


def test_a_partition_without_rows_is_embedded(bench: Workbench) -> None:
    bench.write("empty", 0)
    ran = bench.refresh()
    assert ran.success and ran.materialized()["empty"].metadata["rows"].value == 0


def test_an_unattended_run_begins_no_second_space_and_no_other_than_expected(
    bench: Workbench,
) -> None:
    bench.write("a")
    bench.refresh(unattended=Unattended())  # the first space of an empty output
    bench.write("b")
    bench.settings["model"] = "hash://24"
    refused = bench.refresh(unattended=Unattended())
    assert not refused.success and "launch catalog_refresh by hand" in refused.failure()
    assert not refused.will_retry
    expected = bench.space
    bench.refresh()  # by hand
    refused = bench.refresh(unattended=Unattended(expected_space=expected))
    assert (
        not refused.success and f"launched for the space {expected} (model is" in refused.failure()
    )
    assert not refused.will_retry


def test_a_model_whose_content_changed_behind_its_name_is_another_space(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write("a")
    bench.refresh()
    bench.write("b")

    def start(encoder: EncoderResource, *_: object) -> EncoderPool:
        pool = EncoderPool(EncodingSpec(model="hash://24"))
        pool.space = replace(pool.space, requested=encoder.encoding_spec())
        return pool

    monkeypatch.setattr(EncoderResource, "encoder_pool", start)
    [space] = list_spaces(open_store(bench.output))
    refused = bench.refresh(unattended=Unattended())
    assert not refused.success and "the model's content has changed. Nothing" in refused.failure()
    assert "Launch catalog_refresh by hand to begin" in refused.failure()
    assert list_spaces(open_store(bench.output)) == [space]
    ran = bench.refresh()
    assert ran.success and set(ran.materialized()) == {"a", "b"}
    assert [event.metadata["dimension"].value for event in ran.materialized().values()] == [24, 24]
    bench.write("c")
    nightly = bench.refresh(unattended=Unattended())
    assert nightly.success and nightly.materialized()["c"].metadata["dimension"].value == 24, (
        "it uses the new space"
    )


@pytest.mark.parametrize("sensor", ["", NAMES.sensor])
def test_last_line_of_a_terminated_run_says_what_is_published_and_who_embeds_the_rest(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, sensor: str
) -> None:
    bench.settings |= {"b_min": 3, "b_max": 3}
    bench.fill("abcd")

    def interrupt(progress: Progress, event: object) -> None:
        if isinstance(event, Receipt):
            raise dg.DagsterExecutionInterruptedError

    monkeypatch.setattr(Progress, "count", interrupt)
    tags = {"dagster/sensor_name": sensor} if sensor else {}
    ran = bench.embed_keys(tags, keys=["a", "b", "c", "d"])
    published = len(list(bench.output.glob("*/*.parquet")))
    line = ran.logged()[-1]
    assert not ran.success and line.startswith(f"Terminated. 4 partitions: {published} encoded (")
    assert f"{4 - published} not reached" in line or published == 4
    then = "leaves it alone until its source changes" if sensor else "requests what is missing"
    assert (
        "Launch catalog_refresh for the rest" in line
        and f"the sensor new_partitions {then}" in line
    )


@pytest.mark.parametrize("what", ["catalog", "model", "output"])
def test_wrong_setting_ends_a_run_without_retries_and_with_a_remedy(
    bench: Workbench, what: str
) -> None:
    bench.write("a")
    if what == "catalog":
        (bench.root / "catalog").rename(bench.root / "elsewhere")
    elif what == "model":
        bench.settings["model"] = str(bench.root / "no-such-model")
    else:
        bench.output.write_text("a file")
    ran = bench.refresh()
    assert not ran.success and not ran.will_retry
    assert {"catalog": "no catalog at", "model": "no-such-model", "output": "is a file"}[
        what
    ] in ran.failure()
    assert "Traceback" not in ran.failure()
    line = str(ran.checks()[NAMES.run_check.name].description)
    assert line.startswith(
        "1 partition: 0 encoded" if what == "model" else "failed before it began: "
    ), line


def test_definitions_load_without_catalog_output_or_model(bench: Workbench) -> None:
    bench.settings["model"] = "nobody/nothing"
    repository = bench.definitions.get_repository_def()
    repository.load_all_definitions()
    assert {job.name for job in repository.get_all_jobs()} >= {
        "catalog_refresh",
        "catalog_check",
        "embed_partitions",
    }
    assert not bench.catalog.exists() and not bench.output.exists()


def test_run_that_finds_everything_fresh_removes_staged_segments(bench: Workbench) -> None:
    bench.write("a", 5)
    assert bench.refresh().success
    segment = bench.output / STAGING / bench.space / "a" / "v" / "0-2.parquet"
    segment.parent.mkdir(parents=True)
    segment.touch()
    assert bench.refresh().success
    assert not segment.exists()
