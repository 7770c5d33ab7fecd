"""A run over machines that come and go writes what a run on one machine writes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from surge_dagster.cluster import stretches
from surge_dagster.cluster.cluster_run import MachineLost
from surge_dagster.cluster.machine import Machine
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.run.staging import STAGING
from tests.cluster.local_cluster import (
    CATALOG,
    FolderRuns,
    LocalCluster,
    SmallRuns,
    assert_all_embedded,
    cluster_run,
)
from tests.small_catalogs import assert_embedded, numbered_rows, partition_folder, write_rows

# Each machine is a pool with processes of its own.
pytestmark = [
    pytest.mark.usefixtures("no_leaks", "stretches_of_one_partition"),
    pytest.mark.processes,
]


def test_machines_share_the_work_and_every_partition_is_told_of_once(
    runs: SmallRuns, pool: EncoderPool
) -> None:
    cluster = LocalCluster(runs, ["a", "b"])
    run = cluster_run(cluster, pool)
    events = list(run.events())
    assert_all_embedded(runs, pool)
    assert Counter(event.key for event in events if isinstance(event, Receipt)) == Counter(
        list(CATALOG)
    )
    assert run.report.partitions_written == 12
    assert run.report.machines == 2
    assert run.report.texts_encoded == sum(map(len, CATALOG.values()))
    assert sum(work.texts for work in run.work.values()) == run.report.texts_encoded
    assert cluster.requested and set(cluster.requested) == {2}, (
        "there is nothing to do for a third machine"
    )
    assert pool.worker_pids == [] and cluster.closed.is_set(), "the driver encodes nothing itself"
    again = cluster_run(LocalCluster(runs, []), pool)
    assert {event.action for event in again.events() if isinstance(event, Receipt)} == {"fresh"}
    assert again.report.partitions_skipped == 12, "nothing was due, so no machine was needed"


def test_run_with_nothing_to_do_begins_no_space_and_needs_no_machine(
    tmp_path: Path, pool: EncoderPool
) -> None:
    cluster = LocalCluster(SmallRuns({}, tmp_path), [])
    assert list(cluster_run(cluster, pool).events()) == [] and not list(tmp_path.iterdir())


def test_what_is_staged_of_fresh_partitions_is_removed_though_others_are_due(
    runs: SmallRuns, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(cluster_run(LocalCluster(runs, ["a"]), pool).events())
    # as by a machine that ended late
    left = runs.output / STAGING / pool.space.name / "p01" / "v" / "0-3.parquet"
    left.parent.mkdir(parents=True)
    left.touch()
    (runs.output / file_name(pool.space.name, "p02")).unlink()
    run, begun = cluster_run(LocalCluster(runs, ["a"]), pool), list[int]()
    begin_space = run._local.begin_space
    monkeypatch.setattr(run._local, "begin_space", lambda: begun.append(begin_space() is None))
    list(run.events())
    assert run.report.partitions_written == 1 and not left.exists() and len(begun) == 1


def test_machine_has_the_next_stretch_before_it_ends_one(
    runs: SmallRuns, pool: EncoderPool
) -> None:
    both = threading.Barrier(2)

    def meet(machine: str, keys: Sequence[str]) -> None:
        if len(cluster.given) <= 2:
            both.wait(60)

    cluster = LocalCluster(runs, ["a"], meet)
    run = cluster_run(cluster, pool)
    list(run.events())
    assert_all_embedded(runs, pool)
    assert 0 < run.work["a"].seconds <= run.report.wall_seconds, (
        "the time of two stretches counts once"
    )


def test_machine_that_joins_late_gets_work(runs: SmallRuns, pool: EncoderPool) -> None:
    joined = threading.Event()

    def join(machine: str, keys: Sequence[str]) -> None:
        if machine == "a":
            if "late" not in cluster.names:
                cluster.names.append("late")
            assert joined.wait(60)
        joined.set()

    cluster = LocalCluster(runs, ["a"], join)
    list(cluster_run(cluster, pool).events())
    assert_all_embedded(runs, pool)
    assert "late" in {machine for machine, _ in cluster.given}


def test_machines_are_requested_for_all_that_is_left_also_while_there_is_none(
    runs: SmallRuns, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "_WORTH_SECONDS", 1e-9)
    requested = list[int]()

    def lose(machine: str, keys: Sequence[str]) -> None:
        if machine == "a" and len(cluster.given) > 4:
            raise MachineLost("its host ended")

    def request(machines: int) -> None:
        if not cluster.names:
            requested.append(machines)
            cluster.names.append("b")

    cluster = LocalCluster(runs, ["a"], lose)
    cluster.request = request
    list(cluster_run(cluster, pool).events())
    assert_all_embedded(runs, pool)
    assert requested and requested[0] > 1, "not those of a run whose machines' speed is unknown"


def test_partition_of_many_stretches_is_encoded_by_several_machines(
    giant: FolderRuns, pool: EncoderPool
) -> None:
    lost = list[str]()

    def lose_one(machine: str, keys: Sequence[str]) -> None:
        if machine == "c" and not lost:
            lost.append(machine)
            raise MachineLost("its host ended")

    cluster = LocalCluster(giant, ["a", "b", "c"], lose_one)
    receipts = [
        event for event in cluster_run(cluster, pool).events() if isinstance(event, Receipt)
    ]
    assert Counter(receipt.key for receipt in receipts) == Counter(["giant", "a", "b"])
    ranges = [(machine, part) for machine, given in cluster.given for part in given.ranges]
    assert (
        len({machine for machine, _ in ranges}) == 3 and len({part.start for _, part in ranges}) > 3
    )
    for key, count in {"giant": 600, "a": 5, "b": 7}.items():
        assert_embedded(
            giant.output / "output", pool.space.name, key, numbered_rows(key, count, words=12)
        )


def test_divided_partition_that_is_refused_fails_once_and_its_ranges_are_given_up(
    giant: FolderRuns, pool: EncoderPool
) -> None:
    rows = numbered_rows("giant", 600, words=12)
    rows[599] = (rows[0][0], rows[599][1])
    write_rows(
        partition_folder(giant.output / "catalog", "giant") / "part-0.parquet",
        rows,
        row_group_size=100,
    )
    run = cluster_run(LocalCluster(giant, ["a", "b"]), pool)
    [failure] = [event for event in run.events() if isinstance(event, Failure)]
    assert failure.key == "giant" and "'id-0'" in failure.reason
    assert run.report.partitions_written == 2


def test_stretch_that_is_stopped_before_it_begins_embeds_nothing(runs: SmallRuns) -> None:
    machine = Machine(runs)
    try:
        machine.stop(1)
        assert machine.embed(1, list(CATALOG)).stopped
        outcome = machine.embed(2, list(CATALOG))
    finally:
        machine._pool.close()
    assert not outcome.stopped
    assert [event.action for event in outcome.events if isinstance(event, Receipt)] == [
        "encoded"
    ] * len(CATALOG)


@pytest.mark.parametrize("by", ["stop", "close"])
def test_stopped_run_ends_its_machines_and_the_next_one_goes_on(
    runs: SmallRuns, pool: EncoderPool, by: str
) -> None:
    cluster = LocalCluster(runs, ["a"])
    run = cluster_run(cluster, pool)
    cluster.before = lambda machine, keys: run.stop() if by == "stop" else None
    events = run.events()
    if by == "close":
        next(events)
        events.close()
    else:
        list(events)
    assert cluster.closed.is_set() and cluster.stopped in (["a"], [])
    list(cluster_run(LocalCluster(runs, ["b"]), pool).events())
    assert_all_embedded(runs, pool)
