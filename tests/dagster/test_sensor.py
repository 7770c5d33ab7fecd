"""Tests of the sensor: which partitions it requests, with which config."""

from __future__ import annotations

from typing import Any
from unittest import mock

import dagster as dg
import pytest

from surge_dagster.config.settings import load_settings
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError, StoreUnavailable
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.orchestration.launch import config_of
from tests.dagster.conftest import NAMES, Workbench, range_tags, requested


def test_new_partitions_are_registered_reported_and_embedded_in_one_run(bench: Workbench) -> None:
    bench.fill(("a", "b", 'x "1"'))

    found = bench.tick()

    assert requested(found) == [["a", "b", "x %221%22"]]
    assert bench.instance.get_dynamic_partitions("catalog") == ["a", "b", "x %221%22"]
    assert set(bench.sources()) == {"a", "b", "x %221%22"}

    [ran] = bench.launch(found)
    assert ran.success
    assert set(ran.materialized()) == {"a", "b", "x %221%22"}
    assert ran.sources() == {}, "the sensor had reported them"

    quiet = bench.tick()
    assert not quiet.run_requests
    assert quiet.skip_message == "3 partitions: 3 up to date"


def test_message_of_a_tick_counts_each_partition_once(bench: Workbench) -> None:
    bench.fill(("fresh", "stale", "bad", "late"))
    bench.refresh()
    bench.write("stale", 4, version="v2")
    bench.write("bad", [("x", None)], version="v2")

    assert not bench.embed_keys(keys=["bad"]).success

    bench.file("late").unlink()
    bench.pretend(bench.tick(), dg.DagsterRunStatus.FAILURE)

    found = bench.tick()

    total, _, states = found.skip_message.partition(": 1 ")
    assert total == "4 partitions"
    assert {state.partition(" until")[0] for state in states.split(", 1 ")} == {
        "up to date",
        "stale",
        "refused",
        "waiting after a failure",
    }


NAMED = config_of(NAMES.embeddings_op, {"keys": ["b", "c%2C d"]})


@pytest.mark.parametrize(
    ("job", "how", "free"),
    [
        ("embed_partitions", {"run_config": NAMED}, ["a"]),
        ("embed_partitions", {"tags": {"dagster/partition": "b"}}, ["a", "c%2C d"]),
        ("embed_partitions", {"tags": range_tags("a", "b")}, ["c%2C d"]),
        ("catalog_refresh", {}, []),
    ],
    ids=["keys of the config", "partition of the UI", "range of the UI", "everything"],
)
def test_partitions_held_by_an_active_run_are_not_requested(
    bench: Workbench, job: str, how: dict[str, Any], free: list[str]
) -> None:
    bench.fill(("a", "b", "c, d"))
    bench.instance.add_dynamic_partitions("catalog", ["a", "b", "c%2C d"])

    run = bench.pretend_run(job, dg.DagsterRunStatus.QUEUED, **how)

    assert [key for keys in requested(bench.tick()) for key in keys] == free

    bench.instance.report_run_failed(run)
    assert requested(bench.tick()) == [["a", "b", "c%2C d"]]


def test_run_gets_a_limited_number_of_partitions(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surge_dagster.automation.embedding_runs._KEYS_PER_RUN", 2)
    bench.fill("abcde")
    for expected in (["a", "b"], ["c", "d"], ["e"]):
        found = bench.tick()
        assert requested(found) == [expected]
        bench.pretend(found, dg.DagsterRunStatus.QUEUED)

    assert requested(bench.tick()) == []


def test_tick_out_of_time_leaves_partitions_to_the_next_tick(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.fill("abc")
    with monkeypatch.context() as patch:
        patch.setattr("surge_dagster.orchestration.discovery._REPORT_SECONDS", -1)
        assert "3 to be registered by the next ticks" in bench.tick().skip_message

    assert requested(bench.tick()) == [["a", "b", "c"]]


@pytest.mark.parametrize(("refresh_stale", "expected"), [(False, []), (True, [["b"]])])
def test_changed_partition_is_reported_and_requested_if_that_is_set(
    bench: Workbench, refresh_stale: bool, expected: list[list[str]]
) -> None:
    bench.settings["refresh_stale"] = refresh_stale
    bench.fill("ab")
    bench.launch(bench.tick())
    bench.write("b", 4, version="v2")

    assert requested(bench.tick()) == expected
    assert bench.sources() == {"a": "v1", "b": "v2"}


def test_refused_partition_is_not_requested_until_its_source_changes(bench: Workbench) -> None:
    bench.write("bad", [("x", None)])

    [refused] = bench.launch(bench.tick())

    assert not refused.success
    assert requested(bench.tick()) == []
    assert requested(bench.later(days=1)) == []

    bench.write("bad", [("x", "fixed")], version="v2")

    [ran] = bench.launch(bench.tick())

    assert ran.success


def embed_without_dagster(bench: Workbench, pool: EncoderPool) -> None:
    settings = load_settings(source=str(bench.catalog), output=str(bench.output), model="hash://16")
    for _ in EmbeddingRun(settings.open_source(), settings.open_store(), pool):
        pass


def test_the_next_run_adopts_files_that_dagster_does_not_know(
    bench: Workbench, hash_pool: EncoderPool
) -> None:
    bench.fill("ab", 5)
    embed_without_dagster(bench, hash_pool)

    found = bench.tick()

    assert requested(found) == [["a", "b"]]

    [ran] = bench.launch(found)
    assert ran.success
    assert ran.metrics()["texts_encoded"] == 0
    assert bench.instance.get_materialized_partitions(NAMES.embeddings) == {"a", "b"}
    assert requested(bench.tick()) == []


@pytest.mark.parametrize(
    ("settings", "differing"),
    [
        ({"model": "hash://24"}, r"model is 'hash://24' and was 'hash://16'"),
        ({"document_prompt": "passage: "}, r"document_prompt is 'passage: ' and was unset"),
    ],
)
def test_another_space_is_not_begun_unattended(
    bench: Workbench, settings: dict[str, Any], differing: str
) -> None:
    bench.write("a")
    bench.launch(bench.tick())
    bench.settings |= settings
    bench.write("b")

    with pytest.raises(ConfigError, match=rf"\({differing}\).* launch catalog_refresh by hand"):
        bench.tick()

    assert "b" in bench.instance.get_dynamic_partitions("catalog"), "it is registered all the same"


def test_space_that_was_begun_by_hand_is_continued_by_the_sensor(bench: Workbench) -> None:
    bench.write("a")
    bench.launch(bench.tick())
    bench.settings["model"] = "hash://24"

    assert bench.refresh().success

    bench.write("b")

    [ran] = bench.launch(bench.tick())

    assert ran.success
    assert ran.materialized(NAMES.next_space)["b"].metadata["dimension"].value == 24


def test_tick_fails_when_source_or_store_does_not_answer(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no catalog at"):
        bench.tick()
    bench.write("a")
    down = mock.Mock(side_effect=StoreUnavailable("GET failed (503: SlowDown) after 3 attempts."))
    monkeypatch.setattr("surge_dagster.automation.embedding_runs.states_of_unfinished", down)

    with pytest.raises(StoreUnavailable, match="SlowDown"):
        bench.tick()
