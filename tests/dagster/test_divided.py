"""Refreshes that are divided among several runs: equal pieces, each partition in one of them, real
processes.

The tests with processes of their own take their seconds for starting them.
"""

from __future__ import annotations

from itertools import chain

import dagster as dg
import pytest

from surge_dagster.automation import embedding_runs
from surge_dagster.engine.errors import ConfigError
from tests.dagster.conftest import NAMES, Tick, Workbench, options_of, requested


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two partitions of the catalogs here are worth a run of their own."""
    monkeypatch.setattr(embedding_runs, "LEAST_BYTES", 8_000)


def test_the_sensor_requests_pieces(bench: Workbench, small_pieces: None) -> None:
    bench.settings["max_runs"] = 3
    bench.fill("abcdef")

    assert requested(bench.tick()) == [["a", "b"], ["c", "d"], ["e", "f"]]


def test_requested_runs_have_the_tags_of_the_settings(bench: Workbench, small_pieces: None) -> None:
    bench.settings |= {"max_runs": 2, "run_tags": {"queue": "night", "dagster/priority": 7}}
    bench.fill("ab")
    for keys, count in (("ab", 1), ("cd", 2)):
        bench.fill(keys)
        for found in (bench.tick(), bench.scheduled()):
            assert len(found.run_requests) == count
            for request in found.run_requests:
                assert request.tags["queue"] == "night"
                assert request.tags["dagster/priority"] == "7"


def test_new_space_begun_by_one_partition_is_then_divided(
    bench: Workbench, small_pieces: None
) -> None:
    bench.fill("abcde")

    assert bench.embed_keys(keys=["c"]).success

    bench.settings |= {"max_runs": 2, "model": "hash://8"}
    with pytest.raises(ConfigError, match="launch catalog_refresh by hand once"):
        bench.tick()

    assert bench.embed_keys(keys=["c"]).success

    pieces = [["a", "b"], ["d", "e"]]
    assert requested(bench.tick()) == pieces
    assert requested(bench.scheduled()) == pieces


def test_first_run_of_a_divided_refresh_reports_removed_partitions(
    bench: Workbench, small_pieces: None
) -> None:
    bench.settings["max_runs"] = 2

    assert requested(bench.scheduled()) == [None], (
        "without a catalog one run fails, which is alerted"
    )

    bench.fill("abcd")

    found = bench.scheduled()

    assert requested(found) == [["a", "b"], ["c", "d"]]

    first, second = map(options_of, found.run_requests)
    assert first["removed_partitions"] == "report"
    assert second["removed_partitions"] == "leave"
    assert bench.refresh().success
    assert requested(bench.scheduled()) == [None], "one run that finds nothing to do"

    bench.instance.wipe_assets([NAMES.embeddings])
    assert requested(bench.scheduled()) == [["a", "b"], ["c", "d"]], "to be adopted"


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

    assert requested(bench.scheduled()) == [["a", "b"]]

    found.run_requests[:] = [first]

    bench.pretend(found, dg.DagsterRunStatus.STARTED)

    assert "held by active runs" in bench.scheduled().skip_message


def test_nightly_tick_that_is_evaluated_again_launches_only_the_rest(
    bench: Workbench, small_pieces: None
) -> None:
    """Dagster launches no run whose run key was used in the same tick."""
    bench.settings["max_runs"] = 3
    bench.fill("abcdefgh")

    found = bench.scheduled()

    assert run_keys(bench.scheduled()) == run_keys(found)

    launched = found.run_requests[0]
    config = launched.run_config
    bench.pretend_run(NAMES.refresh_job, dg.DagsterRunStatus.QUEUED, run_config=config)

    again = bench.scheduled()

    pieces = [options_of(launched)["keys"], *requested(again)]
    assert sorted(chain.from_iterable(pieces)) == list("abcdefgh")
    assert launched.run_key not in run_keys(again)


def run_keys(found: Tick) -> list[str]:
    keys = [request.run_key or "" for request in found.run_requests]
    assert all(keys)
    assert len(set(keys)) == len(keys)
    return keys


@pytest.mark.parametrize(
    ("setting", "policy"),
    [(None, dg.BackfillPolicy.single_run()), (500, dg.BackfillPolicy.multi_run(500))],
)
def test_backfill_is_one_run_unless_its_partitions_per_run_are_limited(
    bench: Workbench, setting: int | None, policy: dg.BackfillPolicy
) -> None:
    bench.settings["max_partitions_per_run"] = setting
    assert bench.definitions.resolve_assets_def(NAMES.embeddings).backfill_policy == policy
