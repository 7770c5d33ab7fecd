"""Executing a job in this process, as an ordinary run of the Dagster instance that the UI opens.

A launch through Dagster's queue needs its daemon to be running. A command that shall work on a machine where nothing
runs yet executes the job itself, and gives the run the origin that a launch from the UI would have given it, so that
the UI shows it as a run of its own code location and can launch it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.events import DagsterEvent, RunFailureReason
from dagster._core.events.log import EventLogEntry
from dagster._core.execution.api import execute_run
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.storage.tags import MAX_RETRIES_TAG, RUN_FAILURE_REASON_TAG
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

CODE_LOCATION = "surge"
_MODULE = "surge_dagster.definitions"
_HOME = ".dagster"
_INSTANCE_SETTINGS = Path(__file__).with_name("dagster.yaml")
_ONE_PLANNED_EVENT = "DAGSTER_EMIT_PARTITION_SUBSET_IN_PLANNED_EVENTS"


@dataclass(slots=True)
class Executed:
    """A run that has ended.

    Attributes:
        errors: why it failed, for a person.
        checks: results of the asset checks that it evaluated.
    """

    run_id: str
    success: bool = False
    errors: list[str] = field(default_factory=list)
    checks: list[dg.AssetCheckEvaluation] = field(default_factory=list)


@contextmanager
def local_instance() -> Iterator[dg.DagsterInstance]:
    """The instance of DAGSTER_HOME, or of `.dagster` in the working folder; it is made when it is not there."""
    home = Path(os.environ.get("DAGSTER_HOME") or _HOME).absolute()
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        (home / "dagster.yaml").write_text(_INSTANCE_SETTINGS.read_text())
    os.environ["DAGSTER_HOME"] = str(home)
    os.environ.setdefault(_ONE_PLANNED_EVENT, "true")
    with dg.DagsterInstance.get() as instance:
        yield instance


def execute(
    instance: dg.DagsterInstance,
    job: dg.JobDefinition,
    run_config: dict[str, Any],
    hear: Callable[[DagsterEvent], None],
) -> Executed:
    """Execute a job to its end.

    Args:
        instance: where the run is recorded.
        job: of this project's definitions.
        run_config: as in the UI's launchpad.
        hear: called with each event as it is logged.

    Raises:
        KeyboardInterrupt: the run was interrupted; it is on record as canceled.
    """
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    run = instance.create_run_for_job(
        job,
        run_config=run_config | quiet,
        remote_job_origin=origin_of(job.name),
        tags={MAX_RETRIES_TAG: "0"},  # who looks on decides what comes next, not a daemon that is started days later
    )
    executed = Executed(run.run_id)

    def listen(entry: EventLogEntry) -> None:
        event = entry.dagster_event
        if event is None:
            return
        if event.is_step_failure:
            data = event.step_failure_data
            failure = data.user_failure_data
            executed.errors.append((failure and failure.description) or (data.error_display_string or "").strip())
        elif event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            executed.checks.append(event.asset_check_evaluation_data)
        hear(event)

    instance.add_event_listener(run.run_id, listen)
    executed.success = execute_run(InMemoryJob(job), run, instance, raise_on_error=False).success
    ended = instance.get_run_by_id(run.run_id)
    if ended is not None and ended.tags.get(RUN_FAILURE_REASON_TAG) == RunFailureReason.UNEXPECTED_TERMINATION.value:
        instance.report_run_canceled(ended, "Interrupted in the terminal.")
        raise KeyboardInterrupt
    return executed


def origin_of(job_name: str) -> RemoteJobOrigin:
    """Where a job comes from, as the code location of workspace.yaml would say it."""
    target = LoadableTargetOrigin(module_name=_MODULE, working_directory=str(Path.cwd()))
    location = ManagedGrpcPythonEnvCodeLocationOrigin(target, CODE_LOCATION)
    return RemoteJobOrigin(RemoteRepositoryOrigin(location, "__repository__"), job_name)
