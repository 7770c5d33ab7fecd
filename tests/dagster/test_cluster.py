"""A run of Dagster over the machines of a cluster: the same events, the same files."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from surge_dagster.cluster import cluster_run, stretches
from surge_dagster.cluster.machine import MachineLost
from surge_dagster.config import run_setup
from surge_dagster.config.run_setup import RunSetup
from surge_dagster.engine.model.spec import Space
from tests.cluster.local_cluster import ONE_PARTITION, LocalCluster
from tests.dagster.conftest import Workbench
from tests.small_catalogs import assert_embedded, numbered_rows


@dataclass
class Connections:
    """Replaces Ray by machines of this process; keeps what the driver asked for."""

    addresses: list[str] = field(default_factory=list)
    setups: list[RunSetup] = field(default_factory=list)

    def connect(
        self, address: str, setup: RunSetup, space: Space, warn: object, token: str
    ) -> LocalCluster:
        self.addresses.append(address)
        self.setups.append(setup)
        # as here is no GPU, which the driver does not miss
        here = setup.encoder.model_copy(update={"devices": "cpu", "precision": "fp32"})
        travelled = pickle.loads(pickle.dumps(replace(setup, encoder=here)))
        return LocalCluster(travelled, ["a", "b"], self.lose_b).connect(token)

    @staticmethod
    def lose_b(machine: str, keys: Sequence[str]) -> None:
        if machine == "b":
            raise MachineLost("the machine 10.0.0.7 was lost")


@pytest.fixture
def connections(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Connections:
    """A catalog of three partitions for a cluster whose machine `b` is lost."""
    made = Connections()
    monkeypatch.setattr(cluster_run, "RayCluster", made.connect)
    monkeypatch.setattr(run_setup, "absolute_model", lambda model: model)
    monkeypatch.setattr(stretches, "SIZES", ONE_PARTITION)
    bench.settings |= {"cluster": "ray://head:10001", "devices": "cuda", "precision": "fp16"}
    bench.settings["missing_text"] = "skip"  # so that partitions are not divided
    bench.fill("abc", 5)
    return made


def test_run_over_a_cluster_has_the_events_and_files_of_a_local_run(
    bench: Workbench, connections: Connections
) -> None:
    ran = bench.refresh()

    assert ran.success, ran.failure()

    actions = {key: each.metadata["action"].value for key, each in ran.materialized().items()}
    assert actions == dict.fromkeys("abc", "encoded")
    assert ran.metrics()["texts_encoded"] == 15

    for key in "abc":
        assert_embedded(bench.output, bench.space, key, numbered_rows(key, 5))


def test_settings_of_the_encoder_reach_the_machines(
    bench: Workbench, connections: Connections
) -> None:
    bench.refresh()

    [setup] = connections.setups

    assert connections.addresses == ["ray://head:10001"]
    assert setup.encoder.devices == "cuda"
    assert setup.encoder.precision == "fp16"


def test_check_of_the_run_lists_what_each_machine_did(
    bench: Workbench, connections: Connections
) -> None:
    ran = bench.refresh()

    assert "the machine 10.0.0.7 was lost; 1 partition done again" in ran.logged()

    machines = [record.data for record in ran.metrics()["machines"].records]
    assert sum(machine["texts"] for machine in machines) == 15
    assert sum(bool(machine["lost_after_seconds"]) for machine in machines) == 1


def test_run_with_nothing_to_do_connects_to_no_cluster(
    bench: Workbench, connections: Connections
) -> None:
    bench.refresh()

    bench.refresh()

    assert len(connections.addresses) == 1
