"""Refreshes that are divided among machines: shards that shrink, each partition in one of them, real processes.

The tests with processes of their own take their seconds for starting them.
"""

from __future__ import annotations

import heapq
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import dagster as dg
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.plan.weights import FILE_BYTES, weight_of
from surge_dagster.engine.sources.partition import Partition, PartitionRange
from surge_dagster.orchestration import shards
from surge_dagster.orchestration.launch import Unattended
from tests.dagster.conftest import NAMES, ROOT, Workbench, requested, shown
from tests.dagster.dev_server import eventually
from tests.small_catalogs import DIMENSION, assert_embedded, numbered_rows, partition_folder, write_rows


def partition(key: str, text_bytes: int | None) -> Partition:
    return Partition(key, "v1", lambda: iter(()), lambda: "v1", text_bytes=text_bytes)


sizes = st.lists(st.none() | st.integers(0, 10**9), min_size=1, max_size=60)


@given(sizes, st.integers(1, 12), st.integers(1, 10**9))
def test_shards_hold_every_key_once_in_order_and_the_largest_comes_first(
    given_sizes: list[int | None], machines: int, least: int
) -> None:
    partitions = {f"p{place:02}": partition(f"p{place:02}", size) for place, size in enumerate(given_sizes)}
    given_shards = shards.cut(list(partitions), partitions, machines, least)
    stretches = [shard.keys for shard in given_shards]
    assert all(stretch and stretch == sorted(stretch) for stretch in stretches)
    assert [key for stretch in sorted(stretches) for key in stretch] == list(partitions), "each is one range of them"
    weights = {key: weight_of(each) for key, each in partitions.items()}
    sums = [sum(weights[key] for key in stretch) for stretch in stretches]
    assert sums == sorted(sums, reverse=True) == [shard.weight for shard in given_shards]
    total = sum(sums)
    most = max(total / (3 * machines) if machines > 1 else total, 2 * least, total / 30 / machines)
    assert sums[0] <= most + max(weights.values())


def test_little_work_is_one_run_and_a_large_partition_is_its_own_shard() -> None:
    partitions = {key: partition(key, 400_000_000 if key == "c" else 1_000_000) for key in "abcdefg"}
    assert keys_of(partitions, 3, 1) == [["c"], list("defg"), ["a", "b"]]
    small = {key: partition(key, 1_000_000) for key in "abcdefg"}
    assert keys_of(small, 3, shards.SHARD_BYTES) == [list(small)]
    assert keys_of(partitions, 1, 1) == [list(partitions)]


def keys_of(partitions: Mapping[str, Partition], machines: int, least: int) -> list[list[str]]:
    return [shard.keys for shard in shards.cut(list(partitions), partitions, machines, least)]


def test_partition_of_several_stretches_is_divided_where_its_rows_can_be_read_apart() -> None:
    partitions = {key: partition(key, 36_000_000 if key == "c" else 1_000_000) for key in "abcde"}
    partitions["c"] = replace(partitions["c"], rows=1_000, read_range=lambda start, stop: iter(()))
    divided = shards.cut(list(partitions), partitions, 4, 1)
    parts = sorted(((shard.part, shard.weight) for shard in divided if shard.part), key=lambda each: each[0].start)
    assert {shard.keys[0] for shard in divided if shard.part} == {"c"}
    assert_cover([part for part, _ in parts], 1_000)
    assert {(part.key, part.source_version) for part, _ in parts} == {("c", "v1")}
    assert [weight for _, weight in parts] == sorted([weight for _, weight in parts], reverse=True), "they shrink"
    assert parts[0][1] > 4 * parts[-1][1] and len(parts) < 40
    assert sorted(key for shard in divided if not shard.part for key in shard.keys) == list("abde")
    assert max(shard.weight for shard in divided) <= sum(map(weight_of, partitions.values())) / 8
    assert [shard.part for shard in shards.cut(list(partitions), partitions, 1, 1)] == [None]
    for lacks in ("rows", "read_range"):
        whole = partitions | {"c": replace(partitions["c"], **{lacks: None})}
        assert not any(shard.part for shard in shards.cut(list(whole), whole, 4, 1)), lacks


def assert_cover(parts: Iterable[PartitionRange], rows: int) -> None:
    ordered = sorted(parts, key=lambda part: part.start)
    assert [part.start for part in ordered] == [0, *(part.stop for part in ordered[:-1])] and ordered[-1].stop == rows


def efficiency(weights: Sequence[int], speeds: Sequence[float]) -> float:
    """Of machines that take the next shard whenever they are free, against the sum of their speeds."""
    free_at = [(0.0, machine) for machine in range(len(speeds))]
    end = 0.0
    for weight in weights:
        begun, machine = heapq.heappop(free_at)
        heapq.heappush(free_at, (begun + weight / speeds[machine], machine))
        end = max(end, begun + weight / speeds[machine])
    return sum(weights) / sum(speeds) / end


@pytest.mark.parametrize("sigma", [1.0, 1.72, 2.5])
def test_machines_of_different_speeds_end_at_nearly_the_same_time(sigma: float) -> None:
    """Eight machines with speeds that spread by a tenth, one of them half as fast, and no partition above a shard."""
    shrinking, equal = list[float](), list[float]()
    for seed in range(5):
        random = np.random.default_rng(seed)
        sizes = random.lognormal(11, sigma, 2_000)
        sizes = np.minimum(sizes, sizes.sum() / 24)
        partitions = {str(place): partition(str(place), int(size)) for place, size in enumerate(sizes)}
        speeds = [*random.normal(1, 0.1, 7), 0.5]
        weights = np.array(list(map(weight_of, partitions.values())))
        stretches = keys_of(partitions, 8, 1)
        assert len(stretches) <= 12 * 8
        shrinking.append(efficiency([int(sum(weights[list(map(int, each))])) for each in stretches], speeds))
        shard = (np.cumsum(weights) * 32 - 1) // weights.sum()  # four of equal size for each machine
        equal.append(efficiency(np.bincount(shard, weights).astype(int).tolist(), speeds))
    assert min(shrinking) >= 0.97, shrinking
    assert max(equal) <= 0.95 and min(equal) <= 0.8, equal


def encoded(bench: Workbench, seconds: float, text_bytes: int, kept: int = 0, space: str = "s") -> None:
    """Report a SuperBatch of a hundred texts, some of which kept their vectors."""
    measured = {"texts": 100, "text_bytes": text_bytes, "partitions": 2, "encode_seconds": seconds}
    metadata = {"superbatch": 0, "space": space, "texts_per_second": (100 - kept) / seconds, **measured}
    bench.instance.report_runless_asset_event(dg.AssetMaterialization(NAMES.superbatches, metadata=metadata))


def test_least_shard_is_what_a_machine_encodes_in_a_minute(bench: Workbench) -> None:
    space = cast(Space, SimpleNamespace(name="s"))
    least = partial(shards.bytes_per_minute, NAMES, bench.instance)
    files = 2 * FILE_BYTES
    encoded(bench, 4.0, 100_000 - files)
    assert least(space) == shards.SHARD_BYTES, "a few seconds are the first calls"
    encoded(bench, 16.0, 900_000 - files)
    encoded(bench, 1000.0, 10**9, space="another")
    assert least(space) == 60 * 1_000_000 // 20 and least(None) == shards.SHARD_BYTES
    encoded(bench, 20.0, 4_000_000 - files, kept=50)
    assert least(space) == 60 * 3_000_000 // 40, "half of the texts of the last one were encoded"


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two partitions of the catalogs here are worth a run of their own."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 8_000)


def test_the_sensor_requests_shards_and_no_key_that_one_of_them_holds(bench: Workbench, small_shards: None) -> None:
    bench.settings["shards"] = 3
    bench.fill("abcdef")
    found = bench.tick()
    assert requested(found) == [["a", "b"], ["c", "d"], ["e", "f"]]
    tags = [request.tags for request in found.run_requests or []]
    assert [tag["surge/shard"] for tag in tags] == ["1 of 3", "2 of 3", "3 of 3"]
    assert [tag["dagster/priority"] for tag in tags] == ["0", "-1", "-2"]
    second = (found.run_requests or [])[1]
    bench.pretend_run("embed_partitions", dg.DagsterRunStatus.QUEUED, tags=second.tags, run_config=second.run_config)
    assert sorted(key for shard in requested(bench.later(hours=1)) for key in shard) == ["a", "b", "e", "f"]


def test_partition_of_several_stretches_is_embedded_by_several_runs(bench: Workbench, small_shards: None) -> None:
    bench.settings["shards"] = 3
    bench.fill("ab", 3)
    rows = numbered_rows("giant", 1_200)
    write_rows(partition_folder(bench.catalog, "giant") / "part-0.parquet", rows, row_group_size=50)
    found = bench.tick()
    all_parts = [unattended.part for request in found.run_requests or () if (unattended := Unattended.of(request.tags))]
    parts = [part for part in all_parts if part]
    assert len(parts) >= 3
    assert_cover(parts, 1_200)
    assert {part.start % 50 for part in parts} == {0}, "row groups are read once"
    assert sorted({key for keys in requested(found) for key in keys}) == ["a", "b", "giant"]
    ran = [run for run, part in zip(bench.launch(found), all_parts, strict=True) if part]
    assert all(run.success for run in ran)
    assert [list(run.materialized()) for run in ran] == [[]] * (len(parts) - 1) + [["giant"]]
    for run in ran[:-1]:
        assert any("1 encoded in part, for other runs to complete" in line for line in run.logged())
        assert run.metrics()["texts_encoded"] < 1_200
    assert_embedded(bench.output, bench.space, "giant", rows)
    assert not bench.tick().run_requests, "nothing is left to do"


def test_part_of_a_partition_that_has_changed_since_is_asked_for_again(bench: Workbench, small_shards: None) -> None:
    bench.settings["shards"] = 3
    path = partition_folder(bench.catalog, "giant") / "part-0.parquet"
    write_rows(path, numbered_rows("giant", 900), row_group_size=300)
    found = bench.tick()
    write_rows(path, numbered_rows("new", 900), row_group_size=300)
    ran = bench.launch(found)
    assert not any(run.success for run in ran) and "Divide it anew" in " ".join(ran[0].logged())
    again = requested(bench.later(minutes=2))
    assert len(again) > 1 and all(keys == ["giant"] for keys in again)


def test_runs_that_sensor_and_schedule_request_have_the_tags_of_the_settings(
    bench: Workbench, small_shards: None
) -> None:
    bench.settings |= {"shards": 2, "run_tags": {"queue": "night", "dagster/priority": 7}}
    bench.fill("ab")
    divided = [{"queue": "night", "dagster/priority": str(priority)} for priority in (7, 6)]
    for keys, expected in (("ab", divided[:1]), ("cd", divided)):
        bench.fill(keys)
        for requests in (bench.tick().run_requests or [], bench.scheduled()):
            assert not isinstance(requests, str)
            assert [{name: each.tags[name] for name in expected[0]} for each in requests] == expected


def test_partitions_of_a_failed_shard_wait_while_other_shards_continue(bench: Workbench, small_shards: None) -> None:
    bench.settings["shards"] = 2
    bench.fill("abcd")
    first, _ = bench.pretend(bench.tick(), dg.DagsterRunStatus.STARTED)
    bench.instance.report_run_failed(first)
    assert requested(bench.tick()) == [] and requested(bench.later(minutes=1)) == [["a", "b"]]


def test_new_space_begun_by_one_partition_is_then_divided_into_shards(bench: Workbench, small_shards: None) -> None:
    bench.fill("abcde")
    named = {"ops": {"embeddings": {"config": {"keys": ["c"]}}}}
    assert bench.run("embed_partitions", named).success
    bench.settings |= {"shards": 2, "model": "hash://8"}
    with pytest.raises(ConfigError, match="launch catalog_refresh by hand once"):
        bench.tick()
    assert bench.run("embed_partitions", named).success
    found = bench.tick()
    assert requested(found) == [["a", "b"], ["d", "e"]] == nightly(bench)
    bench.settings["model"] = f"hash://{DIMENSION}"
    [queued, _] = bench.launch(found)
    assert "the run was launched for the space " in queued.failure()
    assert not queued.materialized()


def named(request: dg.RunRequest) -> list[str] | None:
    """The partition keys that a requested run of the whole catalog names, None for all."""
    return request.run_config["ops"]["refresh"]["config"].get("keys")


def nightly(bench: Workbench) -> list[list[str] | None] | str:
    """The partition keys that each run of the nightly schedule names, None for all; or why it requests none."""
    requests = bench.scheduled()
    return requests if isinstance(requests, str) else list(map(named, requests))


def test_nightly_refresh_is_divided_and_its_first_run_reports_removed_partitions(
    bench: Workbench, small_shards: None
) -> None:
    bench.settings["shards"] = 2
    assert nightly(bench) == [None], "without a catalog one run fails, which is alerted"
    bench.fill("abcd")
    requests = bench.scheduled()
    assert nightly(bench) == [["a", "b"], ["c", "d"]] and not isinstance(requests, str)
    unattended = filter(None, (Unattended.of(request.tags) for request in requests))
    assert [each.removed_partitions for each in unattended] == ["report", None]
    assert bench.refresh().success
    assert nightly(bench) == [None], "one run that finds nothing to do"
    bench.instance.wipe_assets([NAMES.embeddings])
    assert nightly(bench) == [["a", "b"], ["c", "d"]], "to be adopted"


@pytest.mark.parametrize("count", [1, 3])
def test_nightly_refresh_requests_no_partition_that_an_active_run_holds(
    bench: Workbench, small_shards: None, count: int
) -> None:
    bench.settings["shards"] = 3
    bench.fill("abcdef")
    first, *others = bench.tick().run_requests or []
    bench.settings["shards"] = count
    for request in others:
        bench.pretend_run(
            "embed_partitions", dg.DagsterRunStatus.QUEUED, tags=request.tags, run_config=request.run_config
        )
    assert nightly(bench) == [["a", "b"]]
    last = bench.pretend_run(
        "embed_partitions", dg.DagsterRunStatus.STARTED, tags=first.tags, run_config=first.run_config
    )
    assert "held by active runs" in str(nightly(bench))
    bench.instance.report_run_failed(last)
    everything = bench.pretend_run("catalog_refresh", dg.DagsterRunStatus.STARTED)
    by = f"held by active runs ({everything.run_id}, "
    assert by in str(nightly(bench)) and "terminate one that makes no progress" in str(nightly(bench))
    assert by in str(bench.tick().skip_message)


def test_nightly_refresh_requests_partitions_of_a_run_that_selects_a_state(bench: Workbench) -> None:
    bench.fill("ab")
    assert bench.refresh().success
    bench.write("a", 4, version="v2")
    bench.write("d")
    runs = [
        bench.pretend_run(
            NAMES.embed_job,
            status,
            run_config={"ops": {"embeddings": {"config": {"select": select, **keys}}}},
        ).run_id
        for status in (dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED)
        for select, keys in (("failed", {}), ("stale", {}), ("missing", {"keys": ["a", "d"]}))
    ]
    assert nightly(bench) == [None]
    said = str(bench.tick().skip_message)
    assert "2 held by active runs (" in said and "and 3 others" in said, "the sensor's next tick is soon"
    assert sum(run in said for run in runs) == 3


def test_nightly_tick_that_is_evaluated_again_launches_only_the_rest(bench: Workbench, small_shards: None) -> None:
    """Dagster launches no run of a tick whose run key was used in it, or, without a key, when the tick has any run."""
    bench.settings["shards"] = 3
    bench.fill("abcdefgh")
    requests, same = bench.scheduled(), bench.scheduled()
    assert not isinstance(requests, str) and not isinstance(same, str)
    assert [request.run_key for request in same] == [request.run_key for request in requests]
    launched = bench.pretend_run(NAMES.refresh_job, dg.DagsterRunStatus.QUEUED, run_config=requests[0].run_config)
    again = bench.scheduled()
    assert not isinstance(again, str)
    held = set(named(requests[0]) or ())
    assert len(again) == 3 and [key for each in again for key in named(each) or ()] == sorted(set("abcdefgh") - held)
    bench.instance.report_run_failed(launched)
    bench.settings["shards"] = 1
    [whole] = bench.scheduled()
    assert isinstance(whole, dg.RunRequest) and named(whole) is None
    used = [requests[0].run_key, *(request.run_key for request in again), whole.run_key]
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


@pytest.mark.processes
@pytest.mark.usefixtures("gated")
def test_run_declared_lost_that_still_executes_does_not_replace_newer_files(bench: Workbench) -> None:
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
    assert requested(bench.tick()) == []
    found = bench.later(minutes=1)
    assert [sorted(keys) for keys in requested(found)] == [["moves", "same"]]
    [ran] = bench.launch(found)
    assert ran.success
    (elsewhere / "gate").touch()
    late.wait(120)
    assert assert_embedded(bench.output, bench.space, "moves", changed).source_version == "v2", "the newer source wins"
    assert_embedded(bench.output, bench.space, "same", first["same"])
    assert shown(bench) == ({"moves", "same"}, set()), "and what the late one could not publish is not shown as failed"
    assert [each.status for each in bench.instance.get_runs()] == [dg.DagsterRunStatus.SUCCESS] * 2, (
        "it reported its end"
    )
    quiet = bench.later(days=1)
    assert requested(quiet) == []
    assert all(check.passed for check in bench.run("catalog_check").checks().values())
