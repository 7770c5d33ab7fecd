"""Published files that are damaged or cannot be read fail their partition, and damaged ones are
encoded again."""

from __future__ import annotations

import pickle

import pytest

from surge_dagster.engine.errors import TransientError
from surge_dagster.orchestration import cluster_runs
from surge_dagster.orchestration.cluster_runs import ResourceRuns
from surge_dagster.orchestration.records import failed_on_record
from tests.cluster.local_cluster import LocalCluster
from tests.dagster.conftest import NAMES, Workbench, requested, shown
from tests.dagster.test_failures import damage_when_published


def test_partition_with_damaged_footer_fails_and_is_encoded_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write("a", 50)
    bench.write("b", 50)
    with monkeypatch.context() as patch:
        damage_when_published(bench, patch, "b")
        ran = bench.refresh()
    check = ran.checks()[NAMES.run_check.name]
    assert not ran.success and not check.passed
    assert "partition 'b': its published file is missing or damaged" in ran.failure()
    assert str(check.metadata["failed"].value).endswith("| `Run again: it is encoded again.` |")
    assert shown(bench) == ({"a"}, {"b"})
    fixed = bench.refresh()
    assert (
        fixed.success
        and set(fixed.materialized()) == {"b"}
        and fixed.metrics()["texts_encoded"] == 50
    )
    assert shown(bench) == ({"a", "b"}, set())


@pytest.mark.parametrize("cluster", ["none", "auto"])
def test_file_that_is_not_on_record_and_damaged_is_encoded_again(
    bench: Workbench, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(address: str, runs: ResourceRuns, *_: object) -> LocalCluster:
        return LocalCluster(pickle.loads(pickle.dumps(runs)), ["a"])  # as they travel

    monkeypatch.setattr(cluster_runs, "RayCluster", connect)
    bench.settings["cluster"] = cluster
    bench.fill("ab", 50)
    bench.refresh()
    bench.instance.wipe_assets([NAMES.embeddings])
    with bench.file("b").open("r+b") as file:  # bytes of a page, whose checksum tells
        file.seek(600)
        file.write(b"\xff\xff\xff\xff")
    ran = bench.refresh()
    actions = {key: event.metadata["action"].value for key, event in ran.materialized().items()}
    assert ran.success and actions == {"a": "adopted", "b": "encoded"}


def test_file_that_could_not_be_read_once_is_adopted_by_the_next_run(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TransientError("the disk failed once", "a")

    bench.write("a")
    bench.refresh()
    bench.instance.wipe_assets([NAMES.embeddings])
    found = bench.tick()
    assert requested(found) == [["a"]] and not found.asset_events
    with monkeypatch.context() as patch:
        patch.setattr("surge_dagster.orchestration.read_back.difference", fail)
        [failed] = bench.launch(found)
        assert not failed.success and "the disk failed once" in failed.failure()
    assert failed_on_record(NAMES, bench.instance) == {"a"}
    assert requested(bench.tick()) == [], "it waits after a failure"
    [ran] = bench.launch(bench.later(minutes=1))
    assert ran.success and ran.metrics()["texts_encoded"] == 0
    assert ran.materialized()["a"].metadata["action"].value == "adopted" and shown(bench) == (
        {"a"},
        set(),
    )
    assert requested(bench.later(days=1)) == []
