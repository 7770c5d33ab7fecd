"""Refreshes that are divided among several runs: equal pieces, each partition in one of them, real
processes.

The tests with processes of their own take their seconds for starting them.
"""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from surge_dagster.engine.errors import ConfigError
from surge_dagster.orchestration import divided
from tests.dagster.conftest import NAMES, Workbench, requested


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two partitions of the catalogs here are worth a run of their own."""
    monkeypatch.setattr(divided, "LEAST_BYTES", 8_000)


def test_the_sensor_requests_pieces(bench: Workbench, small_pieces: None) -> None:
    bench.settings["max_runs"] = 3
    bench.fill("abcdef")

    assert requested(bench.tick()) == [["a", "b"], ["c", "d"], ["e", "f"]]


def test_requested_runs_have_the_tags_of_the_settings(bench: Workbench, small_pieces: None) -> None:
    bench.settings |= {"max_runs": 2, "run_tags": {"queue": "night", "dagster/priority": 7}}
    bench.fill("ab")
    for keys, count in (("ab", 1), ("cd", 2)):
        bench.fill(keys)
        for requests in (bench.tick().run_requests, bench.scheduled()):
            assert not isinstance(requests, str)
            assert [each.tags["queue"] for each in requests] == ["night"] * count
            assert [each.tags["dagster/priority"] for each in requests] == ["7"] * count


def test_new_space_begun_by_one_partition_is_then_divided(
    bench: Workbench, small_pieces: None
) -> None:
    bench.fill("abcde")
    named = {"ops": {"embeddings": {"config": {"keys": ["c"]}}}}

    assert bench.run("embed_partitions", named).success

    bench.settings |= {"max_runs": 2, "model": "hash://8"}
    with pytest.raises(ConfigError, match="launch catalog_refresh by hand once"):
        bench.tick()

    assert bench.run("embed_partitions", named).success

    found = bench.tick()
    assert requested(found) == [["a", "b"], ["d", "e"]] == nightly(bench)


def options_of(request: dg.RunRequest) -> dict[str, Any]:
    """The config of the op of a requested run of the whole catalog."""
    return request.run_config["ops"]["refresh"]["config"]


def named(request: dg.RunRequest) -> list[str] | None:
    """The partition keys that a requested run of the whole catalog names, None for all."""
    return options_of(request)["keys"]


def nightly(bench: Workbench) -> list[list[str] | None] | str:
    """The partition keys that each run of the nightly schedule names, None for all; or why it
    requests none."""
    requests = bench.scheduled()
    return requests if isinstance(requests, str) else list(map(named, requests))


def test_first_run_of_a_divided_refresh_reports_removed_partitions(
    bench: Workbench, small_pieces: None
) -> None:
    bench.settings["max_runs"] = 2

    assert nightly(bench) == [None], "without a catalog one run fails, which is alerted"

    bench.fill("abcd")

    requests = bench.scheduled()

    assert nightly(bench) == [["a", "b"], ["c", "d"]]
    assert not isinstance(requests, str)

    assert [options_of(each)["removed_partitions"] for each in requests] == ["report", "leave"]
    assert bench.refresh().success
    assert nightly(bench) == [None], "one run that finds nothing to do"

    bench.instance.wipe_assets([NAMES.embeddings])
    assert nightly(bench) == [["a", "b"], ["c", "d"]], "to be adopted"


@pytest.mark.parametrize("count", [1, 3])
def test_nightly_refresh_requests_no_partition_that_an_active_run_holds(
    bench: Workbench, small_pieces: None, count: int
) -> None:
    bench.settings["max_runs"] = 3
    bench.fill("abcdef")
    found = bench.tick()
    first = found.run_requests.pop(0)
    bench.settings["max_runs"] = count

    bench.pretend(found, dg.DagsterRunStatus.QUEUED)

    assert nightly(bench) == [["a", "b"]]

    found.run_requests[:] = [first]

    bench.pretend(found, dg.DagsterRunStatus.STARTED)

    assert "held by active runs" in str(nightly(bench))


def test_nightly_tick_that_is_evaluated_again_launches_only_the_rest(
    bench: Workbench, small_pieces: None
) -> None:
    """Dagster launches no run whose run key was used in the same tick."""
    bench.settings["max_runs"] = 3
    bench.fill("abcdefgh")

    requests = requests_of(bench)

    assert [each.run_key for each in requests_of(bench)] == [each.run_key for each in requests]

    config = requests[0].run_config
    bench.pretend_run(NAMES.refresh_job, dg.DagsterRunStatus.QUEUED, run_config=config)

    again = requests_of(bench)

    rest = set("abcdefgh") - set(named(requests[0]) or ())

    assert [key for each in again for key in named(each) or ()] == sorted(rest)

    used = [requests[0].run_key, *(each.run_key for each in again)]
    assert all(used)
    assert len(set(used)) == len(used)


def requests_of(bench: Workbench) -> list[dg.RunRequest]:
    requests = bench.scheduled()
    assert not isinstance(requests, str), requests
    return requests


@pytest.mark.parametrize(
    ("setting", "policy"),
    [(None, dg.BackfillPolicy.single_run()), (500, dg.BackfillPolicy.multi_run(500))],
)
def test_backfill_is_one_run_unless_its_partitions_per_run_are_limited(
    bench: Workbench, setting: int | None, policy: dg.BackfillPolicy
) -> None:
    bench.settings["max_partitions_per_run"] = setting
    assert bench.definitions.resolve_assets_def(NAMES.embeddings).backfill_policy == policy
