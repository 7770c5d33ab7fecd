"""Runs that are waiting or going on: whether their process still lives, and which partitions they hold.

Dagster's own monitoring cannot look into processes of this machine. A run that was killed together with the server
that launched it would stay "started" for ever, and its partitions and its slot of the pool with it. So a run tags
itself with the process that executes it, and whoever looks at the runs compares.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.execution.context.system import StepExecutionContext
from dagster._core.execution.retries import RetryMode
from dagster._core.storage.tags import HIDDEN_TAG_PREFIX

from surge_dagster.engine.errors import ConfigError
from surge_dagster.orchestration.launch import keys_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.run_assets import embeds
from surge_dagster.orchestration.selection import Select

# Bookkeeping, with the prefix that Dagster's UI leaves out: its list of runs has room for three tags.
_HOST_TAG = f"{HIDDEN_TAG_PREFIX}surge/host"
_MACHINE_TAG = f"{HIDDEN_TAG_PREFIX}surge/machine"
_PROCESS_TAG = f"{HIDDEN_TAG_PREFIX}surge/process"
# Dagster copies the tags of a run to the one that goes on from it, whose process is another.
_SIGNED_TAG = f"{HIDDEN_TAG_PREFIX}surge/signed_by"
_FIRST_NAMESPACE = 0xEFFFFFFC  # of processes outside containers, on every Linux
_ENDED = "ZX"  # whoever started it has not asked for its end, and may never do
_EXECUTING = (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING)
_ACTIVE = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.MANAGED,
    dg.DagsterRunStatus.STARTING,
    *_EXECUTING,
]
_RUNS_NAMED = 3


@dataclass(frozen=True, slots=True)
class Held:
    """What active runs hold.

    Attributes:
        keys: partition keys that they may touch, None for all.
        run_ids: of those that hold any, first those that hold all.
    """

    keys: set[str] | None
    run_ids: tuple[str, ...] = ()

    def __contains__(self, partition_key: str) -> bool:
        return self.keys is None or partition_key in self.keys

    @property
    def by(self) -> str:
        """Which runs they are, for a person: one that never goes on holds its partitions until somebody ends it."""
        more = len(self.run_ids) - _RUNS_NAMED
        named = ", ".join(self.run_ids[:_RUNS_NAMED]) + (f" and {more:,} more" if more > 0 else "")
        return f"active runs ({named}; terminate one that does not go on)"


def process_tags(step: StepExecutionContext | None = None, run_id: str | None = None) -> dict[str, str]:
    """Tags by which a run names the process that executes it.

    Args:
        run_id: of the run, by which tags that it was launched with are told from its own.
        step: where it is executed. An executor with a process for each step leaves retries to the process that started
            it, and that one is the run's: a step's own is gone while its run still ends.
    """
    apart = step is not None and step.retry_mode is RetryMode.DEFERRED
    process = _process(os.getppid() if apart else os.getpid())
    tags = {_HOST_TAG: _host(), _MACHINE_TAG: _machine(), _PROCESS_TAG: process}
    return tags if run_id is None else tags | {_SIGNED_TAG: run_id}


def active_runs(instance: dg.DagsterInstance, concerned: Callable[[dg.DagsterRun], bool]) -> Iterator[dg.DagsterRun]:
    """Runs that are waiting or going on; one whose process is gone is declared failed instead of being yielded."""
    for run in instance.get_runs(filters=dg.RunsFilter(statuses=_ACTIVE)):
        if not concerned(run):
            continue
        if _is_here(run):
            pid = run.tags.get(_PROCESS_TAG, "").partition("@")[0]
            if pid.isdigit() and _process(int(pid)) != run.tags[_PROCESS_TAG]:
                declare_lost(instance, run.run_id, f"The process of this run ({pid}) is gone; it was killed.")
                continue
        yield run


def is_elsewhere(run: dg.DagsterRun) -> bool:
    """Whether a run has said that it is executed on a machine, or in a container, whose processes cannot be seen."""
    return _host_of(run) is not None and not _is_here(run)


def declare_lost(instance: dg.DagsterInstance, run_id: str, why: str) -> None:
    """End a run on record whose process is gone, unless it has ended since it was looked up."""
    run = instance.get_run_by_id(run_id)  # a process that is gone by now may have told of its end before it went
    if run is None or run.status not in _EXECUTING:
        return
    if run.status is dg.DagsterRunStatus.CANCELING:  # failed, it would be launched again
        instance.report_run_canceled(run, f"{why} It had been asked to end.")
    else:
        instance.report_run_failed(run, why)


def held_by_active_runs(names: CatalogNames, instance: dg.DagsterInstance, *, entirely: bool = False) -> Held:
    """The partitions that active runs may touch.

    Args:
        entirely: only of runs that see to all that they hold; one that selects a state passes others over.
    """
    op_names = (names.embeddings_op, names.refresh_op)
    active = active_runs(instance, partial(embeds, names, instance))
    runs = [run for run in active if not (entirely and _selects_a_state(run, op_names))]
    registered = dict.fromkeys(instance.get_dynamic_partitions(names.partitions_name)) if runs else {}
    held: set[str] = set()
    all_of_it, some = list[str](), list[str]()
    for run in runs:
        keys = held_keys(run, registered, op_names)
        (all_of_it if keys is None else some).append(run.run_id)
        held |= keys or set()
    return Held(None if all_of_it else held, (*all_of_it, *some))


def held_keys(run: dg.DagsterRun, registered: Mapping[str, None], op_names: Sequence[str]) -> set[str] | None:
    """The partition keys that a run may touch, None for all of them.

    Args:
        run: one that embeds partitions.
        registered: the dynamic partitions in Dagster's order.
        op_names: the ops whose config can name keys.
    """
    for config in _configs(run, op_names):
        try:
            named = keys_of(config.get("keys"), config.get("keys_file"))
        except ConfigError:
            continue  # the run will fail on it; until then the range below is what it may hold
        if named is not None:
            return {*named, *map(to_partition_key, filter(None, named))}  # a person may have typed either form
    if "dagster/partition" in run.tags:
        return {run.tags["dagster/partition"]}
    first = run.tags.get("dagster/asset_partition_range_start")
    last = run.tags.get("dagster/asset_partition_range_end")
    if first is None or last is None or first not in registered or last not in registered:
        return None
    ordered = list(registered)
    return set(ordered[ordered.index(first) : ordered.index(last) + 1])


def _selects_a_state(run: dg.DagsterRun, op_names: Sequence[str]) -> bool:
    return any((config.get("select") or Select.all.name) != Select.all.name for config in _configs(run, op_names))


def _configs(run: dg.DagsterRun, op_names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    ops: Mapping[str, Any] = dict(run.run_config).get("ops") or {}  # pyright: ignore[reportAssignmentType]
    for name in op_names:
        yield (ops.get(name) or {}).get("config") or {}


def _host_of(run: dg.DagsterRun) -> str | None:
    """Where a run that has begun is executed, None when it has not said so."""
    is_signed = run.tags.get(_SIGNED_TAG, run.run_id) == run.run_id
    return run.tags.get(_HOST_TAG) if is_signed and run.status in _EXECUTING else None


def _is_here(run: dg.DagsterRun) -> bool:
    """Whether process ids mean to a run what they mean here, now or before this machine was started again.

    Name and namespace are not enough: machines may share a name, and outside containers all have one namespace number.
    """
    if _host_of(run) != _host():
        return False
    machine = _machine()
    same_start = run.tags.get(_PROCESS_TAG, "").rpartition("/")[2] == _start_of_machine()
    return same_start or (machine != "" and run.tags.get(_MACHINE_TAG) == machine)


def _host() -> str:
    # The number of the process namespace tells apart containers of one name: their process ids mean different things.
    return f"{socket.gethostname()}/{_namespace()}"


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _machine() -> str:
    """What stays when this machine is started again; "" without an id, and in a container: it may be its image's."""
    machine_id = _line("/etc/machine-id") if _namespace() == _FIRST_NAMESPACE else ""
    return machine_id and hashlib.sha256(machine_id.encode()).hexdigest()[:16]  # the id itself is not to be told


def _start_of_machine() -> str:
    return _line("/proc/sys/kernel/random/boot_id")


def _line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _process(pid: int) -> str:
    # Not the time of day when it was started, which moves with the clock: ticks since a certain start of the machine.
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    start = _start_of_machine()
    state, *counts = status.rpartition(")")[2].split()
    return "" if state in _ENDED or not start else f"{pid}@{counts[18]}/{start}"
