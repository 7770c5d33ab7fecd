"""Machines that are lost, can read nothing or have wrong settings, and partitions that end them."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from surge_dagster.cluster import cluster_run as cluster_run_module
from surge_dagster.cluster import machine_work, stretches
from surge_dagster.cluster.cluster_run import ClusterRun, MachineLost
from surge_dagster.cluster.machine import Machine, MachineFacts, StretchOutcome, require_alike
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.version import __version__
from tests.cluster.local_cluster import CATALOG, FolderRuns, LocalCluster, SmallRuns, assert_all_embedded, cluster_run
from tests.small_catalogs import numbered_rows, partition_folder, write_rows

# Each machine is a pool with processes of its own.
pytestmark = [pytest.mark.usefixtures("no_leaks", "stretches_of_one_partition"), pytest.mark.processes]


def test_stretch_of_a_lost_machine_is_done_again_by_another(runs: SmallRuns, pool: EncoderPool) -> None:
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


def test_what_a_lost_machine_had_published_counts_as_encoded_by_this_run(runs: SmallRuns, pool: EncoderPool) -> None:
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


def test_partition_that_ends_every_machine_fails_by_name_and_the_others_are_embedded(
    runs: SmallRuns, pool: EncoderPool
) -> None:
    def end_with(machine: str, keys: Sequence[str]) -> None:
        if "p03" in keys:
            cluster.names.append(f"{machine}'")  # another one joins
            raise MachineLost(f"{machine} ended")

    cluster = LocalCluster(runs, ["a"], end_with)
    run = cluster_run(cluster, pool)
    [failure] = [event for event in run.events() if isinstance(event, Failure)]
    assert failure.key == "p03" and "again and again" in failure.reason and not failure.in_source and run.failed
    assert run.report.partitions_written == 11


def test_what_shares_a_machine_with_the_partition_that_ends_it_is_not_given_up(
    runs: SmallRuns, pool: EncoderPool
) -> None:
    beside = threading.Event()

    def end_with(machine: str, keys: Sequence[str]) -> None:
        if "p11" in keys:  # the largest, so the first
            assert len(cluster.given) > 2 or beside.wait(60)
            cluster.names.append(f"{machine}'")
            raise MachineLost(f"{machine} ended")
        beside.set()

    cluster = LocalCluster(runs, ["a"], end_with)
    run = cluster_run(cluster, pool)
    failed = [event.key for event in run.events() if isinstance(event, Failure)]
    assert failed == ["p11"] and run.report.partitions_written == 11
    assert len(run.work["a"].lost_at) == 2, "the first machine had another stretch"


def fail_p05(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Let a partition fail so many times for a passing cause; returns the numbers of the stretches, as it does."""
    embed, failed = Machine.embed, list[int]()

    def fail_first(self: Machine, number: int, keys: Sequence[str], *more: Any, **options: Any) -> StretchOutcome:
        if "p05" not in keys or len(failed) == times:
            return embed(self, number, keys, *more, **options)
        failed.append(number)
        rest = embed(self, number, [key for key in keys if key != "p05"], *more, **options)
        return StretchOutcome([Failure("p05", "the disk did not answer", transient=True), *rest.events], rest.stopped)

    monkeypatch.setattr(Machine, "embed", fail_first)
    return failed


@pytest.mark.parametrize("failures", [0, 1])
def test_run_does_not_wait_for_a_silent_machine_whose_stretch_others_have_done(
    runs: SmallRuns, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Nor for what another one could do instead of the only one that is left, on which it has failed once."""
    monkeypatch.setattr(cluster_run_module, "_COPIES_SECONDS", 0.1)
    failed = fail_p05(monkeypatch, failures)

    def be_silent(machine: str, keys: Sequence[str]) -> None:
        if machine == "cut":
            assert cluster.closed.wait(60)
            raise MachineLost("its link is down")

    cluster = LocalCluster(runs, ["a", "cut"], be_silent)
    run = cluster_run(cluster, pool)
    assert len(list(run)) == 12 and not run.failed and len(failed) == failures
    assert_all_embedded(runs, pool)


@pytest.mark.parametrize("times", [1, 2])
def test_partition_that_fails_for_a_passing_cause_is_tried_once_more(
    runs: SmallRuns, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    failed = fail_p05(monkeypatch, times)
    run = cluster_run(LocalCluster(runs, ["a"]), pool)
    failures = [event.key for event in run.events() if isinstance(event, Failure)]
    assert failures == (["p05"] if times == 2 else []) and len(failed) == times
    assert run.report.partitions_written == 13 - times


@pytest.mark.parametrize(
    ("why", "blind"),
    [("transient", ["blind"]), ("data", ["blind", "blind too"]), ("lists nothing", ["blind", "blind too"])],
)
def test_machines_that_can_read_nothing_fail_no_partition_while_another_one_can(
    giant: FolderRuns, pool: EncoderPool, why: str, blind: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: int) -> Iterator[RowBatch]:
        raise TransientError("no answer") if why == "transient" else DataError("p", "no such folder", "Mount it.")

    @dataclass(frozen=True)
    class BlindRuns(FolderRuns):
        def list_partitions(self) -> list[Partition]:
            listed = [replace(partition, read=fail, read_range=fail) for partition in super().list_partitions()]
            return [] if why == "lists nothing" else listed

    cluster = LocalCluster(giant, [*blind, "a"])
    cluster._machines |= {name: Machine(BlindRuns({}, giant.output)) for name in blind}
    run = cluster_run(cluster, pool)
    events = list(run.events())
    assert not [event for event in events if isinstance(event, Failure)] and run.report.partitions_written == 3
    assert not any(run.work[name].weight for name in blind)
    assert sum("has done nothing" in message for message in caplog.messages) == len(blind)
    in_vain = Counter(machine for machine, _ in cluster.given)
    assert all(2 <= in_vain[name] <= 6 for name in blind), "they get no more when another one has done something"


@pytest.mark.parametrize("first", [True, False])
def test_machine_with_wrong_settings_is_refused_while_another_one_encodes(
    runs: SmallRuns, pool: EncoderPool, first: bool
) -> None:
    refused = threading.Event()

    def refuse(machine: str, keys: Sequence[str]) -> None:
        if machine == "wrong":
            raise ConfigError("the output is read-only")
        if len(cluster.given) == 4 and not first:
            cluster.names.append("wrong")
        assert not first or refused.wait(60), "nothing is done before"

    cluster = LocalCluster(runs, ["wrong", "a"] if first else ["a"], refuse)
    refuse_machine = cluster.refuse
    cluster.refuse = lambda machine: (refuse_machine(machine), refused.set())[0]
    run = cluster_run(cluster, pool)
    assert len(list(run)) == 12 and not run.failed
    assert_all_embedded(runs, pool)
    assert cluster.names == ["a"] and run.work["wrong"].lost_at


@pytest.mark.parametrize(("machines", "later"), [(["a"], ""), (["a", "b"], "'")])
def test_settings_that_are_wrong_for_the_only_machine_or_for_many_end_the_run(
    runs: SmallRuns, pool: EncoderPool, machines: list[str], later: str
) -> None:
    def refuse(machine: str, keys: Sequence[str]) -> None:
        cluster.names += [machine + later] if later else []
        raise ConfigError("the output is read-only")

    cluster = LocalCluster(runs, machines, refuse)
    with pytest.raises(ConfigError, match="the output is read-only"):
        list(cluster_run(cluster, pool).events())
    assert cluster.closed.is_set()


def test_machine_that_met_bad_partitions_first_is_tried_again(
    runs: SmallRuns, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_work, "_WAIT_SECONDS", 0.05)
    bad, embed, tried = {"p11", "p10", "p09", "p08"}, Machine.embed, threading.Event()

    def fail_bad(self: Machine, number: int, keys: Sequence[str], *more: Any, **options: Any) -> StretchOutcome:
        machine, _ = cluster.given[number]
        if bad.issuperset(keys):
            return StretchOutcome([Failure(key, "unreadable") for key in keys], False)
        if machine == "unlucky":
            tried.set()
        elif "unlucky" in run.work and run.work["unlucky"].in_vain >= 2:
            assert tried.wait(60)
        return embed(self, number, keys, *more, **options)

    monkeypatch.setattr(Machine, "embed", fail_bad)
    cluster = LocalCluster(runs, ["unlucky", "a"])
    run = cluster_run(cluster, pool)
    assert {event.key for event in run.events() if isinstance(event, Failure)} == bad
    assert run.work["unlucky"].weight and run.report.partitions_written == 8


@pytest.mark.parametrize(("before", "divided"), [("nothing", True), ("older files", False)])
def test_machine_whose_output_is_on_a_disk_of_its_own_is_refused(
    giant: FolderRuns, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch, before: str, divided: bool
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
        moved = [replace(one, path=one.path.replace(str(elsewhere / "output"), str(here))) for one in receipts]
        return replace(outcome, events=moved)

    monkeypatch.setattr(Machine, "embed", embed_elsewhere)
    cluster = LocalCluster(FolderRuns({}, elsewhere), ["a"])
    run = ClusterRun(giant.list_partitions(), giant, pool, lambda: cluster, force=False, grace_seconds=20.0)
    with pytest.raises(ConfigError, match=r"has (no such|another) file( there)?\. All machines need one output"):
        list(run.events())
    assert cluster.closed.is_set() and not run.report.partitions_written


@pytest.mark.parametrize("stuck", [False, True])
def test_copy_that_fails_stops_no_machine_and_fails_no_partition_unless_the_machine_that_has_it_is_stuck(
    runs: SmallRuns, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    monkeypatch.setattr(cluster_run_module, "_COPIES_SECONDS", 0.1)
    for module in (stretches, cluster_run_module):
        monkeypatch.setattr(module, "STUCK_SECONDS", 0 if stuck else 300)
    copied, embed = threading.Event(), Machine.embed

    def fail_what_the_other_has(
        self: Machine, number: int, keys: Sequence[str], *more: Any, **options: Any
    ) -> StretchOutcome:
        machine, stretch = cluster.given[number]
        if machine == "slow":
            assert (cluster.closed if stuck else copied).wait(60)
            return embed(self, number, keys, *more, **options)
        if any(name == "slow" and other is stretch for name, other in cluster.given):
            copied.set()
            return StretchOutcome([Failure(key, "unreadable here") for key in keys], False)
        return embed(self, number, keys, *more, **options)

    monkeypatch.setattr(Machine, "embed", fail_what_the_other_has)
    cluster = LocalCluster(runs, ["slow", "fast"])
    run = cluster_run(cluster, pool)
    failed = {event.key for event in run.events() if isinstance(event, Failure)}
    held = {key for machine, stretch in cluster.given for key in stretch.keys if machine == "slow"}
    assert failed == (held if stuck else set()) and run.report.partitions_written == 12 - len(failed)
    assert ("slow" in cluster.stopped) == stuck
    if not stuck:
        assert_all_embedded(runs, pool)


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
