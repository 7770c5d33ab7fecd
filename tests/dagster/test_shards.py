"""A refresh that is divided among runs: shards of about one size, each partition in one of them, real processes.

The tests with processes of their own take their seconds for starting them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import dagster as dg
import pytest
from dagster._core.launcher import DefaultRunLauncher
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.sources.partition import Partition
from surge_dagster.orchestration.launch import name_keys, shard_requests
from surge_dagster.shards import Sharding, weight
from tests.dagster.conftest import NAMES, ROOT, Workbench, requested
from tests.dagster.dev_server import eventually
from tests.dagster.test_failures import shown
from tests.small_catalogs import DIMENSION, assert_embedded, numbered_rows


def partition(key: str, text_bytes: int | None) -> Partition:
    return Partition(key, "v1", lambda: iter(()), lambda: "v1", text_bytes=text_bytes)


sizes = st.lists(st.none() | st.integers(0, 10**9), max_size=60)


@given(sizes, st.integers(1, 12), st.integers(1, 10**8), st.integers(1, 30))
def test_shards_hold_every_key_once_in_order_and_are_balanced(
    given_sizes: list[int | None], shards: int, shard_bytes: int, most: int
) -> None:
    partitions = {f"p{place:02}": partition(f"p{place:02}", size) for place, size in enumerate(given_sizes)}
    cut = list(Sharding(shards, shard_bytes, most).cut(list(partitions), partitions))
    assert [key for shard in cut for key in shard] == list(partitions)
    assert all(1 <= len(shard) <= most for shard in cut)
    assert len(cut) <= max(shards, -(-len(partitions) // most))
    known = [size for size in given_sizes if size is not None]
    usual = sum(known) // len(known) if known else 0
    weights = {key: weight(each, usual) for key, each in partitions.items()}
    if cut and len(cut) == shards and most >= len(partitions):
        fair = sum(weights.values()) / shards
        assert max(sum(weights[key] for key in shard) for shard in cut) <= fair + max(weights.values())


def test_a_large_partition_gets_a_shard_and_little_work_gets_one_run() -> None:
    partitions = {key: partition(key, 100_000_000 if key == "c" else 1_000_000) for key in "abcdefg"}
    assert list(Sharding(3, 1_000_000, 100).cut(list(partitions), partitions)) == [["a", "b"], ["c"], list("defg")]
    assert list(Sharding(3, 10**9, 100).cut(list(partitions), partitions)) == [list(partitions)]


def test_keys_travel_inline_where_runs_may_be_on_another_machine(bench: Workbench) -> None:
    keys = [f"p{number}" for number in range(501)]
    assert "keys_file" in name_keys(bench.instance, keys)
    assert isinstance(bench.instance.run_launcher, DefaultRunLauncher)
    with mock.patch.object(dg.DagsterInstance, "run_launcher", object()):
        assert name_keys(bench.instance, keys) == {"keys": keys}


def test_a_list_of_keys_stays_as_long_as_a_run_that_names_it_is_not_over(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surge_dagster.orchestration.launch._INLINE_KEYS", 1)
    monkeypatch.setattr("surge_dagster.orchestration.launch._KEY_FILES_KEPT", 1)

    def written(seconds_ago: int, *keys: str) -> Path:
        path = Path(name_keys(bench.instance, keys)["keys_file"])
        moment = time.time() - seconds_ago
        os.utime(path, (moment, moment))
        return path

    queued, over, unknown, lately, newest = (
        written(ago, "a", str(ago)) for ago in (90_000, 80_000, 70_000, 1_800, 1_000)
    )
    for path, status in ((queued, dg.DagsterRunStatus.QUEUED), (over, dg.DagsterRunStatus.FAILURE)):
        config = {"ops": {"embeddings": {"config": {"keys_file": str(path)}}}}
        bench.pretend_run("embed_partitions", status, run_config=config)
    shard_requests("embeddings", bench.instance, None, [("id", ["a", "b"])])
    assert [path.exists() for path in (queued, over, unknown, lately, newest)] == [True, False, False, True, True]


def test_the_sensor_asks_for_shards_and_for_no_key_that_one_of_them_holds(bench: Workbench) -> None:
    bench.settings |= {"shards": 3, "shard_bytes": 1}
    for key in "abcdef":
        bench.write(key)
    found = bench.tick()
    assert requested(found) == [["a", "b"], ["c", "d"], ["e", "f"]]
    tags = [request.tags for request in found.run_requests or []]
    assert [tag["surge/shard"] for tag in tags] == ["1 of 3", "2 of 3", "3 of 3"]
    ends = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")
    assert [tuple(tag[end] for end in ends) for tag in tags] == [("a", "b"), ("c", "d"), ("e", "f")]
    second = (found.run_requests or [])[1]
    bench.pretend_run("embed_partitions", dg.DagsterRunStatus.QUEUED, tags=second.tags, run_config=second.run_config)
    assert sorted(key for shard in requested(bench.later(hours=1)) for key in shard) == ["a", "b", "e", "f"]


def test_another_model_is_begun_by_one_partition_and_then_divided(bench: Workbench) -> None:
    for key in "abcde":
        bench.write(key)
    named = {"ops": {"embeddings": {"config": {"keys": ["c"]}}}}
    assert bench.run("embed_partitions", named).success
    bench.settings |= {"shards": 2, "shard_bytes": 1, "model": "hash://8"}
    refused = bench.tick()
    assert not refused.run_requests and "launch catalog_refresh by hand once" in (refused.skip_message or "")
    assert bench.run("embed_partitions", named).success
    found = bench.later(minutes=1)
    assert requested(found) == [["a", "b"], ["d", "e"]] == night(bench)
    bench.settings["model"] = f"hash://{DIMENSION}"
    [queued, _] = bench.launch(found)
    assert "asked for with the settings" in queued.failure() and not queued.materialized()


def test_the_night_is_divided_too(bench: Workbench) -> None:
    bench.settings |= {"shards": 2, "shard_bytes": 1}
    for key in "abcd":
        bench.write(key)
    assert night(bench) == [["a", "b"], ["c", "d"]]


def tick(bench: Workbench, schedule: str = NAMES.schedule) -> list[dg.RunRequest] | str:
    """The runs that a schedule's tick asks for, or why it asks for none."""
    definition = bench.definitions.get_repository_def().get_schedule_def(schedule)
    with dg.build_schedule_context(bench.instance, resources=bench.definitions.resources) as context:
        found = definition.evaluate_tick(context)
    return list(found.run_requests or []) or found.skip_message or ""


def named(request: dg.RunRequest) -> list[str] | None:
    """The partition keys that a requested run of the whole catalog names, None for all."""
    return request.run_config["ops"]["refresh"]["config"].get("keys")


def asked(bench: Workbench, schedule: str = NAMES.schedule) -> list[dg.RunRequest]:
    """The runs that a schedule's tick asks for."""
    found = tick(bench, schedule)
    assert not isinstance(found, str), found
    return found


def night(bench: Workbench, schedule: str = NAMES.schedule) -> list[list[str] | None] | str:
    """The partition keys that each run of a schedule's tick names, None for all; or why it asks for none."""
    found = tick(bench, schedule)
    return found if isinstance(found, str) else list(map(named, found))


@pytest.mark.parametrize("shards", [1, 3])
def test_the_night_leaves_to_active_runs_what_they_hold(bench: Workbench, shards: int) -> None:
    bench.settings |= {"shards": 3, "shard_bytes": 1}
    for key in "abcdef":
        bench.write(key)
    first, *others = bench.tick().run_requests or []
    bench.settings["shards"] = shards
    for request in others:
        bench.pretend_run(
            "embed_partitions", dg.DagsterRunStatus.QUEUED, tags=request.tags, run_config=request.run_config
        )
    mine = [["a", "b"]] if shards == 1 else [["a"], ["b"]]
    assert night(bench) == mine
    last = bench.pretend_run(
        "embed_partitions", dg.DagsterRunStatus.STARTED, tags=first.tags, run_config=first.run_config
    )
    assert "held by active runs" in str(night(bench))
    bench.instance.report_run_failed(last)
    everything = bench.pretend_run("catalog_refresh", dg.DagsterRunStatus.STARTED)
    by = f"held by active runs ({everything.run_id}, "
    assert by in str(night(bench)) and "terminate one that does not go on" in str(night(bench))
    assert by in str(bench.look().skip_message)


def test_the_night_waits_behind_a_run_that_selects_a_state_and_leaves_nothing_to_it(bench: Workbench) -> None:
    for key in "ab":
        bench.write(key)
    assert bench.refresh().success
    bench.write("a", 4, version="v2")
    bench.write("d")
    runs = [
        bench.pretend_run(
            NAMES.embed_job,
            status,
            run_config={"ops": {"embeddings": {"config": {"select": select, **named}}}},
        ).run_id
        for status in (dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED)
        for select, named in (("failed", {}), ("stale", {}), ("missing", {"keys": ["a", "d"]}))
    ]
    assert night(bench) == [None]
    said = str(bench.look().skip_message)
    assert "1 held by active runs (" in said and "and 3 more" in said, "the sensor asks again in half a minute"
    assert sum(run in said for run in runs) == 3


def test_a_night_for_many_partitions_is_as_many_runs_as_the_settings_ask_for(bench: Workbench) -> None:
    bench.settings |= {"max_partitions_per_run": 2}
    assert night(bench) == [None], "without a catalog one run fails, which can be told"
    for key in "abcde":
        bench.write(key)
    assert night(bench) == [["a", "b"], ["c", "d"], ["e"]]
    bench.settings["max_partitions_per_run"] = 1000
    assert night(bench) == [None] and bench.refresh().success
    bench.settings["max_partitions_per_run"] = 2
    assert night(bench) == [None], "one that finds nothing to do"
    bench.instance.wipe_assets([NAMES.embeddings])
    assert night(bench) == [["a", "b"], ["c", "d"], ["e"]], "to be adopted"


def test_a_night_that_is_evaluated_again_launches_what_is_left_of_it(bench: Workbench) -> None:
    """Dagster launches no run of a tick whose run key was used in it, or, without a key, when the tick has any run."""
    bench.settings |= {"shards": 3, "shard_bytes": 1}
    for key in "abcdefgh":
        bench.write(key)
    first, *_ = requests = asked(bench)
    assert [request.run_key for request in asked(bench)] == [request.run_key for request in requests]
    launched = bench.pretend_run(NAMES.refresh_job, dg.DagsterRunStatus.QUEUED, run_config=first.run_config)
    again = asked(bench)
    assert len(again) == len(requests) and [key for each in again for key in named(each) or ()] == list("defgh")
    bench.instance.report_run_failed(launched)
    bench.settings["shards"] = 1
    [whole] = asked(bench)
    assert named(whole) is None
    used = [first.run_key, *(request.run_key for request in again), whole.run_key]
    assert all(used) and len(set(used)) == len(used)


def start(bench: Workbench, request: dg.RunRequest, folder: Path) -> subprocess.Popen[str]:
    """Execute a requested run in another process, which works in a folder of its own."""
    folder.mkdir()
    settings = {"source": bench.catalog, "output": bench.output, "model": "hash://16", **bench.settings}
    environment = os.environ | {f"SURGE_{name.upper()}": str(value) for name, value in settings.items()}
    environment |= {"DAGSTER_HOME": str(bench.root / "home")}
    environment["PYTHONPATH"] = f"{environment['PYTHONPATH']}{os.pathsep}{ROOT}"
    command = [sys.executable, "-m", "tests.dagster.requested_run", "embed_partitions"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
        )
    assert process.stdin
    json.dump({"run_config": request.run_config, "tags": request.tags}, process.stdin)
    process.stdin.close()
    return process


def texts_encoded(bench: Workbench) -> int:
    """By all runs on record."""
    runs = [run.run_id for run in bench.instance.get_runs()]
    kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION
    events = [entry.dagster_event for run in runs for entry in bench.instance.all_logs(run, of_type=kind)]
    evaluations = [event.asset_check_evaluation_data for event in events if event]
    figures = [each.metadata for each in evaluations if each.check_name == NAMES.run_check.name]
    return sum(int(str(each["texts_encoded"].value)) for each in figures)


@pytest.mark.soak
@pytest.mark.parametrize("shards", [2, 6])
def test_shards_in_processes_at_once_begin_one_space_and_encode_everything_once(bench: Workbench, shards: int) -> None:
    bench.settings |= {"shards": shards, "shard_bytes": 1}
    rows = {f"p{number:02}": numbered_rows(f"p{number:02}", 3 + number) for number in range(12)}
    for key, each in rows.items():
        bench.write(key, each)
    requests = bench.tick().run_requests or []
    assert len(requests) == shards
    running = [start(bench, request, bench.root / f"run-{place}") for place, request in enumerate(requests)]
    ended = [process.wait(200) for process in running]
    assert ended == [0] * shards, [(bench.root / f"run-{place}" / "log").read_text() for place in range(shards)]
    [space] = [folder.name for folder in bench.output.iterdir() if (folder / "space.json").exists()]
    for key, each in rows.items():
        assert_embedded(bench.output, space, key, each)
    assert texts_encoded(bench) == sum(map(len, rows.values()))
    quiet = bench.later(days=1)
    assert requested(quiet) == [] and not quiet.asset_events


@pytest.mark.usefixtures("gated")
def test_a_run_that_was_declared_dead_and_lives_does_no_harm(bench: Workbench) -> None:
    first = {"same": [("x", "wait for gate"), ("y", "text")], "moves": [("x", "wait for gate")]}
    for key, rows in first.items():
        bench.write(key, rows)
    [request] = bench.tick().run_requests or []
    elsewhere = bench.root / "elsewhere"
    late = start(bench, request, elsewhere)  # its gate lies in its own folder
    eventually("the text that holds the run up", (elsewhere / "gate.reached").exists, seconds=120)
    [run] = bench.instance.get_runs()
    bench.instance.report_run_failed(run, "declared dead")

    changed = [("x", "another text"), ("z", "more")]
    bench.write("moves", changed, version="v2")
    (bench.root / "gate").touch()
    found = bench.later(minutes=1)
    assert [sorted(keys) for keys in requested(found)] == [["moves", "same"]]
    [ran] = bench.launch(found)
    assert ran.success
    (elsewhere / "gate").touch()
    late.wait(120)
    [space] = [folder.name for folder in bench.output.iterdir() if (folder / "space.json").exists()]
    assert assert_embedded(bench.output, space, "moves", changed).source_version == "v2", "the newer source wins"
    assert_embedded(bench.output, space, "same", first["same"])
    assert shown(bench) == ({"moves", "same"}, set()), "and what the late one could not publish is not shown as failed"
    assert [each.status for each in bench.instance.get_runs()] == [dg.DagsterRunStatus.SUCCESS] * 2, "it told its end"
    quiet = bench.later(days=1)
    assert requested(quiet) == [] and not quiet.asset_events
    assert all(check.passed for check in bench.run("catalog_check").checks().values())
