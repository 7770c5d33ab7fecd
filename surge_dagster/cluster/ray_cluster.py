"""Machines of a Ray cluster: one actor on each, which owns an encoder pool with a worker per GPU.

Only Ray's core is used. Machines that join are found within seconds. Ray notices a machine that
ends, and starts an actor again whose process ended. The actors end with the driver.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from surge_dagster.cluster.machine import (
    STRETCHES_AT_ONCE,
    Machine,
    MachineFacts,
    MachineLost,
    Stretch,
    StretchOutcome,
    require_alike,
)
from surge_dagster.config.run_setup import RunSetup
from surge_dagster.engine.encoder.devices import device_kind, device_names
from surge_dagster.engine.errors import ConfigError, EncoderError, SurgeError, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Freshness
from surge_dagster.engine.support.counts import counted

_LOOK_SECONDS = 2.0  # between two looks at the nodes
_MOST_RESTARTS = 10  # of an actor whose process ended, by Ray
_WARN_SECONDS = 120.0  # without any machine that encodes
_PATIENCE_SECONDS = 900.0  # likewise: an autoscaler may be starting one
_CLOSE_SECONDS = 5.0
# of Ray's resources, by kind of device
_KINDS: dict[str | None, str] = {"cuda": "GPU", "cpu": "CPU"}
_MOST_REQUESTED = 1_000  # an autoscaler has a limit of its own


@dataclass(frozen=True, eq=False, slots=True)
class RayTask:
    """A stretch under way; `outcome` is Ray's reference to it."""

    node: str
    actor: Any
    number: int
    outcome: Any


@dataclass(slots=True)
class _Node:
    """A node with an actor.

    Attributes:
        starting: Ray's reference to the facts of an actor that starts.
        facts: of an actor that can encode.
    """

    actor: Any
    starting: Any
    facts: MachineFacts | None = None


class RayCluster:
    """The nodes of a Ray cluster that can encode: those of the setting `devices`, for auto those
    with GPUs or else all.

    Args:
        address: "auto" is the cluster of this machine, or of RAY_ADDRESS; else such as
            `ray://head:10001`.
        space: that all must encode into.
        warn: takes a line about each machine that is not used.
        token: see `write_token`.

    Raises:
        ConfigError: Ray is not installed, or this is no address.
        TransientError: there is no such cluster, or it does not answer.
    """

    def __init__(
        self,
        address: str,
        setup: RunSetup,
        space: Space,
        warn: Callable[[str], None],
        token: str,
    ) -> None:
        self._ray = _connected(address)
        self._setup = setup
        self._space = space
        self._warn = warn
        self._token = token
        self._numbers = itertools.count()
        self._nodes: dict[str, _Node] = {}
        self._addresses: dict[str, str] = {}  # by node
        self._left_out: set[str] = set()  # nodes
        self._precision: str | None = None  # of the first machine, and so of all
        # None: by what the nodes have
        self._kind = _KINDS.get(device_kind(device_names(setup.encoder.devices)[0]))
        self._machine = {self._kind or "CPU": 1.0}  # the resources of one
        self._warn_after_seconds = _WARN_SECONDS
        self._requested = 0
        self._last_request = None
        self._looked_at = 0.0
        self._without_since = time.monotonic()

    def machines(self) -> dict[str, MachineFacts]:
        if time.monotonic() >= self._looked_at + _LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._look()
        for name, node in list(self._nodes.items()):
            if node.starting is None:
                continue
            with self._calling():
                ready, _ = self._ray.wait([node.starting], timeout=0)
            if ready:
                self._welcome(name, node)

        able = {name: node.facts for name, node in self._nodes.items() if node.facts is not None}
        if able:
            self._without_since = time.monotonic()
            self._warn_after_seconds = _WARN_SECONDS
        else:
            self._require_patience()
        return able

    def request(self, machines: int) -> None:
        # Ray keeps the request until the next one, also when the driver is killed.
        if machines == self._requested:
            return
        from ray.autoscaler.sdk import request_resources  # pyright: ignore[reportMissingImports]

        self._requested = machines
        bundles = [self._machine] * min(machines, _MOST_REQUESTED)
        with self._calling():
            if self._ray.util.client.ray.is_connected():  # which cannot call it itself
                task = self._ray.remote(request_resources).options(num_cpus=0)
                self._last_request = task.remote(bundles=bundles)
            else:
                request_resources(bundles=bundles)

    def embed(self, machine: str, stretch: Stretch, freshness: Mapping[str, Freshness]) -> RayTask:
        actor = self._nodes[machine].actor
        number = next(self._numbers)
        with self._calling():
            # It is done once: the driver hands it out again itself.
            call = actor.embed.options(max_task_retries=0)
            return RayTask(machine, actor, number, call.remote(number, stretch.piece, freshness))

    def wait(self, tasks: Sequence[RayTask], seconds: float) -> list[RayTask]:
        if not tasks:
            time.sleep(seconds)
            return []
        outcomes = [task.outcome for task in tasks]
        with self._calling():
            self._ray.wait(outcomes, num_returns=1, timeout=seconds)
            ready, _ = self._ray.wait(outcomes, num_returns=len(outcomes), timeout=0)
        done = set(ready)
        return [task for task in tasks if task.outcome in done]

    def result(self, task: RayTask) -> StretchOutcome:
        name = self._addresses.get(task.node, task.node)
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
        with suppress(TransientError), self._calling():
            task.actor.stop.remote(task.number)

    def leave_out(self, machine: str) -> None:
        self._left_out.add(machine)
        self._end(machine)

    def close(self) -> None:
        with suppress(TransientError):
            self.request(0)
        if self._last_request is not None:
            with suppress(TransientError), self._calling():
                self._ray.wait([self._last_request], timeout=_CLOSE_SECONDS)
        for name in list(self._nodes):
            self._end(name)
        with suppress(TransientError), self._calling():
            self._ray.shutdown()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Raise a passing error if the cluster is gone; everything inside is a call of Ray."""
        if not self._ray.is_initialized():  # each call would look for another cluster for a minute
            raise _no_answer("its head ended, or the network to it")
        try:
            yield
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise _no_answer(_in_a_line(error)) from error
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise _no_answer(_in_a_line(error)) from error  # Ray's client raises bare exceptions

    def _get(self, reference: Any) -> Any:
        """Return a call's value, or the error of the call or of its machine."""
        with self._calling():
            try:
                return self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                return error

    def _require_patience(self) -> None:
        """Warn or raise if no machine has been able to encode for long."""
        seconds = time.monotonic() - self._without_since
        starting = sum(node.starting is not None for node in self._nodes.values())
        if seconds > _PATIENCE_SECONDS and not starting:
            raise EncoderError(
                f"No machine of the cluster has been able to encode for {seconds:.0f} s. The "
                "warnings of this run say why. Run again when one can: what is published stays."
            )
        if seconds > self._warn_after_seconds:
            self._warn_after_seconds = seconds + _WARN_SECONDS
            self._warn(
                f"no machine with the resource {next(iter(self._machine))} has been able to encode "
                f"for {seconds:.0f} s; {counted(starting, 'machine')} starting, and this run waits"
            )

    def _look(self) -> None:
        """Start an actor on each node that is new, and forget nodes that have ended."""
        with self._calling():
            nodes = [node for node in self._ray.nodes() if node["Alive"]]
        self._addresses |= {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        resources = {node["NodeID"]: node["Resources"] for node in nodes}

        kind = self._kind
        if kind is None:
            has_gpus = any(of_node.get("GPU") for of_node in resources.values())
            kind = "GPU" if has_gpus else "CPU"
        counts = {name: of_node[kind] for name, of_node in resources.items() if of_node.get(kind)}
        self._machine = {kind: max(counts.values(), default=1)}

        for name in self._nodes.keys() - resources.keys():
            self._end(name)
        for name, count in counts.items():
            if name not in self._nodes and name not in self._left_out:
                self._start(name, kind, count)

    def _start(self, name: str, kind: str, count: float) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode  # pyright: ignore[reportMissingImports]

        options = {
            "num_cpus": count if kind == "CPU" else 0,
            "num_gpus": count if kind == "GPU" else 0,
            "max_concurrency": STRETCHES_AT_ONCE + 1,  # and the calls that stop them
            "max_restarts": _MOST_RESTARTS,
            "max_task_retries": -1,  # so that `facts` waits for a restart
            "scheduling_strategy": OnNode(node_id=name, soft=False),
        }
        with self._calling():
            actor = self._ray.remote(Machine).options(**options).remote(self._setup, self._token)
            self._nodes[name] = _Node(actor, actor.facts.remote())

    def _welcome(self, name: str, node: _Node) -> None:
        """Use a machine whose actor has started, if it makes the same vectors."""
        facts = self._get(node.starting)
        node.starting = None
        address = self._addresses.get(name, name)
        if isinstance(facts, Exception):
            self._warn(f"the machine {address} does not start: {_in_a_line(facts)}")
            self.leave_out(name)
            return

        facts = replace(facts, host=address)
        try:
            require_alike(facts, self._space, self._precision)
        except ConfigError as error:
            self._warn(str(error))
            self.leave_out(name)
        else:
            node.facts = facts
            self._precision = facts.precision

    def _await_restart(self, task: RayTask, *, ends_it: bool) -> None:
        """Give an actor no work until Ray has started it again.

        Args:
            ends_it: whether its process runs, and has to end first.
        """
        node = self._nodes.get(task.node)
        if node is None or node.actor is not task.actor or node.facts is None:
            return
        node.facts = None
        with self._calling():
            if ends_it:
                self._ray.kill(task.actor, no_restart=False)
            node.starting = task.actor.facts.remote()

    def _end(self, name: str) -> None:
        """End the node's actor."""
        node = self._nodes.pop(name, None)
        if node is not None:
            with suppress(TransientError), self._calling():
                self._ray.kill(node.actor)


def _connected(address: str) -> Any:
    """Return the module `ray`, which is connected with a cluster."""
    try:
        import ray  # of an extra  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "A cluster needs a package that is not installed. Run: pip install 'surge-dagster[ray]'"
        ) from None

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
    return ray


def _no_answer(reason: str) -> TransientError:
    return TransientError(
        f"the Ray cluster does not answer any more: {reason}. Run again when it does: what is "
        "published stays"
    )


def _in_a_line(error: Exception) -> str:
    """Return the first line of Ray's error, or the last one of another process' error."""
    text = str(getattr(error, "cause", None) or error).strip()
    lines = text.splitlines() or [type(error).__name__]
    is_remote = "creation task" in lines[0] or "Traceback (most recent call last):" in lines
    line = lines[-1] if is_remote else lines[0]
    return line.removesuffix(".")
