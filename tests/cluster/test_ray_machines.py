"""Which machines of a Ray cluster a run takes, and what it makes of their errors, without Ray."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surge_dagster.cluster import ray_cluster
from surge_dagster.cluster.machine import MachineFacts, MachineLost, Stretch
from surge_dagster.cluster.ray_cluster import RayCluster, RayTask
from surge_dagster.engine.errors import (
    ConfigError,
    EncoderError,
    StoreUnavailable,
    SurgeError,
    TransientError,
)
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.plan.dividing import Piece
from surge_dagster.version import __version__
from tests.cluster.local_cluster import setup_in

SPACE = EncodingSpec("hash://16").resolve()
STRETCH = Stretch(Piece(("a",), 1))


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


@dataclass
class FakeRay:
    """The part of `ray` that is used; references to results are the results themselves.

    Attributes:
        resources: of each node, whose address is its name.
        facts: what an actor on a node answers: facts, an error, or None while it starts.
    """

    resources: dict[str, dict[str, float]] = field(default_factory=dict)
    facts: dict[str, MachineFacts | Exception | None] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    requested: list[object] = field(default_factory=list)
    is_connected: bool = True
    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    util = SimpleNamespace(client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False)))

    def init(self, *_: object, **__: object) -> None: ...

    def shutdown(self) -> None: ...

    def is_initialized(self) -> bool:
        return self.is_connected

    def nodes(self) -> list[dict[str, Any]]:
        nodes = []
        for name, resources in self.resources.items():
            node = {"NodeID": name, "NodeManagerAddress": name, "Alive": True}
            nodes.append({**node, "Resources": resources})
        return nodes

    def remote(self, machine: type) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(
        self, *, num_cpus: int, num_gpus: int, scheduling_strategy: str, **_: object
    ) -> Any:
        name = scheduling_strategy
        self.started.append(f"{name} CPU {num_cpus} GPU {num_gpus}")
        facts = SimpleNamespace(remote=lambda: self.facts.get(name))
        return SimpleNamespace(remote=lambda setup, token: SimpleNamespace(facts=facts))

    def wait(self, references: Sequence[Any], **_: object) -> tuple[list[Any], list[Any]]:
        ready = [reference for reference in references if reference is not STARTING]
        return ready, []

    def get(self, reference: Any, **_: object) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference

    def kill(self, actor: object, **_: object) -> None: ...


STARTING: Any = object()


def facts(precision: str = "fp32") -> MachineFacts:
    return MachineFacts("host", __version__, SPACE.vectors_key, precision, "cpu", "", 1)


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node_id, soft: node_id)
    sdk = SimpleNamespace(request_resources=lambda bundles: fake.requested.append(bundles[0]))
    modules = {
        "ray": fake,
        "ray.util": strategies,
        "ray.util.scheduling_strategies": strategies,
        "ray.autoscaler": sdk,
        "ray.autoscaler.sdk": sdk,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ray_cluster, "_LOOK_SECONDS", 0.0)
    return fake


def connected(warnings: list[str], devices: str = "auto") -> RayCluster:
    setup = setup_in(Path("/nowhere"))
    encoder = setup.encoder.model_copy(update={"devices": devices})
    setup = replace(setup, encoder=encoder)
    return RayCluster("auto", setup, SPACE, warnings.append, "token")


@pytest.fixture
def cluster(ray: FakeRay, warnings: list[str]) -> RayCluster:
    """Of one node, `cpu`, which can encode."""
    ray.resources["cpu"] = {"CPU": 4}
    ray.facts["cpu"] = facts()
    return connected(warnings)


def task_of(cluster: RayCluster, outcome: object) -> RayTask:
    """A stretch of the node `cpu` that has this outcome."""
    assert list(cluster.machines()) == ["cpu"]
    return RayTask("cpu", cluster._nodes["cpu"].actor, 0, outcome)


def test_precision_of_the_first_machine_is_that_of_the_run(
    ray: FakeRay, warnings: list[str]
) -> None:
    cluster = connected(warnings, "cpu")
    for name, precision in {"first": "bf16", "other": "fp32", "third": "bf16"}.items():
        ray.resources = {name: {"CPU": 4}}
        ray.facts[name] = facts(precision)
        assert list(cluster.machines()) == ([] if name == "other" else [name])
    assert "other is not used: it has another precision (fp32) than this run (bf16)" in warnings[0]
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("bad"), ConfigError), (ConnectionError("no"), TransientError)]
)
def test_wrong_address_is_a_setting_and_no_answer_is_passing(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[SurgeError]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(kind, match="'auto'"):
        connected([])


@pytest.mark.parametrize(
    ("devices", "at_first", "requested", "then"),
    [
        ("auto", ["head CPU 4 GPU 0"], {"CPU": 4}, ["gpu CPU 0 GPU 2"]),
        ("cuda", [], {"GPU": 1}, ["gpu CPU 0 GPU 2"]),
        ("cuda:0,cuda:1", [], {"GPU": 1}, ["gpu CPU 0 GPU 2"]),
        ("cpu", ["head CPU 4 GPU 0"], {"CPU": 4}, ["gpu CPU 8 GPU 0"]),
    ],
)
def test_machines_have_the_devices_of_the_settings(
    ray: FakeRay,
    warnings: list[str],
    devices: str,
    at_first: list[str],
    requested: dict[str, int],
    then: list[str],
) -> None:
    ray.facts = {"head": STARTING, "gpu": STARTING}
    ray.resources["head"] = {"CPU": 4}
    cluster = connected(warnings, devices)
    cluster.machines()
    cluster.machines()
    cluster.request(1)
    assert ray.started == at_first
    assert ray.requested == [requested]

    ray.resources["gpu"] = {"CPU": 8, "GPU": 2}
    cluster.machines()
    assert ray.started == at_first + then


def test_run_waits_for_machines_that_start_and_says_so(
    ray: FakeRay, cluster: RayCluster, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.facts["cpu"] = STARTING
    now = cluster._without_since
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: now))
    for seconds in (100, 30, 800, 100):  # another run has its processors
        now += seconds
        assert cluster.machines() == {}
    assert len(warnings) == 2
    assert warnings[0].endswith("to encode for 130 s; 1 machine starting, and this run waits")

    cluster.leave_out("cpu")

    with pytest.raises(EncoderError, match="No machine of the cluster has been able to encode"):
        cluster.machines()


@pytest.mark.parametrize(
    "error",
    [RayTaskError(EncoderError("a worker ended")), RayError("The actor died: it was killed")],
)
def test_machine_that_is_lost_gets_no_work_until_it_has_started_again(
    ray: FakeRay, cluster: RayCluster, error: Exception
) -> None:
    task = task_of(cluster, error)
    ray.facts["cpu"] = STARTING
    with pytest.raises(MachineLost):
        cluster.result(task)
    assert cluster.machines() == {}

    cluster._nodes["cpu"].starting = facts()
    assert list(cluster.machines()) == ["cpu"]


def test_machine_that_ray_starts_no_more_is_left_out_with_a_warning(
    ray: FakeRay, cluster: RayCluster, warnings: list[str]
) -> None:
    ray.facts["cpu"] = RayError("The actor died: it was killed")
    assert cluster.machines() == {}
    assert cluster.machines() == {}
    assert warnings == ["the machine cpu does not start: The actor died: it was killed"]


@pytest.mark.parametrize(
    "error", [StoreUnavailable("no answer"), ConfigError("read-only"), OSError("disk full")]
)
def test_error_of_a_machine_keeps_its_kind(cluster: RayCluster, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        cluster.result(task_of(cluster, RayTaskError(error)))


def test_defect_on_a_machine_is_not_an_error_of_the_cluster(cluster: RayCluster) -> None:
    with pytest.raises(RayTaskError):
        cluster.result(task_of(cluster, RayTaskError(AttributeError("no such attribute"))))


def test_defect_of_the_driver_is_not_an_error_of_the_cluster(
    ray: FakeRay, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyError("Alive")

    monkeypatch.setattr(ray, "nodes", fail)
    with pytest.raises(KeyError):
        cluster.machines()


@pytest.mark.parametrize("is_known", [False, True])
def test_cluster_that_goes_away_is_a_passing_error(
    ray: FakeRay, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        assert ray.is_connected, "Ray looks for another cluster, for a minute each time"
        ray.is_connected = False
        raise Exception("Ray Client is not connected.\nPlease connect by calling `ray.init`.")

    task = task_of(cluster, "outcome")
    call_of_actor = SimpleNamespace(remote=fail, options=lambda **_: call_of_actor)
    task.actor.embed = call_of_actor
    task.actor.stop = call_of_actor
    monkeypatch.setattr(sys.modules["ray.autoscaler.sdk"], "request_resources", fail)
    for name in ("get", "wait", "nodes", "kill", "shutdown"):
        monkeypatch.setattr(ray, name, fail)

    for call in (
        lambda: cluster.machines(),
        lambda: cluster.embed("cpu", STRETCH, {}),
        lambda: cluster.wait([task], 1.0),
        lambda: cluster.result(task),
        lambda: cluster.request(3),
    ):
        ray.is_connected = not is_known
        with pytest.raises(TransientError, match="the Ray cluster does not answer any more: "):
            call()
    cluster.stop(task)
    cluster.close()
