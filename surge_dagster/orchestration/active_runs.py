"""Active runs of a catalog: which assets they concern, whether their process lives, and what partitions they hold.

Dagster's run monitoring asks the run launcher whether a run's process lives, and the default launcher cannot answer. So
a run tags itself with the process that executes it. A run whose process has ended is declared failed, which frees its
partitions and its slot of the pool.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg

from surge_dagster.engine.support.counts import named
from surge_dagster.orchestration.launch import Select
from surge_dagster.orchestration.names import CatalogNames

# Dagster's UI leaves out tags with this prefix. The value is "<run id> <place> <process>": Dagster copies the tags of a
# run to the run that retries it, whose process is another one.
PROCESS_TAG = ".dagster/surge/process"
_HIDDEN = "?"  # for a process that lives and that the system hides, as with the mount option `hidepid`
_ENDED = "ZX"  # states of a process that has ended and that its parent has not waited for
_EXECUTING = (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING)
_ACTIVE = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.MANAGED,
    dg.DagsterRunStatus.STARTING,
    *_EXECUTING,
]
_FIRST_NAMESPACE = 4026531836  # of process ids, outside of containers; PROC_PID_INIT_INO of the kernel
_RUNS_NAMED = 3


@dataclass(frozen=True, slots=True)
class Held:
    """The partition keys that active runs may touch, None for all, and those runs, first those that hold all."""

    keys: set[str] | None
    run_ids: tuple[str, ...] = ()

    def __contains__(self, partition_key: str) -> bool:
        return self.keys is None or partition_key in self.keys

    @property
    def by(self) -> str:
        return f"active runs ({named(self.run_ids, _RUNS_NAMED)}; terminate one that makes no progress)"


def process_tag(run_id: str, pid: int) -> str:
    return f"{run_id} {_place()} {_process(pid)}"


def active_runs(instance: dg.DagsterInstance, concerned: Callable[[dg.DagsterRun], bool]) -> Iterator[dg.DagsterRun]:
    """Yield those of the concerned runs that wait or are executed; declare a run failed whose process has ended."""
    for run in instance.get_runs(filters=dg.RunsFilter(statuses=_ACTIVE)):
        if not concerned(run):
            continue
        if _is_lost(instance, run):
            declare_lost(
                instance, run, "The process of this run has ended; it was killed, or its machine was restarted."
            )
        else:
            yield run


def embeds(names: CatalogNames, instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Whether a run embeds partitions of this catalog, or may do so: its plan cannot be read now."""
    if run.job_name in (names.refresh_job, names.embed_job):
        return True
    assets = _assets_of(instance, run)
    return assets is None or names.embeddings in assets


def held_by_active_runs(
    names: CatalogNames, instance: dg.DagsterInstance, *, entirely: bool = False, besides: str | None = None
) -> Held:
    """The partitions that active runs may touch, `besides` one; `entirely` leaves out runs that select a state."""
    op_names = (names.embeddings_op, names.refresh_op)
    runs = [
        run
        for run in active_runs(instance, partial(embeds, names, instance))
        if run.run_id != besides and not (entirely and _selects_a_state(run, op_names))
    ]
    registered = dict.fromkeys(instance.get_dynamic_partitions(names.partitions_name)) if runs else {}
    held: set[str] = set()
    holders_of_all, holders = list[str](), list[str]()
    for run in runs:
        keys = held_keys(run, registered, op_names)
        (holders_of_all if keys is None else holders).append(run.run_id)
        held |= keys or set()
    return Held(None if holders_of_all else held, (*holders_of_all, *holders))


def held_keys(run: dg.DagsterRun, registered: Mapping[str, None], op_names: Sequence[str]) -> set[str] | None:
    """The partition keys that a run which embeds may touch; None for all. `registered` is in Dagster's order."""
    for config in _configs(run, op_names):
        if config.get("keys") is not None:
            return set(config["keys"])
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


def _is_lost(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Whether a process of this machine that has ended executed the run; elsewhere process ids mean nothing here."""
    if run.status not in _EXECUTING or getattr(instance.run_launcher, "supports_check_run_worker_health", False):
        return False  # Dagster's run monitoring asks such a launcher
    run_id, _, where = run.tags.get(PROCESS_TAG, "").partition(" ")
    place, _, process = where.rpartition(" ")
    pid = process.partition("@")[0]
    return (
        run_id == run.run_id
        and place == _place()
        and (not pid or (pid.isdecimal() and _process(int(pid)) not in (process, _HIDDEN)))
    )


def declare_lost(instance: dg.DagsterInstance, seen: dg.DagsterRun, why: str, tag: str = PROCESS_TAG) -> None:
    """Declare a run failed, unless it has ended meanwhile or the tag has changed by which it was found lost."""
    run = instance.get_run_by_id(seen.run_id)
    if run is None or run.status not in _EXECUTING or run.tags.get(tag) != seen.tags.get(tag):
        return
    if run.status is dg.DagsterRunStatus.CANCELING:  # Dagster would launch a failed run again
        instance.report_run_canceled(run, f"{why} Its termination had been requested.")
    else:
        instance.report_run_failed(run, why)


def _place() -> str:
    """The host name, the machine and the process namespace; where they are equal, a process id means the same."""
    # Containers of one machine, or two machines, may have the same host name. The id of a machine survives its restart,
    # after which no earlier process lives. The id in a container may be that of its image: the boot's takes its place.
    namespace = _namespace()
    machine = _line("/etc/machine-id") if namespace == _FIRST_NAMESPACE else ""
    machine = machine or _line("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{hashlib.sha256(machine.encode()).hexdigest()[:16]}/{namespace}"


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _process(pid: int) -> str:
    """A process of this machine by its id and its start in clock ticks since the boot; empty if it has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        try:
            os.kill(pid, 0)
        except PermissionError:
            return _HIDDEN
        except ProcessLookupError:
            pass
        return ""
    state, *counts = status.rpartition(")")[2].split()
    return "" if state in _ENDED else f"{pid}@{counts[18]}"


def _assets_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Set[dg.AssetKey] | None:
    """The assets that a run executes; None where its plan cannot be read."""
    # Dagster records the assets that were selected for a run. A user's own job, `define_asset_job(selection=[…])`,
    # selects them beforehand: a run that a schedule, a sensor or a backfill of the job launches has its plan alone.
    plan_id = run.execution_plan_snapshot_id
    if run.asset_selection is not None or plan_id is None:
        return run.asset_selection or frozenset()
    try:
        return instance.get_execution_plan_snapshot(plan_id).asset_selection
    except Exception:  # the database does not answer, or another version of Dagster wrote the plan
        return None
