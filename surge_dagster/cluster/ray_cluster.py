"""The machines of a Ray cluster: one actor on each, which owns an encoder pool with a worker per GPU of its machine.

Only Ray's core is used. Machines that join are found within seconds; a machine that ends is noticed by Ray, and its
actor is started again when it comes back. The actors end with the process that started them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from surge_dagster.cluster.cluster_run import MachineLost
from surge_dagster.cluster.machine import (
    STRETCHES_AT_ONCE,
    CatalogRuns,
    Machine,
    MachineFacts,
    StretchOutcome,
    require_alike,
)
from surge_dagster.cluster.stretches import Stretch
from surge_dagster.engine.encoder.devices import device_kind, device_names
from surge_dagster.engine.errors import ConfigError, EncoderError, SurgeError, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support.counts import counted

P = ParamSpec("P")
R = TypeVar("R")
_LOOK_SECONDS = 2.0  # between two looks at the nodes
_START_AGAIN_SECONDS = 10.0  # after an actor has ended
_MOST_STARTS = 5  # in a row, of one node
_PATIENCE_SECONDS = 120.0  # without any machine that encodes
_START_SECONDS = 900.0  # likewise where there is none, which an autoscaler may be starting
_CLOSE_SECONDS = 5.0
_KINDS: dict[str | None, str] = {"cuda": "GPU", "cpu": "CPU"}  # of Ray's resources, by kind of device
_MOST_REQUESTED = 1_000  # an autoscaler has a limit of its own


def _asking_ray(method: Callable[Concatenate[RayCluster, P], R]) -> Callable[Concatenate[RayCluster, P], R]:
    """Make a passing error of what Ray raises where the cluster itself is gone; its client raises bare exceptions."""

    @functools.wraps(method)
    def asked(cluster: RayCluster, *arguments: P.args, **options: P.kwargs) -> R:
        try:
            if not cluster._ray.is_initialized():  # which would look for another cluster for a minute
                raise ConnectionError("its head ended, or the network to it")
            return method(cluster, *arguments, **options)
        except SurgeError:
            raise
        except Exception as error:
            message = f"the Ray cluster does not answer any more: {_in_a_line(error)}. Run again when it does: what is"
            raise TransientError(f"{message} published stays") from error

    return asked


@dataclass(frozen=True, eq=False, slots=True)
class RayTask:
    """A stretch under way; `outcome` is Ray's reference to it."""

    machine: str
    actor: Any
    number: int
    outcome: Any


class RayCluster:
    """The nodes of a Ray cluster that can encode: those of the setting `devices`, for auto those with GPUs or else all.

    Args:
        address: "auto" is the cluster of this machine, or of RAY_ADDRESS; else such as `ray://head:10001`.
        runs: makes the runs of each machine.
        space: that all must encode into.
        warn: takes a line about each machine that is not used.

    Raises:
        ConfigError: Ray is not installed, or the address is none.
        TransientError: there is no such cluster, or it does not answer.
    """

    def __init__(
        self, address: str, runs: CatalogRuns, space: Space, warn: Callable[[str], None], devices: str
    ) -> None:
        try:
            import ray  # of an extra  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            message = "a cluster needs a package that is not installed. Run: pip install 'surge-dagster[ray]'"
            raise ConfigError(message) from None
        self._ray: Any = ray
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except ValueError as error:
            raise ConfigError(f"{address!r} is no address of a Ray cluster: {_in_a_line(error)}") from None
        except (ConnectionError, RuntimeError) as error:
            raise TransientError(f"the Ray cluster {address!r} cannot be reached: {_in_a_line(error)}") from None
        self._runs, self._space, self._warn = runs, space, warn
        self._numbers = itertools.count()
        self._actors: dict[str, Any] = {}  # by node
        self._starting: dict[str, Any] = {}  # facts that come, by node
        self._addresses: dict[str, str] = {}
        self._facts: dict[str, MachineFacts] = {}
        self._precision: str | None = None  # of the first machine, and so of all
        self._innocent: dict[str, Any] = {}  # the last actor of a node that an outage ended
        self._starts: dict[str, int] = {}
        self._start_again_at: dict[str, float] = {}
        self._kind = _KINDS.get(device_kind(device_names(devices)[0]))  # None: by what the nodes have
        self._machine = {self._kind or "CPU": 1.0}  # the resources of one
        self._patience_seconds = _PATIENCE_SECONDS
        self._requested, self._last_request = 0, None
        self._looked_at, self._without_since = 0.0, time.monotonic()

    @_asking_ray
    def machines(self) -> dict[str, MachineFacts]:
        if time.monotonic() >= self._looked_at + _LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._look()
        for node, facts in list(self._starting.items()):
            if self._ray.wait([facts], timeout=0)[0]:
                self._welcome(node, self._starting.pop(node))
        seconds = time.monotonic() - self._without_since
        if self._facts:
            self._without_since = time.monotonic()
        elif self._starting and seconds > _PATIENCE_SECONDS:
            self._without_since = time.monotonic()  # for the next warning
            starting = counted(len(self._starting), "machine")
            self._warn(f"{starting} starting for {seconds:.0f} s: another run may have all of them; this one waits")
        elif not self._starting and seconds > self._patience_seconds:
            raise EncoderError(
                f"no machine of the cluster can encode since {seconds:.0f} s; the warnings of this run say why. Run "
                "again when some can: what is published stays"
            )
        return dict(self._facts)

    @_asking_ray
    def request(self, machines: int) -> None:
        # Ray keeps the request until the next one, also when the driver is killed.
        if machines != self._requested:
            from ray.autoscaler.sdk import request_resources  # pyright: ignore[reportMissingImports]

            self._requested = machines
            bundles = [self._machine] * min(machines, _MOST_REQUESTED)
            if self._ray.util.client.ray.is_connected():  # which cannot call it itself
                task = self._ray.remote(request_resources).options(num_cpus=0)
                self._last_request = task.remote(bundles=bundles)
            else:
                request_resources(bundles=bundles)

    @_asking_ray
    def embed(self, machine: str, stretch: Stretch, *, again: bool) -> RayTask:
        actor, number = self._actors[machine], next(self._numbers)
        return RayTask(machine, actor, number, actor.embed.remote(number, stretch.keys, stretch.ranges, again=again))

    @_asking_ray
    def wait(self, tasks: Sequence[RayTask], seconds: float) -> list[RayTask]:
        if not tasks:
            time.sleep(seconds)
            return []
        ready, left = self._ray.wait([task.outcome for task in tasks], num_returns=1, timeout=seconds)
        ready, _ = self._ray.wait(ready + left, num_returns=len(tasks), timeout=0)  # all that are done by now
        done = set(ready)
        return [task for task in tasks if task.outcome in done]

    @_asking_ray
    def result(self, task: RayTask) -> StretchOutcome:
        name = self._addresses.get(task.machine, task.machine)
        try:
            outcome = self._ray.get(task.outcome)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise ConfigError(f"on the machine {name}: {error.cause}") from None
            if isinstance(error.cause, SurgeError) and not isinstance(error.cause, EncoderError | TransientError):
                raise error.cause from None
            self._lose(task.machine, task.actor)
            if is_innocent := isinstance(error.cause, TransientError):
                self._innocent[task.machine] = task.actor  # which ends with another stretch
            raise MachineLost(f"the machine {name} failed: {error.cause}", is_innocent=is_innocent) from None
        except self._ray.exceptions.RayError as error:
            self._lose(task.machine, task.actor)
            is_alive = any(node["Alive"] and node["NodeID"] == task.machine for node in self._ray.nodes())
            is_innocent = not is_alive or self._innocent.get(task.machine) is task.actor
            raise MachineLost(f"the machine {name} was lost: {_in_a_line(error)}", is_innocent=is_innocent) from None
        self._starts[task.machine] = 0
        return outcome

    def stop(self, task: RayTask) -> None:
        self._tell(lambda: task.actor.stop.remote(task.number))

    def refuse(self, machine: str) -> None:
        self._starts[machine], self._innocent[machine] = _MOST_STARTS, self._actors.get(machine)
        self._lose(machine)

    def is_starting(self) -> bool:
        return bool(self._starting)

    def close(self) -> None:
        self._tell(lambda: self.request(0))
        self._tell(lambda: self._ray.get(self._last_request, timeout=_CLOSE_SECONDS))
        for node in list(self._actors):
            self._lose(node)
        with contextlib.suppress(Exception):
            self._ray.shutdown()

    def _tell(self, call: Callable[[], object]) -> None:
        """Ask Ray for what does not matter where the cluster has ended."""
        with contextlib.suppress(Exception):
            if self._ray.is_initialized():
                call()

    def _look(self) -> None:
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        self._addresses |= {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        alive = {node["NodeID"]: node["Resources"] for node in nodes}
        kind = self._kind or ("GPU" if any(resources.get("GPU") for resources in alive.values()) else "CPU")
        able = {node: resources for node, resources in alive.items() if resources.get(kind)}
        patience, before = _PATIENCE_SECONDS if able else _START_SECONDS, self._patience_seconds
        if patience > before:
            self._warn(f"no node of the cluster has a {kind}; this run waits {patience:.0f} s for one that joins")
        self._patience_seconds = patience
        self._machine = {kind: max((resources[kind] for resources in able.values()), default=1)}
        for node in self._actors.keys() - alive.keys():
            self._lose(node)
        for node, resources in able.items():
            is_due = time.monotonic() >= self._start_again_at.get(node, 0.0)
            if node not in self._actors and is_due and self._starts.get(node, 0) < _MOST_STARTS:
                self._start(node, kind, resources[kind])

    def _start(self, node: str, kind: str, count: float) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode  # pyright: ignore[reportMissingImports]

        self._starts[node] = self._starts.get(node, 0) + 1
        options = {
            "num_cpus": count if kind == "CPU" else 0,
            "num_gpus": count if kind == "GPU" else 0,
            "max_concurrency": STRETCHES_AT_ONCE + 1,  # and the calls that stop them
            "scheduling_strategy": OnNode(node_id=node, soft=False),
        }
        actor = self._ray.remote(Machine).options(**options).remote(self._runs)
        self._actors[node], self._starting[node] = actor, actor.facts.remote()

    def _welcome(self, node: str, coming: Any) -> None:
        try:
            facts: MachineFacts = replace(self._ray.get(coming), host=self._addresses[node])
            require_alike(facts, self._space, self._precision)
        except ConfigError as error:
            self._warn(str(error))
            self.refuse(node)
        except self._ray.exceptions.RayError as error:
            self._warn(f"the machine {self._addresses.get(node, node)} does not start: {_in_a_line(error)}")
            self._lose(node)
        else:
            self._facts[node], self._precision = facts, facts.precision

    def _lose(self, node: str, lost: Any = None) -> None:
        """End the node's actor, unless it is another one than the `lost` one by now."""
        if lost is not None and self._actors.get(node) is not lost:
            return
        self._facts.pop(node, None)
        self._starting.pop(node, None)
        self._start_again_at[node] = time.monotonic() + _START_AGAIN_SECONDS
        if (actor := self._actors.pop(node, None)) is not None:
            self._tell(lambda: self._ray.kill(actor))


def _in_a_line(error: Exception) -> str:
    """What Ray says in many lines: the first one, or the last one of another process' error."""
    lines = str(getattr(error, "cause", None) or error).strip().splitlines() or [type(error).__name__]
    is_remote = "creation task" in lines[0] or "Traceback (most recent call last):" in lines
    return (lines[-1] if is_remote else lines[0]).removesuffix(".")
