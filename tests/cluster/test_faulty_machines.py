"""Machines that are lost, can read nothing or have wrong settings, and partitions that end them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.cluster.machine import (
    Machine,
    MachineFacts,
    MachineLost,
    StretchOutcome,
    require_alike,
    write_token,
)
from surge_dagster.config.run_setup import RunSetup
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError, DataError, StoreUnavailable, TransientError
from surge_dagster.engine.output.freshness import Freshness
from surge_dagster.engine.plan.dividing import Piece
from surge_dagster.engine.run.report import Failure
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.version import __version__
from tests.cluster.local_cluster import (
    CATALOG,
    RANGES,
    LocalCluster,
    assert_all_embedded,
    cluster_run,
    embed_all,
    setup_in,
)
from tests.engine.runs import failures, receipts
from tests.small_catalogs import assert_embedded, keys_of, numbered_rows, write_catalog

# Each machine is a pool with processes of its own.
pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.processes]


@dataclass(frozen=True)
class ListedSetup(RunSetup):
    """Of a machine that lists these partitions of the catalog."""

    partitions: tuple[Partition, ...] = ()

    def open_source(self) -> Any:
        return self.partitions


def listing(setup: RunSetup, partitions: Sequence[Partition]) -> Machine:
    root = Path(setup.output).parent
    listed = setup_in(root, ListedSetup, partitions=tuple(partitions))
    return Machine(listed, write_token(listed.open_store()))


def stale_listing(setup: RunSetup) -> list[Partition]:
    """Return the partitions as a mount sees them that has not noticed a change."""
    stale: list[Partition] = []
    for each in setup.open_source():
        stale.append(replace(each, source_version="old", current_source_version=lambda: "old"))
    return stale


def test_stretches_of_a_lost_machine_are_done_again_by_another(
    setup: RunSetup, pool: EncoderPool
) -> None:
    lost: list[Sequence[str]] = []
    both = threading.Event()

    def lose_the_first(machine: str, keys: Sequence[str]) -> None:
        if machine == "b":
            assert both.wait(60)
            return
        lost.append(keys)
        if len(lost) == 2:
            both.set()
        raise MachineLost("its host ended")

    cluster = LocalCluster(setup, ["a", "b"], lose_the_first)

    assert failures(embed_all(cluster, pool)) == []
    assert_all_embedded(setup, pool)
    assert len(lost) == 2, "it had two stretches"
    by_b = {piece.keys for piece in cluster.given_to("b")}
    assert by_b.issuperset(lost)


def test_what_a_lost_machine_has_published_is_not_encoded_again(
    setup: RunSetup, pool: EncoderPool
) -> None:
    encoded_by_a: list[str] = []

    def lose_after_the_work(machine: str, keys: Sequence[str]) -> None:
        if machine == "a":
            freshness = dict.fromkeys(keys, Freshness("missing"))
            cluster._machines["a"].embed(hash(keys), Piece(tuple(keys), 1), freshness)
            encoded_by_a.extend(keys)
            if "b" not in cluster.names:
                cluster.names.append("b")
            raise MachineLost("its host ended before it could report what it did")

    cluster = LocalCluster(setup, ["a"], lose_after_the_work)
    run = cluster_run(cluster, pool)

    assert len(receipts(run.events(), "encoded")) == 12
    assert run.published == CATALOG.keys()
    others = CATALOG.keys() - set(encoded_by_a)
    assert run.work["b"].texts == sum(len(CATALOG[key]) for key in others)


@pytest.mark.parametrize("force", [False, True])
def test_only_the_partition_that_ends_every_machine_fails(
    setup: RunSetup, pool: EncoderPool, force: bool
) -> None:
    if force:
        embed_all(LocalCluster(setup, ["a"]), pool)
        setup = replace(setup, force=True)
    neighbour = threading.Event()

    def end_with(machine: str, keys: Sequence[str]) -> None:
        if "p11" in keys:  # the largest, so the first
            assert len(cluster.given) > 2 or neighbour.wait(60)
            cluster.names.append(f"{machine}'")  # another one joins
            raise MachineLost(f"{machine} ended")
        neighbour.set()

    cluster = LocalCluster(setup, ["a"], end_with)
    run = cluster_run(cluster, pool)
    [failure] = failures(run.events())

    assert failure.key == "p11"
    assert "three times" in failure.reason
    assert not failure.in_source
    assert run.report.partitions_written == 11
    by_a = {piece.keys for piece in cluster.given_to("a")}
    assert by_a == {("p11",), ("p10",)}, "it had another stretch"


@pytest.mark.parametrize("why", ["cannot read", "lists nothing"])
def test_what_one_machine_cannot_read_is_done_by_another(
    giant: RunSetup, pool: EncoderPool, why: str
) -> None:
    def fail(*_: int) -> Iterator[RowBatch]:
        raise FileNotFoundError("no such folder")

    write_catalog(Path(giant.source), CATALOG)
    listed = [replace(each, read=fail, read_range=fail) for each in giant.open_source()]
    if why == "lists nothing":
        listed = []
    cluster = LocalCluster(giant, ["blind", "a"])
    cluster._machines["blind"] = listing(giant, listed)
    run = cluster_run(cluster, pool, RANGES)

    assert failures(run.events()) == []
    assert run.report.partitions_written == 15
    assert cluster.given_to("blind")


@pytest.mark.parametrize("why", ["bad data", "cannot be read"])
def test_bad_partition_in_ranges_leaves_out_no_machine(
    giant: RunSetup, pool: EncoderPool, why: str
) -> None:
    def fail(*_: int) -> Iterator[RowBatch]:
        if why == "bad data":
            raise DataError("giant", "null texts", "Fill them.")
        raise FileNotFoundError("no such file")

    write_catalog(Path(giant.source), CATALOG)
    listed: list[Partition] = []
    for each in giant.open_source():
        is_bad = each.key == "giant"
        listed.append(replace(each, read=fail, read_range=fail) if is_bad else each)
    setup = setup_in(Path(giant.output).parent, ListedSetup, partitions=tuple(listed))
    cluster = LocalCluster(setup, ["a", "b", "c"])
    run = cluster_run(cluster, pool, RANGES)
    failed = failures(run.events())

    assert cluster.names == ["a", "b", "c"]
    assert keys_of(failed) == ["giant"]
    assert run.report.partitions_written == 14
    assert_all_embedded(setup, pool)


def test_key_that_comes_again_is_refused_and_its_first_rows_are_embedded(
    tmp_path: Path, pool: EncoderPool
) -> None:
    first = numbered_rows("first", 30)
    write_catalog(tmp_path / "catalog", {"k": first, "other": numbered_rows("other", 5)})
    write_catalog(tmp_path / "again", {"k": numbered_rows("again", 40)}, version="v2")
    listed = list(setup_in(tmp_path).open_source())
    [again] = replace(setup_in(tmp_path), source=str(tmp_path / "again")).open_source()

    setup = setup_in(tmp_path, ListedSetup, partitions=(*listed, again, again))
    events = embed_all(LocalCluster(setup, ["a"]), pool)
    [failure] = failures(events)

    assert failure.key == "k"
    assert "the key comes again after it was closed" in failure.reason
    assert keys_of(receipts(events)) == ["k", "other"]
    assert_embedded(Path(setup.output), pool.space.name, "k", first)


def test_partitions_that_fail_on_the_only_machine_fail_by_name(
    setup: RunSetup, pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {"p11", "p10", "p09", "p08"}
    embed = Machine.embed

    def fail_bad(self: Machine, number: int, piece: Piece, freshness: Any) -> StretchOutcome:
        if bad.issuperset(piece.keys):
            return StretchOutcome([Failure(key, "unreadable") for key in piece.keys], False)
        return embed(self, number, piece, freshness)

    monkeypatch.setattr(Machine, "embed", fail_bad)
    failed = failures(embed_all(LocalCluster(setup, ["a"]), pool))

    assert set(keys_of(failed)) == bad


@pytest.mark.parametrize(
    "error", [ConfigError("the output is read-only"), TransientError("no answer")]
)
def test_machine_whose_stretch_raises_is_left_out(
    setup: RunSetup, pool: EncoderPool, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    left_out = threading.Event()

    def fail(machine: str, keys: Sequence[str]) -> None:
        if machine == "wrong":
            raise error
        assert left_out.wait(60), "nothing is done before"

    def leave_out(machine: str) -> None:
        cluster.names.remove(machine)
        left_out.set()

    cluster = LocalCluster(setup, ["wrong", "a"], fail)
    cluster.leave_out = leave_out

    assert len(receipts(embed_all(cluster, pool))) == 12
    assert cluster.names == ["a"]
    assert caplog.text.count(str(error)) == 1


@pytest.mark.parametrize("machines", [["a"], ["a", "b"]])
def test_error_of_every_machine_ends_the_run(
    setup: RunSetup, pool: EncoderPool, machines: list[str]
) -> None:
    def fail(machine: str, keys: Sequence[str]) -> None:
        raise ConfigError("the output is read-only")

    cluster = LocalCluster(setup, machines, fail)
    with pytest.raises(ConfigError, match="the output is read-only"):
        embed_all(cluster, pool)
    assert cluster.closed.is_set()


def test_outage_that_every_machine_meets_ends_the_run(setup: RunSetup, pool: EncoderPool) -> None:
    def fail(machine: str, keys: Sequence[str]) -> None:
        if run.report.partitions_written >= 4:
            raise StoreUnavailable("the bucket does not answer")

    cluster = LocalCluster(setup, ["a", "b"], fail)
    run = cluster_run(cluster, pool)
    with pytest.raises(StoreUnavailable, match="the bucket does not answer"):
        list(run.events())
    assert not run.report.partitions_failed


def test_defect_of_this_package_ends_the_run(setup: RunSetup, pool: EncoderPool) -> None:
    def fail(machine: str, keys: Sequence[str]) -> None:
        raise AttributeError("no such attribute")

    with pytest.raises(AttributeError, match="no such attribute"):
        embed_all(LocalCluster(setup, ["a", "b"], fail), pool)


def test_partition_that_is_read_in_another_version_is_done_by_another(
    setup: RunSetup, pool: EncoderPool
) -> None:
    stale = stale_listing(setup)
    cluster = LocalCluster(setup, ["stale", "a"])
    cluster._machines["stale"] = listing(setup, stale)
    published = receipts(embed_all(cluster, pool))

    assert cluster.given_to("stale")
    assert len(published) == 12
    assert "old" not in {receipt.source_version for receipt in published}


def test_partition_that_two_machines_read_in_another_version_fails(
    setup: RunSetup, pool: EncoderPool
) -> None:
    stale = stale_listing(setup)
    cluster = LocalCluster(setup, ["stale", "stale too"])
    for name in cluster.names:
        cluster._machines[name] = listing(setup, stale)
    failed = failures(embed_all(cluster, pool))

    assert keys_of(failed) == list(CATALOG)
    assert "read version old, and this run listed" in failed[0].reason


def test_machine_with_an_output_of_its_own_is_refused(giant: RunSetup, tmp_path: Path) -> None:
    token = write_token(giant.open_store())
    elsewhere = replace(giant, output=str(tmp_path / "own disk"))
    with pytest.raises(ConfigError, match="All machines need one output"):
        Machine(elsewhere, token)


def test_token_of_a_run_is_removed_at_its_end(setup: RunSetup, pool: EncoderPool) -> None:
    embed_all(LocalCluster(setup, ["a"]), pool)
    assert not (Path(setup.output) / ".cluster").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "0.0.9"}, r"machine gpu-7 is not used: it has another version \(0\.0\.9\)"),
        ({"vectors_key": "other"}, "another model or another of its settings"),
        ({"precision": "fp16"}, r"another precision \(fp16\) than this run \(fp32\)"),
    ],
)
def test_machine_that_would_make_other_vectors_is_refused_by_name(
    pool: EncoderPool, change: dict[str, str], message: str
) -> None:
    alike = MachineFacts(
        "gpu-7", __version__, pool.space.vectors_key, "fp32", "cuda:0", hardware="", workers=1
    )
    require_alike(alike, pool.space, None)
    require_alike(alike, pool.space, "fp32")
    with pytest.raises(ConfigError, match=message):
        require_alike(replace(alike, **change), pool.space, "fp32")
