"""The machines of a Ray cluster: one actor on each, which owns an encoder pool with a worker per GPU of its machine.

Only Ray's core is used. Machines that join are found within seconds; a machine that ends is noticed by Ray, and its
actor is started again when it comes back. The actors end with the process that started them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surge_dagster.cluster.cluster_run import MachineLost
from surge_dagster.cluster.machine import CatalogRuns, Machine, MachineFacts, StretchOutcome, require_alike
from surge_dagster.cluster.stretches import Stretch
from surge_dagster.engine.errors import ConfigError, EncoderError, SurgeError, TransientError
from surge_dagster.engine.model.spec import Space

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0  # between two looks at the nodes
_START_AGAIN_SECONDS = 10.0  # after an actor has ended
_MOST_STARTS = 5  # in a row, of one node
_PATIENCE_SECONDS = 120.0  # without any machine


class RayCluster:
    """The nodes of a Ray cluster that can encode: those with GPUs, or all where none has one.

    Args:
        address: "auto" is the cluster of this machine, or of RAY_ADDRESS; else such as `ray://head:10001`.
        runs: makes the runs of each machine.
        space: that all must encode into.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """

    def __init__(self, address: str, runs: CatalogRuns, space: Space) -> None:
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
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"the Ray cluster {address!r} cannot be reached: {error}") from None
        self._runs, self._space = runs, space
        self._actors: dict[str, Any] = {}  # by node
        self._starting: dict[str, Any] = {}  # facts that come, by node
        self._addresses: dict[str, str] = {}
        self._facts: dict[str, MachineFacts] = {}
        self._starts: dict[str, int] = {}
        self._start_again_at: dict[str, float] = {}
        self._looked_at, self._without_since = 0.0, time.monotonic()

    def machines(self) -> dict[str, MachineFacts]:
        if time.monotonic() >= self._looked_at + _LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._look()
        for node, facts in list(self._starting.items()):
            if self._ray.wait([facts], timeout=0)[0]:
                self._welcome(node, self._starting.pop(node))
        if self._facts or self._starting:
            self._without_since = time.monotonic()
        elif time.monotonic() > self._without_since + _PATIENCE_SECONDS:
            raise EncoderError(
                f"no machine of the cluster can encode since {_PATIENCE_SECONDS:.0f} s; the warnings of this run say "
                "why. Run again when some can: what is published stays"
            )
        return dict(self._facts)

    def embed(self, machine: str, stretch: Stretch, *, again: bool) -> tuple[str, Any]:
        return machine, self._actors[machine].embed.remote(stretch.keys, stretch.ranges, again=again)

    def wait(self, tasks: Sequence[tuple[str, Any]], seconds: float) -> list[tuple[str, Any]]:
        if not tasks:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait([outcome for _, outcome in tasks], num_returns=1, timeout=seconds)
        return [task for task in tasks if task[1] in ready]

    def result(self, task: tuple[str, Any]) -> StretchOutcome:
        machine, outcome = task
        try:
            return self._ray.get(outcome)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SurgeError) and not isinstance(error.cause, EncoderError | TransientError):
                raise error.cause from None
            self._lose(machine)
            raise MachineLost(f"the machine {self._name(machine)} failed: {error.cause}") from None
        except self._ray.exceptions.RayError as error:
            name = self._name(machine)
            self._lose(machine)
            raise MachineLost(f"the machine {name} was lost: {_in_a_line(error)}") from None

    def stop(self, machine: str) -> None:
        if machine in self._actors:
            self._actors[machine].stop.remote()

    def close(self) -> None:
        for node in list(self._actors):
            self._lose(node)
        self._ray.shutdown()

    def _name(self, machine: str) -> str:
        return self._addresses.get(machine, machine)

    def _look(self) -> None:
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        self._addresses |= {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        alive = {node["NodeID"]: node["Resources"] for node in nodes}
        has_gpus = any(resources.get("GPU") for resources in alive.values())
        able = {node: resources for node, resources in alive.items() if not has_gpus or resources.get("GPU")}
        for node in self._actors.keys() - alive.keys():
            self._lose(node)
        for node, resources in able.items():
            is_due = time.monotonic() >= self._start_again_at.get(node, 0.0)
            if node not in self._actors and is_due and self._starts.get(node, 0) < _MOST_STARTS:
                self._start(node, resources)

    def _start(self, node: str, resources: dict[str, float]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode  # pyright: ignore[reportMissingImports]

        self._starts[node] = self._starts.get(node, 0) + 1
        options = {
            "num_cpus": 0 if resources.get("GPU") else resources.get("CPU", 1),
            "num_gpus": resources.get("GPU", 0),
            "max_concurrency": 2,  # a stretch, and the call that stops it
            "scheduling_strategy": OnNode(node_id=node, soft=False),
        }
        actor = self._ray.remote(Machine).options(**options).remote(self._runs)
        self._actors[node], self._starting[node] = actor, actor.facts.remote()

    def _welcome(self, node: str, coming: Any) -> None:
        try:
            facts: MachineFacts = replace(self._ray.get(coming), host=self._addresses[node])
            require_alike(facts, self._space, next((known.precision for known in self._facts.values()), None))
        except ConfigError as error:
            log.warning("%s", error)
            self._starts[node] = _MOST_STARTS
            self._lose(node)
        except self._ray.exceptions.RayError as error:
            log.warning("the machine %s does not start: %s", self._name(node), _in_a_line(error))
            self._lose(node)
        else:
            self._facts[node], self._starts[node] = facts, 0

    def _lose(self, node: str) -> None:
        self._facts.pop(node, None)
        self._starting.pop(node, None)
        self._start_again_at[node] = time.monotonic() + _START_AGAIN_SECONDS
        if (actor := self._actors.pop(node, None)) is not None:
            with contextlib.suppress(Exception):  # it has ended
                self._ray.kill(actor)


def _in_a_line(error: Exception) -> str:
    """What Ray says in many lines: of an error that an actor raised at its start the last one, else the first one."""
    lines = str(getattr(error, "cause", None) or error).strip().splitlines()
    return lines[-1] if "creation task" in lines[0] else lines[0]
