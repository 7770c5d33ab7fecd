"""Machines that are lost, can read nothing or have wrong settings, and partitions that end them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from surge_dagster.cluster import stretches
from surge_dagster.cluster.cluster_run import ClusterRun, MachineLost
from surge_dagster.cluster.machine import Machine, MachineFacts, StretchOutcome, require_alike
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError, DataError, StoreUnavailable, TransientError
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.version import __version__
from tests.cluster.local_cluster import (
    CATALOG,
    FolderRuns,
    LocalCluster,
    SmallRuns,
    assert_all_embedded,
    cluster_run,
)
from tests.small_catalogs import numbered_rows, partition_folder, write_rows

# Each machine is a pool with processes of its own.
pytestmark = [
    pytest.mark.usefixtures("no_leaks", "stretches_of_one_partition"),
    pytest.mark.processes,
]


def test_stretch_of_a_lost_machine_is_done_again_by_another(
    runs: SmallRuns, pool: EncoderPool
) -> None:
    lost, both = list[Sequence[str]](), threading.Event()

    def lose_the_first(machine: str, keys: Sequence[str]) -> None:
        if machine == "b":
            assert both.wait(60)
            return
        lost.append(keys)
        if len(lost) == 2:
            both.set()
        raise MachineLost("its host ended")

    cluster = LocalCluster(runs, ["a", "b"], lose_the_first)
    run = cluster_run(cluster, pool)
    assert not [event for event in run.events() if isinstance(event, Failure)]
    assert_all_embedded(runs, pool)
    assert len(lost) == 2, "it had two stretches"
    by_b = [given.keys for machine, given in cluster.given if machine == "b"]
    assert set(by_b[2:4]) == set(map(tuple, lost)), "as soon as it had done its own two"
    assert len(run.work["a"].lost_at) == 2 and not run.work["b"].lost_at
    assert run.work["a"].failures == 1, "one process ended"


def test_what_a_lost_machine_had_published_counts_as_encoded_by_this_run(
    runs: SmallRuns, pool: EncoderPool
) -> None:
    cluster = LocalCluster(runs, ["a"])

    def lose_after_the_work(machine: str, keys: Sequence[str]) -> None:
        if machine == "a":
            cluster._machines["a"].embed(hash(tuple(keys)), keys)
            if "b" not in cluster.names:
                cluster.names.append("b")
            raise MachineLost("its host ended before it could tell what it did")

    cluster.before = lose_after_the_work
    run = cluster_run(cluster, pool)
    events = [event for event in run.events() if isinstance(event, Receipt)]
    assert {event.action for event in events} == {"encoded"} and len(events) == 12
    assert run.published == CATALOG.keys()


def test_partition_that_ends_every_machine_fails_by_name(
    runs: SmallRuns, pool: EncoderPool
) -> None:
    def end_with(machine: str, keys: Sequence[str]) -> None:
        if "p03" in keys:
            cluster.names.append(f"{machine}'")  # another one joins
            raise MachineLost(f"{machine} ended")

    cluster = LocalCluster(runs, ["a"], end_with)
    run = cluster_run(cluster, pool)
    [failure] = [event for event in run.events() if isinstance(event, Failure)]

    assert failure.key == "p03"
    assert "three times" in failure.reason
    assert not failure.in_source
    assert run.report.partitions_written == 11


def test_partition_next_to_one_that_ends_machines_is_embedded(
    runs: SmallRuns, pool: EncoderPool
) -> None:
    neighbour = threading.Event()

    def end_with(machine: str, keys: Sequence[str]) -> None:
        if "p11" in keys:  # the largest, so the first
            assert len(cluster.given) > 2 or neighbour.wait(60)
            cluster.names.append(f"{machine}'")
            raise MachineLost(f"{machine} ended")
        neighbour.set()

    cluster = LocalCluster(runs, ["a"], end_with)
    run = cluster_run(cluster, pool)
    failed = [event.key for event in run.events() if isinstance(event, Failure)]

    assert failed == ["p11"]
    assert run.report.partitions_written == 11
    assert len(run.work["a"].lost_at) == 2, "the first machine had another stretch"


@pytest.mark.parametrize("why", ["data", "lists nothing"])
def test_machine_that_can_read_nothing_is_left_out_and_fails_no_partition(
    giant: FolderRuns, pool: EncoderPool, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: int) -> Iterator[RowBatch]:
        raise DataError("p", "no such folder", "Mount it.")

    @dataclass(frozen=True)
    class BlindRuns(FolderRuns):
        def list_partitions(self) -> list[Partition]:
            if why == "lists nothing":
                return []
            return [
                replace(partition, read=fail, read_range=fail)
                for partition in super().list_partitions()
            ]

    blind = ["blind", "blind too"]
    cluster = LocalCluster(giant, [*blind, "a"])
    cluster._machines |= {name: Machine(BlindRuns({}, giant.output)) for name in blind}
    run = cluster_run(cluster, pool)
    failures = [event for event in run.events() if isinstance(event, Failure)]

    assert failures == []
    assert run.report.partitions_written == 3
    assert cluster.names == ["a"]
    assert sum("is left out" in message for message in caplog.messages) == len(blind), (
        "one warning each"
    )


def test_partitions_that_fail_on_the_only_machine_fail_by_name(
    runs: SmallRuns, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {"p11", "p10", "p09", "p08"}
    embed = Machine.embed

    def fail_bad(
        self: Machine, number: int, keys: Sequence[str], *more: Any, **options: Any
    ) -> StretchOutcome:
        if bad.issuperset(keys):
            return StretchOutcome([Failure(key, "unreadable") for key in keys], False)
        return embed(self, number, keys, *more, **options)

    monkeypatch.setattr(Machine, "embed", fail_bad)
    cluster = LocalCluster(runs, ["a"])
    run = cluster_run(cluster, pool)
    failed = {event.key for event in run.events() if isinstance(event, Failure)}

    assert failed == bad
    assert run.report.partitions_written == 8


@pytest.mark.parametrize(
    "error", [ConfigError("the output is read-only"), TransientError("no answer")]
)
def test_machine_whose_first_stretches_raise_is_left_out(
    runs: SmallRuns, pool: EncoderPool, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    left_out = threading.Event()

    def fail(machine: str, keys: Sequence[str]) -> None:
        if machine == "wrong":
            raise error
        assert left_out.wait(60), "nothing is done before"

    def leave_out(machine: str) -> None:
        leave_out_machine(machine)
        left_out.set()

    cluster = LocalCluster(runs, ["wrong", "a"], fail)
    leave_out_machine = cluster.leave_out
    cluster.leave_out = leave_out
    run = cluster_run(cluster, pool)

    assert len(list(run)) == 12
    assert_all_embedded(runs, pool)
    assert cluster.names == ["a"]
    assert sum(str(error) in message for message in caplog.messages) == 1


@pytest.mark.parametrize("machines", [["a"], ["a", "b"]])
def test_error_of_every_machine_ends_the_run(
    runs: SmallRuns, pool: EncoderPool, machines: list[str]
) -> None:
    def fail(machine: str, keys: Sequence[str]) -> None:
        raise ConfigError("the output is read-only")

    cluster = LocalCluster(runs, machines, fail)
    with pytest.raises(ConfigError, match="the output is read-only"):
        list(cluster_run(cluster, pool).events())
    assert cluster.closed.is_set()


def test_outage_that_a_machine_at_work_meets_ends_the_run(
    runs: SmallRuns, pool: EncoderPool
) -> None:
    def fail(machine: str, keys: Sequence[str]) -> None:
        if run.report.partitions_written >= 4 and run.work[machine].stretches:
            raise StoreUnavailable("the bucket does not answer")

    cluster = LocalCluster(runs, ["a", "b"], fail)
    run = cluster_run(cluster, pool)
    with pytest.raises(StoreUnavailable, match="the bucket does not answer"):
        list(run.events())
    assert not run.report.partitions_failed


def test_defect_of_this_package_ends_the_run(runs: SmallRuns, pool: EncoderPool) -> None:
    def fail(machine: str, keys: Sequence[str]) -> None:
        raise AttributeError("no such attribute")

    with pytest.raises(AttributeError, match="no such attribute"):
        list(cluster_run(LocalCluster(runs, ["a", "b"], fail), pool).events())


def test_machine_that_reads_another_copy_of_the_source_publishes_no_receipts(
    runs: SmallRuns, pool: EncoderPool
) -> None:
    @dataclass(frozen=True)
    class StaleRuns(SmallRuns):
        def list_partitions(self) -> list[Partition]:
            return [replace(each, source_version="old") for each in super().list_partitions()]

    cluster = LocalCluster(runs, ["stale", "a"])
    cluster._machines["stale"] = Machine(StaleRuns(CATALOG, runs.output))
    run = cluster_run(cluster, pool)
    receipts = [event for event in run.events() if isinstance(event, Receipt)]

    assert cluster.names == ["a"]
    assert len(receipts) == 12
    assert {receipt.source_version for receipt in receipts} == {
        each.source_version for each in runs.list_partitions()
    }


@pytest.mark.parametrize(("before", "divided"), [("nothing", True), ("older files", False)])
def test_machine_whose_output_is_on_a_disk_of_its_own_is_refused(
    giant: FolderRuns,
    pool: EncoderPool,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    divided: bool,
) -> None:
    if not divided:
        monkeypatch.setattr(stretches, "_DIVIDED", 1e9)
    if before == "older files":
        list(cluster_run(LocalCluster(giant, ["b"]), pool).events())
        for key in ("giant", "a", "b"):
            path = partition_folder(giant.output / "catalog", key) / "part-0.parquet"
            write_rows(path, numbered_rows(f"new {key}", 500, words=12), row_group_size=100)
    elsewhere, here = giant.output / "own disk", giant.output / "output"
    shutil.copytree(giant.output / "catalog", elsewhere / "catalog")
    embed = Machine.embed

    def embed_elsewhere(*arguments: Any, **options: Any) -> StretchOutcome:
        outcome = embed(*arguments, **options)
        receipts = [event for event in outcome.events if isinstance(event, Receipt)]
        moved = [
            replace(one, path=one.path.replace(str(elsewhere / "output"), str(here)))
            for one in receipts
        ]
        return replace(outcome, events=moved)

    monkeypatch.setattr(Machine, "embed", embed_elsewhere)
    cluster = LocalCluster(FolderRuns({}, elsewhere), ["a"])
    run = ClusterRun(
        giant.list_partitions(), giant, pool, lambda: cluster, force=False, grace_seconds=20.0
    )
    with pytest.raises(
        ConfigError, match=r"has (no such|another) file( there)?\. All machines need one output"
    ):
        list(run.events())
    assert cluster.closed.is_set() and not run.report.partitions_written


def test_store_that_ignores_conditions_of_writes_is_refused_before_a_machine_has_work(
    runs: SmallRuns, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: LocalStore, name: str) -> None:
        raise ConfigError(f"a store that ignores conditions of writes, {store.location(name)}")

    monkeypatch.setattr(LocalStore, "require_conditions", refuse)
    cluster = LocalCluster(runs, ["a", "b"])
    with pytest.raises(ConfigError, match="ignores conditions"):
        list(cluster_run(cluster, pool).events())
    assert not cluster.given and cluster.closed.is_set()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "0.0.9"}, r"machine gpu-7 is not used: it has another version \(0\.0\.9\)"),
        ({"vectors_key": "other"}, "another model or another of its settings"),
        ({"precision": "fp16"}, r"another precision \(fp16\) than this run \(fp32\)"),
    ],
)
def test_machine_that_would_make_other_vectors_is_refused_by_name(
    pool: EncoderPool, change: dict[str, str], said: str
) -> None:
    alike = {"version": __version__, "vectors_key": pool.space.vectors_key, "precision": "fp32"}

    def facts(**own: str) -> MachineFacts:
        return MachineFacts(host="gpu-7", device="cuda:0", hardware="", workers=1, **own)

    require_alike(facts(**alike), pool.space, None)
    require_alike(facts(**alike), pool.space, "fp32")
    with pytest.raises(ConfigError, match=said):
        require_alike(facts(**alike | change), pool.space, "fp32")
