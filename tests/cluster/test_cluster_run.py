"""A run over machines has the files, events and report of a run on one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from surge_dagster.cluster.machine import Machine, MachineLost, write_token
from surge_dagster.cluster.stretches import StretchSizes
from surge_dagster.config.run_setup import RunSetup
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.output.freshness import Freshness
from surge_dagster.engine.plan.dividing import Piece
from surge_dagster.engine.run.report import OldVectorSample
from surge_dagster.engine.run.staging import STAGING
from tests.cluster.local_cluster import (
    CATALOG,
    RANGES,
    LocalCluster,
    assert_all_embedded,
    cluster_run,
    embed_all,
)
from tests.engine.runs import failures, of_kind, receipts
from tests.small_catalogs import (
    assert_embedded,
    keys_of,
    numbered_rows,
    partition_folder,
    write_catalog,
    write_rows,
)

# Each machine is a pool with processes of its own.
pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.processes]


def test_machines_share_the_work(setup: RunSetup, pool: EncoderPool) -> None:
    cluster = LocalCluster(setup, ["a", "b"])
    run = cluster_run(cluster, pool)
    published = receipts(run.events())

    assert_all_embedded(setup, pool)
    assert keys_of(published) == list(CATALOG)
    assert run.report.partitions_written == 12
    assert run.report.machines == 2
    assert run.report.texts_encoded == sum(map(len, CATALOG.values()))
    assert sum(work.texts for work in run.work.values()) == run.report.texts_encoded
    assert set(cluster.requested) == {2}, "there is nothing to do for a third machine"
    assert pool.worker_pids == [], "the driver encodes nothing itself"
    assert cluster.closed.is_set()


def test_rows_that_machines_set_aside_are_counted(setup: RunSetup, pool: EncoderPool) -> None:
    catalog = setup.catalog.model_copy(update={"bad_rows": "set_aside"})
    rows = [("bad", None), *numbered_rows("nulls", 3)]
    write_catalog(Path(setup.source), {"nulls": rows})
    setup = replace(setup, catalog=catalog.model_copy(update={"missing_text": "refuse"}))

    run = cluster_run(LocalCluster(setup, ["a", "b"]), pool)
    published = {receipt.key: receipt for receipt in receipts(run.events())}

    assert published["nulls"].rejected_rows == 1
    assert run.report.rejected_rows == 1
    assert_embedded(Path(setup.output), pool.space.name, "nulls", rows[1:])


def test_run_needs_no_machine_if_everything_is_fresh(setup: RunSetup, pool: EncoderPool) -> None:
    embed_all(LocalCluster(setup, ["a"]), pool)

    run = cluster_run(LocalCluster(setup, []), pool)
    assert len(receipts(run.events(), "fresh")) == 12
    assert run.report.partitions_skipped == 12
    assert run.report.space == pool.space.name


def test_what_is_staged_of_fresh_partitions_is_removed(setup: RunSetup, pool: EncoderPool) -> None:
    embed_all(LocalCluster(setup, ["a"]), pool)
    output = Path(setup.output)
    # as by a machine that ended late
    staged = output / STAGING / pool.space.name / "p01" / "v" / "0-3.parquet"
    staged.parent.mkdir(parents=True)
    staged.touch()
    (output / file_name(pool.space.name, "p02")).unlink()

    run = cluster_run(LocalCluster(setup, ["a"]), pool)
    list(run.events())
    assert run.report.partitions_written == 1
    assert not staged.exists()


def test_machine_has_the_next_stretch_before_it_ends_one(
    setup: RunSetup, pool: EncoderPool
) -> None:
    both = threading.Barrier(2)

    def meet(machine: str, keys: Sequence[str]) -> None:
        if len(cluster.given) <= 2:
            both.wait(60)

    cluster = LocalCluster(setup, ["a"], meet)
    run = cluster_run(cluster, pool)
    list(run.events())
    assert_all_embedded(setup, pool)
    # the time of two stretches counts once
    assert 0 < run.work["a"].seconds <= run.report.wall_seconds


def test_machine_that_joins_late_gets_work(setup: RunSetup, pool: EncoderPool) -> None:
    joined = threading.Event()

    def join(machine: str, keys: Sequence[str]) -> None:
        if machine == "a":
            if "late" not in cluster.names:
                cluster.names.append("late")
            assert joined.wait(60)
        joined.set()

    cluster = LocalCluster(setup, ["a"], join)
    embed_all(cluster, pool)
    assert_all_embedded(setup, pool)
    assert cluster.given_to("late")


def test_machines_are_requested_for_all_remaining_work(setup: RunSetup, pool: EncoderPool) -> None:
    requested: list[int] = []

    def lose(machine: str, keys: Sequence[str]) -> None:
        if machine == "a" and len(cluster.given) > 4:
            raise MachineLost("its host ended")

    def request(machines: int) -> None:
        if not cluster.names:
            requested.append(machines)
            cluster.names.append("b")

    cluster = LocalCluster(setup, ["a"], lose)
    cluster.request = request
    sizes = StretchSizes(seconds=0, least_seconds=0, worth_seconds=1e-9)
    list(cluster_run(cluster, pool, sizes).events())
    assert_all_embedded(setup, pool)
    assert requested[0] > 1


def test_partition_of_many_stretches_is_encoded_by_several_machines(
    giant: RunSetup, pool: EncoderPool
) -> None:
    lost: list[str] = []

    def lose_one(machine: str, keys: Sequence[str]) -> None:
        if machine == "c" and not lost:
            lost.append(machine)
            raise MachineLost("its host ended")

    cluster = LocalCluster(giant, ["a", "b", "c"], lose_one)
    published = receipts(cluster_run(cluster, pool, RANGES).events())
    assert keys_of(published) == ["a", "b", "giant"]

    starts = set[int]()
    for machine in "abc":
        ranges = [piece.rows for piece in cluster.given_to(machine) if piece.rows]
        assert ranges
        starts.update(rows.start for rows in ranges)
    assert len(starts) > 3
    for key, count in {"giant": 600, "a": 5, "b": 7}.items():
        rows = numbered_rows(key, count, words=12)
        assert_embedded(Path(giant.output), pool.space.name, key, rows)


def test_divided_partition_that_is_refused_fails_once(giant: RunSetup, pool: EncoderPool) -> None:
    rows = numbered_rows("giant", 600, words=12)
    rows[599] = (rows[0][0], rows[599][1])
    path = partition_folder(Path(giant.source), "giant") / "part-0.parquet"
    write_rows(path, rows, row_group_size=100)

    run = cluster_run(LocalCluster(giant, ["a", "b"]), pool, RANGES)
    [failure] = failures(run.events())
    assert failure.key == "giant"
    assert "'id-0'" in failure.reason
    assert run.report.partitions_written == 2


def test_machine_compares_old_vectors_once_for_all_its_stretches(
    setup: RunSetup, pool: EncoderPool
) -> None:
    embed_all(LocalCluster(setup, ["a"]), pool)
    changed = {key: [*rows, (f"{key}-new", "a new text")] for key, rows in CATALOG.items()}
    write_catalog(Path(setup.source), changed, version="v2")

    cluster = LocalCluster(setup, ["a"])
    samples = of_kind(embed_all(cluster, pool), OldVectorSample)

    assert len(cluster.given) == 12
    assert len(samples) == 1


def test_stretch_that_is_stopped_before_it_begins_embeds_nothing(setup: RunSetup) -> None:
    piece = Piece(tuple(CATALOG), 1)
    freshness = dict.fromkeys(CATALOG, Freshness("missing"))
    machine = Machine(setup, write_token(setup.open_store()))
    try:
        machine.stop(1)
        assert machine.embed(1, piece, freshness).stopped
        outcome = machine.embed(2, piece, freshness)
    finally:
        machine._pool.close()
    assert not outcome.stopped
    assert len(receipts(outcome.events)) == len(CATALOG)


@pytest.mark.parametrize("by", ["stop", "close"])
def test_stopped_run_ends_its_machines_and_the_next_one_goes_on(
    setup: RunSetup, pool: EncoderPool, by: str
) -> None:
    cluster = LocalCluster(setup, ["a"])
    run = cluster_run(cluster, pool)
    events = run.events()
    if by == "close":
        next(events)
        events.close()
    else:
        cluster.before = lambda machine, keys: run.stop()
        list(events)
    assert cluster.closed.is_set()
    assert run.report.partitions_written < 12

    embed_all(LocalCluster(setup, ["b"]), pool)
    assert_all_embedded(setup, pool)


def test_failure_of_a_partition_comes_once(setup: RunSetup, pool: EncoderPool) -> None:
    path = partition_folder(Path(setup.source), "p03")
    for file in path.glob("*.parquet"):
        file.write_bytes(b"no Parquet")

    [failure] = failures(embed_all(LocalCluster(setup, ["a", "b"]), pool))
    assert failure.key == "p03"
