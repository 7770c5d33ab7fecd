"""Which machines of a Ray cluster a run takes, and what it makes of their errors, without Ray."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from surge_dagster.cluster import ray_cluster
from surge_dagster.cluster.cluster_run import MachineLost
from surge_dagster.cluster.machine import CatalogRuns, MachineFacts
from surge_dagster.cluster.ray_cluster import RayCluster, RayTask
from surge_dagster.cluster.stretches import Stretch
from surge_dagster.engine.errors import ConfigError, EncoderError, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.version import __version__

SPACE = EncodingSpec("hash://16").resolve()


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


def facts(precision: str) -> MachineFacts:
    return MachineFacts("host", __version__, SPACE.vectors_key, precision, "cpu", "", 1)


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> RayCluster:
    """Of nodes whose addresses are their names; `get` gives a value, or raises an error."""

    def get(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    ray = SimpleNamespace(
        init=lambda *_, **__: None,
        is_initialized=lambda: True,
        get=get,
        kill=lambda actor: None,
        wait=lambda tasks, timeout: ([], tasks),
        nodes=lambda: [{"NodeID": "cpu", "Alive": True}],
        exceptions=SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    cluster = RayCluster("auto", cast(CatalogRuns, None), SPACE, warnings.append, "auto")
    cluster._addresses = {name: name for name in ("gpu", "cpu", "gpu-again")}
    return cluster


def test_precision_of_the_first_machine_is_that_of_the_run_also_when_all_machines_are_lost(
    cluster: RayCluster, warnings: list[str]
) -> None:
    cluster._welcome("gpu", facts("bf16"))
    cluster._lose("gpu")
    cluster._welcome("cpu", facts("fp32"))
    assert "the machine cpu is not used: it has another precision (fp32) than this run (bf16)" in warnings[0]
    cluster._welcome("gpu-again", facts("bf16"))
    assert list(cluster._facts) == ["gpu-again"] and len(warnings) == 1


@pytest.mark.parametrize(("error", "kind"), [(ValueError("bad"), ConfigError), (ConnectionError("no"), TransientError)])
def test_address_that_is_none_is_a_wrong_setting_and_a_cluster_that_does_not_answer_may_later(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[SurgeError]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(sys.modules["ray"], "init", fail)
    with pytest.raises(kind, match="'nowhere'"):
        RayCluster("nowhere", cast(CatalogRuns, None), SPACE, lambda line: None, "auto")


@pytest.mark.parametrize(
    ("devices", "at_first", "asked_for", "then"),
    [
        ("auto", ["head CPU 4 GPU 0"], {"CPU": 4}, ["gpu CPU 0 GPU 2"]),
        ("cuda", [], {"GPU": 1}, ["gpu CPU 0 GPU 2"]),
        ("cuda:0,cuda:1", [], {"GPU": 1}, ["gpu CPU 0 GPU 2"]),
        ("cpu", ["head CPU 4 GPU 0"], {"CPU": 4}, ["gpu CPU 8 GPU 0"]),
    ],
)
def test_machines_that_join_and_those_that_an_autoscaler_starts_are_of_the_devices_of_the_settings(
    cluster: RayCluster,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    devices: str,
    at_first: list[str],
    asked_for: dict[str, int],
    then: list[str],
) -> None:
    started, asked = list[str](), list[object]()
    resources = {"head": {"CPU": 4}}
    ray = sys.modules["ray"]
    nodes = lambda: [  # noqa: E731
        {"NodeID": node, "NodeManagerAddress": node, "Alive": True, "Resources": has} for node, has in resources.items()
    ]
    monkeypatch.setattr(ray, "nodes", nodes)
    client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False))
    monkeypatch.setattr(ray, "util", SimpleNamespace(client=client), raising=False)
    sdk = SimpleNamespace(request_resources=lambda bundles: asked.append(bundles[0]))
    for name in ("ray.autoscaler", "ray.autoscaler.sdk"):
        monkeypatch.setitem(sys.modules, name, sdk)

    def actor_of(machine: object) -> object:
        def options(*, num_cpus: int, num_gpus: int, scheduling_strategy: str, **others: object) -> object:
            started.append(f"{scheduling_strategy} CPU {num_cpus} GPU {num_gpus}")
            actor = SimpleNamespace(facts=SimpleNamespace(remote=lambda: "facts"))
            return SimpleNamespace(remote=lambda runs: actor)

        return SimpleNamespace(options=options)

    monkeypatch.setattr(ray, "remote", actor_of, raising=False)
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node_id, soft: node_id)
    for name in ("ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, strategies)
    cluster = RayCluster("auto", cast(CatalogRuns, None), SPACE, warnings.append, devices)
    cluster._look()
    cluster._look()
    cluster.request(1)
    assert (started, asked) == (at_first, [asked_for])
    resources["gpu"] = {"CPU": 8, "GPU": 2}
    cluster._look()
    assert started == at_first + then
    waits = "no node of the cluster has a GPU; this run waits 900 s for one that joins"
    assert warnings == ([] if at_first else [waits])


def test_run_that_waits_for_the_machines_of_another_one_says_so(
    cluster: RayCluster, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: now))
    cluster._without_since, cluster._looked_at, cluster._starting = now, now + 1e6, {"cpu": "facts"}
    for seconds in (100, 30, 100, 30):  # another run has its processors
        now += seconds
        assert cluster.machines() == {}
    assert warnings == ["1 machine starting for 130 s: another run may have all of them; this one waits"] * 2
    cluster._starting.clear()
    now += 130
    with pytest.raises(EncoderError, match="no machine of the cluster can encode"):
        cluster.machines()


@pytest.mark.parametrize(
    ("error", "is_innocent"), [(StoreUnavailable("no answer"), True), (EncoderError("a worker ended"), False)]
)
def test_stretch_beside_one_that_met_an_outage_is_no_more_to_blame_than_that(
    cluster: RayCluster, error: SurgeError, is_innocent: bool
) -> None:
    cluster._actors["cpu"] = actor = object()
    for number, outcome in enumerate([RayTaskError(error), RayError("The actor died: it was killed")]):
        with pytest.raises(MachineLost) as lost:
            cluster.result(RayTask("cpu", actor, number, outcome))
        assert lost.value.is_innocent == is_innocent


@pytest.mark.parametrize("is_known", [False, True])
def test_cluster_that_goes_away_is_a_passing_error_and_hides_no_other(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        assert not is_known, "Ray looks for another cluster, for a minute each time"
        raise Exception("Ray Client is not connected.\nPlease connect by calling `ray.init`.")

    actor = SimpleNamespace(embed=SimpleNamespace(remote=fail), stop=SimpleNamespace(remote=fail))
    cluster._actors["cpu"], stretch, task = actor, Stretch(("a",), 1), RayTask("cpu", actor, 0, "outcome")
    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: not is_known)
    for name in ("get", "wait", "nodes", "kill", "shutdown"):
        monkeypatch.setattr(sys.modules["ray"], name, fail, raising=False)
    for call in (
        lambda: cluster.machines(),
        lambda: cluster.embed("cpu", stretch, again=False),
        lambda: cluster.wait([task], 1.0),
        lambda: cluster.result(task),
        lambda: cluster.request(3),
    ):
        with pytest.raises(TransientError, match="the Ray cluster does not answer any more: "):
            call()
    cluster.stop(task)
    cluster.close()
