"""A run of Dagster over the machines of a cluster: the same events, the same files."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from surge_dagster.cluster import stretches
from surge_dagster.cluster.cluster_run import MachineLost
from surge_dagster.engine.model.spec import Space
from surge_dagster.orchestration import cluster_runs
from surge_dagster.orchestration.cluster_runs import ResourceRuns
from tests.cluster.local_cluster import LocalCluster
from tests.dagster.conftest import Workbench
from tests.small_catalogs import assert_embedded, numbered_rows


def test_run_over_a_cluster_has_the_events_and_files_of_one_on_this_machine(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected, asked = list[str](), list[str]()

    def connect(
        address: str, runs: ResourceRuns, space: Space, warn: Callable[[str], None], devices: str
    ) -> Any:
        connected.append(address)
        assert space.requested.model == "hash://16"
        asked.append(runs.encoder["model"])
        assert (devices, runs.encoder["devices"], runs.encoder["precision"]) == (
            "cuda",
            "cuda",
            "fp16",
        )
        # as here is no GPU, which the driver does not miss
        runs.encoder.update(devices="cpu", precision="fp32")
        return LocalCluster(pickle.loads(pickle.dumps(runs)), ["a", "b"], lose_b)  # as they travel

    def lose_b(machine: str, keys: Sequence[str]) -> None:
        if machine == "b":
            raise MachineLost("the machine 10.0.0.7 was lost")

    monkeypatch.setattr(cluster_runs, "RayCluster", connect)
    monkeypatch.setattr(
        cluster_runs, "absolute_model", lambda model: asked.append(f"absolute {model}") or model
    )
    monkeypatch.setattr(stretches, "_LEAST_SECONDS", 0)
    monkeypatch.setattr(stretches, "STRETCH_SECONDS", 0)  # one partition each
    bench.settings |= {"cluster": "ray://head:10001", "devices": "cuda", "precision": "fp16"}
    bench.fill(("a", "b", "c"), 5)
    ran = bench.refresh()
    assert ran.success, ran.failure()
    assert set(ran.materialized()) == set("abc")
    assert [event.metadata["action"].value for event in ran.materialized().values()] == [
        "encoded"
    ] * 3
    assert (ran.metrics()["partitions_written"], ran.metrics()["texts_encoded"]) == (3, 15)
    for key in "abc":
        assert_embedded(bench.output, bench.space, key, numbered_rows(key, 5))
    assert "the machine 10.0.0.7 was lost; 1 partition done again" in ran.logged()
    machines = [record.data for record in ran.totals()["machines"].records]
    assert sum(machine["texts"] for machine in machines) == 15
    assert sum(bool(machine["lost_after_seconds"]) for machine in machines) == 1
    again = bench.refresh()
    assert again.success and again.materialized() == {}
    assert connected == ["ray://head:10001"], "nothing was due the second time"
    assert asked[:2] == ["absolute hash://16", "hash://16"], "what travels is asked for"


@pytest.mark.soak  # Ray tries for half a minute
def test_cluster_that_cannot_be_reached_fails_the_run_and_says_so(bench: Workbench) -> None:
    bench.settings["cluster"] = "ray://127.0.0.1:1"
    bench.write("a")
    ran = bench.refresh()
    assert not ran.success
    assert (
        "the Ray cluster 'ray://127.0.0.1:1' cannot be reached" in ran.failure()
        or "'surge-dagster[ray]'" in ran.failure()
    )
