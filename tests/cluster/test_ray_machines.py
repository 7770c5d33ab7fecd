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
from surge_dagster.engine.errors import (
    ConfigError,
    EncoderError,
    StoreUnavailable,
    SurgeError,
    TransientError,
)
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
        kill=lambda actor, **_: None,
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
    cluster._end("gpu")
    cluster._welcome("cpu", facts("fp32"))
    assert (
        "the machine cpu is not used: it has another precision (fp32) than this run (bf16)"
        in warnings[0]
    )
    cluster._welcome("gpu-again", facts("bf16"))
    assert list(cluster._facts) == ["gpu-again"] and len(warnings) == 1


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("bad"), ConfigError), (ConnectionError("no"), TransientError)]
)
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
        {"NodeID": node, "NodeManagerAddress": node, "Alive": True, "Resources": has}
        for node, has in resources.items()
    ]
    monkeypatch.setattr(ray, "nodes", nodes)
    client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False))
    monkeypatch.setattr(ray, "util", SimpleNamespace(client=client), raising=False)
    sdk = SimpleNamespace(request_resources=lambda bundles: asked.append(bundles[0]))
    for name in ("ray.autoscaler", "ray.autoscaler.sdk"):
        monkeypatch.setitem(sys.modules, name, sdk)

    def actor_of(machine: object) -> object:
        def options(
            *, num_cpus: int, num_gpus: int, scheduling_strategy: str, **others: object
        ) -> object:
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
    assert (
        warnings
        == ["1 machine starting for 130 s: another run may have all of them; this one waits"] * 2
    )
    cluster._starting.clear()
    now += 130
    with pytest.raises(EncoderError, match="no machine of the cluster has been able to encode"):
        cluster.machines()


class StubActor:
    """An actor whose calls give what they are made with."""

    def __init__(self) -> None:
        self.facts = SimpleNamespace(remote=lambda: facts("fp32"))


@pytest.mark.parametrize(
    "error",
    [RayTaskError(EncoderError("a worker ended")), RayError("The actor died: it was killed")],
)
def test_machine_that_is_lost_gets_no_work_until_it_has_started_again(
    cluster: RayCluster, error: Exception
) -> None:
    actor = StubActor()
    cluster._actors["cpu"] = actor
    cluster._welcome("cpu", facts("fp32"))
    cluster._looked_at = 1e12

    with pytest.raises(MachineLost):
        cluster.result(RayTask("cpu", actor, 0, error))
    assert cluster.machines() == {}
    assert cluster.is_starting()

    cluster._welcome("cpu", cluster._starting.pop("cpu"))
    assert list(cluster.machines()) == ["cpu"]


def test_machine_that_ray_starts_no_more_is_left_out_with_a_warning(
    cluster: RayCluster, warnings: list[str]
) -> None:
    cluster._actors["cpu"] = StubActor()
    cluster._welcome("cpu", RayError("The actor died: it was killed"))

    assert warnings == ["the machine cpu does not start: The actor died: it was killed"]
    assert cluster._left_out == {"cpu"}


def test_host_that_ended_is_not_named_a_second_time(
    cluster: RayCluster, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["ray"], "nodes", list)
    cluster._actors["cpu"] = StubActor()
    cluster._welcome("cpu", RayError("The actor died: its node died"))

    assert warnings == []
    assert not cluster.is_starting()


@pytest.mark.parametrize(
    "error", [StoreUnavailable("no answer"), ConfigError("read-only"), OSError("disk full")]
)
def test_error_of_a_machine_keeps_its_kind(cluster: RayCluster, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        cluster.result(RayTask("cpu", StubActor(), 0, RayTaskError(error)))


def test_defect_on_a_machine_is_not_an_error_of_the_cluster(cluster: RayCluster) -> None:
    with pytest.raises(RayTaskError):
        cluster.result(
            RayTask("cpu", StubActor(), 0, RayTaskError(AttributeError("no such attribute")))
        )


def test_defect_of_the_driver_is_not_an_error_of_the_cluster(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["ray"], "nodes", lambda: [{"NodeID": "cpu", "Alive": True}])
    with pytest.raises(KeyError):  # the address is missing
        cluster.machines()


@pytest.mark.parametrize("is_known", [False, True])
def test_cluster_that_goes_away_is_a_passing_error(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    is_connected = not is_known

    def fail(*_: object, **__: object) -> None:
        nonlocal is_connected
        assert is_connected, "Ray looks for another cluster, for a minute each time"
        is_connected = False
        raise Exception("Ray Client is not connected.\nPlease connect by calling `ray.init`.")

    call_of_actor = SimpleNamespace(remote=fail, options=lambda **_: call_of_actor)
    actor = SimpleNamespace(embed=call_of_actor, stop=call_of_actor)
    cluster._actors["cpu"], stretch, task = (
        actor,
        Stretch(("a",), 1),
        RayTask("cpu", actor, 0, "outcome"),
    )
    ray = sys.modules["ray"]
    monkeypatch.setattr(ray, "is_initialized", lambda: is_connected)
    client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False))
    monkeypatch.setattr(ray, "util", SimpleNamespace(client=client), raising=False)
    for name in ("ray.autoscaler", "ray.autoscaler.sdk"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(request_resources=fail))
    for name in ("get", "wait", "nodes", "kill", "shutdown"):
        monkeypatch.setattr(ray, name, fail, raising=False)

    for call in (
        lambda: cluster.machines(),
        lambda: cluster.embed("cpu", stretch),
        lambda: cluster.wait([task], 1.0),
        lambda: cluster.result(task),
        lambda: cluster.request(3),
    ):
        is_connected = not is_known
        with pytest.raises(TransientError, match="the Ray cluster does not answer any more: "):
            call()
    cluster.stop(task)
    cluster.close()
