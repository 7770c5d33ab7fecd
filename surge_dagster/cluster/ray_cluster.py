"""Machines of a Ray cluster: one actor on each, which owns an encoder pool with a worker per GPU.

Only Ray's core is used. Machines that join are found within seconds. Ray notices a machine that
ends, and starts an actor again whose process ended. The actors end with the process that started
them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

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

_LOOK_SECONDS = 2.0  # between two looks at the nodes
_MOST_RESTARTS = 10  # of an actor whose process ended, by Ray
_PATIENCE_SECONDS = 120.0  # without any machine that encodes
_START_SECONDS = 900.0  # likewise if there is no node, which an autoscaler may be starting
_CLOSE_SECONDS = 5.0
# of Ray's resources, by kind of device
_KINDS: dict[str | None, str] = {"cuda": "GPU", "cpu": "CPU"}
_MOST_REQUESTED = 1_000  # an autoscaler has a limit of its own


@dataclass(frozen=True, eq=False, slots=True)
class RayTask:
    """A stretch under way; `outcome` is Ray's reference to it."""

    machine: str
    actor: Any
    number: int
    outcome: Any


class RayCluster:
    """The nodes of a Ray cluster that can encode: those of the setting `devices`, for auto those
    with GPUs or else all.

    Args:
        address: "auto" is the cluster of this machine, or of RAY_ADDRESS; else such as
            `ray://head:10001`.
        runs: makes the runs of each machine.
        space: that all must encode into.
        warn: takes a line about each machine that is not used.

    Raises:
        ConfigError: Ray is not installed, or the address is none.
        TransientError: there is no such cluster, or it does not answer.
    """

    def __init__(
        self,
        address: str,
        runs: CatalogRuns,
        space: Space,
        warn: Callable[[str], None],
        devices: str,
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
            raise ConfigError(
                f"{address!r} is no address of a Ray cluster: {_in_a_line(error)}"
            ) from None
        except (ConnectionError, RuntimeError) as error:
            raise TransientError(
                f"the Ray cluster {address!r} cannot be reached: {_in_a_line(error)}"
            ) from None
        self._runs = runs
        self._space = space
        self._warn = warn
        self._numbers = itertools.count()
        self._actors: dict[str, Any] = {}  # by node
        self._starting: dict[str, Any] = {}  # facts that come, by node
        self._facts: dict[str, MachineFacts] = {}
        self._left_out = set[str]()
        self._addresses: dict[str, str] = {}
        self._precision: str | None = None  # of the first machine, and so of all
        # None: by what the nodes have
        self._kind = _KINDS.get(device_kind(device_names(devices)[0]))
        self._machine = {self._kind or "CPU": 1.0}  # the resources of one
        self._patience_seconds = _PATIENCE_SECONDS
        self._requested = 0
        self._last_request = None
        self._looked_at = 0.0
        self._without_since = time.monotonic()

    def machines(self) -> dict[str, MachineFacts]:
        if time.monotonic() >= self._looked_at + _LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._look()
        for node, facts in list(self._starting.items()):
            with self._asking():
                is_ready = bool(self._ray.wait([facts], timeout=0)[0])
            if is_ready:
                self._welcome(node, self._starting.pop(node))

        seconds = time.monotonic() - self._without_since
        if self._facts:
            self._without_since = time.monotonic()
        elif self._starting and seconds > _PATIENCE_SECONDS:
            self._without_since = time.monotonic()  # for the next warning
            starting = counted(len(self._starting), "machine")
            self._warn(
                f"{starting} starting for {seconds:.0f} s: another run may have all of them; this one waits"
            )
        elif not self._starting and seconds > self._patience_seconds:
            raise EncoderError(
                f"no machine of the cluster has been able to encode for {seconds:.0f} s; the "
                "warnings of this run say why. Run again when some can: what is published stays"
            )
        return dict(self._facts)

    def request(self, machines: int) -> None:
        # Ray keeps the request until the next one, also when the driver is killed.
        if machines == self._requested:
            return
        from ray.autoscaler.sdk import request_resources  # pyright: ignore[reportMissingImports]

        self._requested = machines
        bundles = [self._machine] * min(machines, _MOST_REQUESTED)
        with self._asking():
            if self._ray.util.client.ray.is_connected():  # which cannot call it itself
                task = self._ray.remote(request_resources).options(num_cpus=0)
                self._last_request = task.remote(bundles=bundles)
            else:
                request_resources(bundles=bundles)

    def embed(self, machine: str, stretch: Stretch) -> RayTask:
        actor, number = self._actors[machine], next(self._numbers)
        with self._asking():
            call = actor.embed.options(max_task_retries=0)  # the driver decides who does it again
            outcome = call.remote(number, stretch.keys, stretch.ranges, again=stretch.is_again)
        return RayTask(machine, actor, number, outcome)

    def wait(self, tasks: Sequence[RayTask], seconds: float) -> list[RayTask]:
        if not tasks:
            time.sleep(seconds)
            return []
        with self._asking():
            ready, left = self._ray.wait(
                [task.outcome for task in tasks], num_returns=1, timeout=seconds
            )
            # all that are done by now
            ready, _ = self._ray.wait(ready + left, num_returns=len(tasks), timeout=0)
        done = set(ready)
        return [task for task in tasks if task.outcome in done]

    def result(self, task: RayTask) -> StretchOutcome:
        name = self._addresses.get(task.machine, task.machine)
        with self._asking():
            outcome = self._get(task.outcome)

        if isinstance(outcome, self._ray.exceptions.RayTaskError):
            cause = outcome.cause
            if isinstance(cause, EncoderError):
                self._await_restart(task, ends_it=True)
                raise MachineLost(f"the machine {name} failed: {cause}") from None
            if isinstance(cause, ConfigError):
                raise ConfigError(f"on the machine {name}: {cause}") from None
            if isinstance(cause, SurgeError | OSError):
                raise cause from None
            raise outcome  # a defect, with the traceback of the machine
        if isinstance(outcome, self._ray.exceptions.RayError):
            self._await_restart(task, ends_it=False)
            raise MachineLost(f"the machine {name} was lost: {_in_a_line(outcome)}")
        return outcome

    def stop(self, task: RayTask) -> None:
        with suppress(TransientError), self._asking():
            task.actor.stop.remote(task.number)

    def leave_out(self, machine: str) -> None:
        self._left_out.add(machine)
        self._end(machine)

    def is_starting(self) -> bool:
        return bool(self._starting)

    def close(self) -> None:
        with suppress(TransientError):
            self.request(0)
        if self._last_request is not None:
            with suppress(TransientError), self._asking():
                self._ray.get(self._last_request, timeout=_CLOSE_SECONDS)
        for node in list(self._actors):
            self._end(node)
        with suppress(Exception):
            self._ray.shutdown()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Raise a passing error if the cluster is gone; everything inside is a call of Ray."""
        if not self._ray.is_initialized():  # each call would look for another cluster for a minute
            raise _no_answer("its head ended, or the network to it")
        try:
            yield
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise _no_answer(_in_a_line(error)) from error
        except Exception as error:
            if self._ray.is_initialized():
                raise
            raise _no_answer(_in_a_line(error)) from error  # Ray's client raises bare exceptions

    def _get(self, reference: Any) -> Any:
        """Return a call's value, or the error of the call or of its machine."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return error

    def _look(self) -> None:
        with self._asking():
            nodes = [node for node in self._ray.nodes() if node["Alive"]]
        self._addresses |= {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        alive = {node["NodeID"]: node["Resources"] for node in nodes}
        kind = self._kind
        if kind is None:
            kind = "GPU" if any(resources.get("GPU") for resources in alive.values()) else "CPU"
        able = {node: resources for node, resources in alive.items() if resources.get(kind)}

        patience = _PATIENCE_SECONDS if able else _START_SECONDS
        if patience > self._patience_seconds:
            self._warn(
                f"no node of the cluster has a {kind}; this run waits {patience:.0f} s for one that joins"
            )
        self._patience_seconds = patience
        self._machine = {kind: max((resources[kind] for resources in able.values()), default=1)}

        for node in self._actors.keys() - alive.keys():
            self._end(node)
        for node, resources in able.items():
            if node not in self._actors and node not in self._left_out:
                self._start(node, kind, resources[kind])

    def _start(self, node: str, kind: str, count: float) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode  # pyright: ignore[reportMissingImports]

        options = {
            "num_cpus": count if kind == "CPU" else 0,
            "num_gpus": count if kind == "GPU" else 0,
            "max_concurrency": STRETCHES_AT_ONCE + 1,  # and the calls that stop them
            "max_restarts": _MOST_RESTARTS,
            "max_task_retries": -1,  # so that `facts` waits for a restart
            "scheduling_strategy": OnNode(node_id=node, soft=False),
        }
        with self._asking():
            actor = self._ray.remote(Machine).options(**options).remote(self._runs)
            self._starting[node] = actor.facts.remote()
        self._actors[node] = actor

    def _welcome(self, node: str, coming: Any) -> None:
        with self._asking():
            facts = self._get(coming)
        name = self._addresses.get(node, node)
        if isinstance(facts, Exception):
            if self._is_alive(node):
                self._warn(f"the machine {name} does not start: {_in_a_line(facts)}")
                self._left_out.add(node)
            self._end(node)
            return

        facts = replace(facts, host=name)
        try:
            require_alike(facts, self._space, self._precision)
        except ConfigError as error:
            self._warn(str(error))
            self.leave_out(node)
        else:
            self._facts[node] = facts
            self._precision = facts.precision

    def _is_alive(self, node: str) -> bool:
        with self._asking():
            return any(each["Alive"] and each["NodeID"] == node for each in self._ray.nodes())

    def _await_restart(self, task: RayTask, *, ends_it: bool) -> None:
        """Give an actor no work until Ray has started it again.

        Args:
            ends_it: whether its process runs, and has to end first.
        """
        node = task.machine
        if self._actors.get(node) is not task.actor or self._facts.pop(node, None) is None:
            return
        with self._asking():
            if ends_it:
                self._ray.kill(task.actor, no_restart=False)
            self._starting[node] = task.actor.facts.remote()

    def _end(self, node: str) -> None:
        """End the node's actor."""
        self._facts.pop(node, None)
        self._starting.pop(node, None)
        actor = self._actors.pop(node, None)
        if actor is not None:
            with suppress(TransientError), self._asking():
                self._ray.kill(actor)


def _no_answer(reason: str) -> TransientError:
    return TransientError(
        f"the Ray cluster does not answer any more: {reason}. Run again when it does: what is published stays"
    )


def _in_a_line(error: Exception) -> str:
    """What Ray says in many lines: the first one, or the last one of another process' error."""
    lines = str(getattr(error, "cause", None) or error).strip().splitlines() or [
        type(error).__name__
    ]
    is_remote = "creation task" in lines[0] or "Traceback (most recent call last):" in lines
    return (lines[-1] if is_remote else lines[0]).removesuffix(".")
