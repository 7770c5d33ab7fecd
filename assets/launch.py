"""What a run is told when it is launched, and which partitions a launched run holds.

A run that the sensor starts covers a range of dynamic partitions, because Dagster knows nothing finer, and names
exactly the ones it shall touch in its config. A run started by hand has the range alone. The same reading of a run's
tags and config tells the sensor what is taken already.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.execution.context.system import StepExecutionContext
from dagster._core.execution.retries import RetryMode
from dagster._core.launcher import DefaultRunLauncher
from pydantic import Field

from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.partition_keys import to_partition_key
from surge_dagster.assets.selection import Select, read_keys
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import ConfigError

_INLINE_KEYS = 500
_KEY_FILES_KEPT = 200
_KEY_FILE_FOLDER = "partition_keys"

REQUEST_TAG = "surge/request"
SHARD_TAG = "surge/shard"
_HOST_TAG = "surge/host"
_PROCESS_TAG = "surge/process"
# Dagster copies the tags of a run to the one that goes on from it, whose process is another.
_SIGNED_TAG = "surge/signed_by"
_ACTIVE = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.MANAGED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


class LaunchConfig(dg.Config):
    """Options of a run; a launch by hand needs none of them."""

    force: bool = Field(False, description="encode partitions that are up to date too")
    keys: list[str] | None = Field(
        None, description="touch these partition keys and no others, written as in the catalog or as Dagster shows them"
    )
    keys_file: str | None = Field(None, description="the same, as a file: a JSON list, or a key in each line")
    select: Select = Field(
        Select.all,
        description=(
            "of these, those that are missing, stale, or failed in their last run; all is whatever needs it, and with "
            "force everything"
        ),
    )
    unattended: bool = Field(False, description="set by sensor and schedule: refuse to begin another vector space")
    expected_space: str | None = Field(None, description="refuse any vector space but this one")

    @property
    def is_typed(self) -> bool:
        """Whether a person named partition keys: sensor and schedule know them, and a person may be mistaken."""
        return not self.unattended and (self.keys is not None or self.keys_file is not None)

    def named_keys(self) -> list[str] | None:
        """The partition keys that the config names in either way, None when it names none.

        Raises:
            ConfigError: the file that holds them cannot be read.
        """
        return _named_keys(self.keys, self.keys_file)


def name_keys(instance: dg.DagsterInstance, keys: Sequence[str]) -> dict[str, Any]:
    """The part of a run's config that names its partition keys: the list itself, or a file when it is long."""
    if len(keys) <= _INLINE_KEYS or not isinstance(instance.run_launcher, DefaultRunLauncher):
        return {"keys": list(keys)}  # another launcher may start the run where this machine's files are not
    document = json.dumps(list(keys))
    folder = Path(instance.root_directory) / _KEY_FILE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(document.encode()).hexdigest()[:24]}.json"
    path.write_text(document)
    newest_first = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for old in newest_first[_KEY_FILES_KEPT:]:
        old.unlink(missing_ok=True)
    return {"keys_file": str(path)}


def unattended_config(op_name: str, space: Space | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Config of an unattended run: it may fill the space that is there, or begin the first one of an empty output."""
    expected = {"expected_space": space.name} if space else {}
    return {"ops": {op_name: {"config": {"unattended": True, **expected, **options}}}}


def shard_requests(
    op_name: str, instance: dg.DagsterInstance, space: Space | None, shards: Sequence[tuple[str, Sequence[str]]]
) -> list[dg.RunRequest]:
    """A run for each shard, which names its keys and is tagged with their range, its place and the request's id.

    Args:
        op_name: the op that reads the config.
        instance: where the runs are recorded.
        space: that all of them must write to, None where it is still to be begun.
        shards: of a request each, its id and the keys in Dagster's order.
    """
    return [
        dg.RunRequest(
            run_config=unattended_config(op_name, space, name_keys(instance, keys)),
            tags={
                "dagster/asset_partition_range_start": keys[0],
                "dagster/asset_partition_range_end": keys[-1],
                REQUEST_TAG: request,
                **({SHARD_TAG: f"{number} of {len(shards)}"} if len(shards) > 1 else {}),
            },
        )
        for number, (request, keys) in enumerate(shards, 1)
    ]


def held_keys(run: dg.DagsterRun, registered: Mapping[str, None], op_names: Sequence[str]) -> set[str] | None:
    """The partition keys that a run may touch, None for all of them.

    Args:
        run: a run of one of this project's jobs.
        registered: the dynamic partitions in Dagster's order.
        op_names: the ops whose config can name keys.
    """
    ops: Mapping[str, Any] = dict(run.run_config).get("ops") or {}  # pyright: ignore[reportAssignmentType]
    for name in op_names:
        config = (ops.get(name) or {}).get("config") or {}
        try:
            named = _named_keys(config.get("keys"), config.get("keys_file"))
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


def _named_keys(keys: list[str] | None, keys_file: str | None) -> list[str] | None:
    return keys if keys_file is None else [*(keys or ()), *read_keys(keys_file)]


def process_tags(step: StepExecutionContext | None = None, run_id: str | None = None) -> dict[str, str]:
    """Tags by which a run names the process that executes it.

    Args:
        run_id: of the run, by which tags that it was launched with are told from its own.
        step: where it is executed. An executor with a process for each step leaves retries to the process that started
            it, and that one is the run's: a step's own is gone while its run still ends.
    """
    apart = step is not None and step.retry_mode is RetryMode.DEFERRED
    tags = {_HOST_TAG: _host(), _PROCESS_TAG: _process(os.getppid() if apart else os.getpid())}
    return tags if run_id is None else tags | {_SIGNED_TAG: run_id}


def active_runs(instance: dg.DagsterInstance, concerned: Callable[[dg.DagsterRun], bool]) -> Iterator[dg.DagsterRun]:
    """Runs that are waiting or going on; one whose process is gone is declared failed instead of being yielded.

    Dagster's own monitoring cannot look into processes of this machine. A run that was killed together with the server
    that launched it would stay "started" for ever, and its partitions and its slot of the pool with it.
    """
    for run in instance.get_runs(filters=dg.RunsFilter(statuses=_ACTIVE)):
        if not concerned(run):
            continue
        is_signed = run.tags.get(_SIGNED_TAG, run.run_id) == run.run_id
        if (
            is_signed
            and run.tags.get(_HOST_TAG) == _host()
            and run.status
            in (
                dg.DagsterRunStatus.STARTED,
                dg.DagsterRunStatus.CANCELING,
            )
        ):
            pid = run.tags.get(_PROCESS_TAG, "").partition("@")[0]
            if pid.isdigit() and _process(int(pid)) != run.tags[_PROCESS_TAG]:
                if run.status is dg.DagsterRunStatus.CANCELING:  # failed, it would be launched again
                    instance.report_run_canceled(run, f"The process of this run ({pid}) ended before it could say so.")
                else:
                    instance.report_run_failed(run, f"The process of this run ({pid}) is gone; it was killed.")
                continue
        yield run


def held_by_active_runs(names: CatalogNames, instance: dg.DagsterInstance) -> set[str] | None:
    """Partition keys that active runs may touch, None for all."""

    def embeds(run: dg.DagsterRun) -> bool:
        return run.job_name in (names.refresh_job, names.embed_job) or names.embeddings in (run.asset_selection or ())

    registered = dict.fromkeys(instance.get_dynamic_partitions(names.partitions_name))
    held: set[str] = set()
    for run in list(active_runs(instance, embeds)):
        keys = held_keys(run, registered, (names.embeddings_op, names.refresh_op))
        if keys is None:
            return None
        held |= keys
    return held


def _host() -> str:
    # The number of the process namespace tells apart containers of one name: their process ids mean different things.
    return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').stat().st_ino}"


def _process(pid: int) -> str:
    # Not the time of day when it was started, which moves with the clock: ticks since a certain start of the machine.
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return f"{pid}@{status.rpartition(')')[2].split()[19]}/{boot}"
