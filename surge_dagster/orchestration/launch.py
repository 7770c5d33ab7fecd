"""How runs are launched: their config, the tags of the jobs, and the pool in which they wait.

Dagster launches one range of dynamic partitions per run, so scattered partitions would become a run
each. A run whose config selects its partitions covers any set of them.

A run is one attempt. Dagster launches a failed run again if the instance has `run_retries:
{enabled: true}`, as often as a tag of the jobs says. A run that failed for a cause that stays, such
as bad data, forbids it by a tag of its own: see `failures.run_failure`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import dagster as dg
from pydantic import Field

POOL = "gpu"
RETRY_TAG = "dagster/retry_on_asset_or_op_failure"
RUN_TAGS = {RETRY_TAG: "true", "dagster/max_retries": "2"}


class Select(Enum):
    """The state that partitions of a launch are in; Dagster's config uses the members' names."""

    all = "all"
    missing = "missing"
    stale = "stale"
    failed = "failed"


class RemovedPartitions(Enum):
    """What becomes of partitions that the source no longer lists."""

    leave = "leave"
    report = "report"
    delete = "delete"


class LaunchConfig(dg.Config):
    """Options of a run; a launch by hand needs none of them."""

    force: bool = Field(False, description="encode partitions that are up to date too")
    keys: list[str] | None = Field(
        None,
        min_length=1,
        description="touch only these partition keys, as the asset source_partitions shows them",
    )
    select: Select = Field(
        Select.all,
        description=(
            "of these, those that are missing, stale, or failed in their last run; all is "
            "whatever needs it, and with force everything"
        ),
    )

    unattended: bool = Field(
        False,
        description="begin no second vector space; runs of sensors and schedules are unattended",
    )
    removed_partitions: RemovedPartitions = Field(
        RemovedPartitions.leave,
        description=(
            "what becomes of partitions that the source no longer lists; the nightly refresh has "
            "the setting of this name"
        ),
    )


def partition_keys_of(context: dg.AssetExecutionContext) -> Sequence[str] | None:
    """Return the partitions of a run of an asset; None for all."""
    if context.has_partition_key or context.has_partition_key_range:
        return context.partition_keys
    return None


def in_backfill(context: dg.OpExecutionContext) -> bool:
    """Return whether a run belongs to a backfill.

    Dagster ends a backfill as failed when a partition that it covers has no event from its run.
    """
    return "dagster/backfill" in context.run_tags


def job_of(
    name: str,
    op: dg.OpDefinition | dg.PendingNodeInvocation,
    description: str,
    resources: Mapping[str, Any] | None = None,
) -> dg.JobDefinition:
    """Return a job of one op, in the run's own process.

    Args:
        resources: of a job that is given to a sensor: if Dagster has to bind them, it warns about a
            parameter that is in beta.
    """

    @dg.job(
        name=name,
        executor_def=dg.in_process_executor,
        run_tags=RUN_TAGS,
        description=description,
        resource_defs=resources,
    )
    def compose() -> None:
        op()

    return compose


def config_of(op_name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run config with these options of a `LaunchConfig`."""
    return {"ops": {op_name: {"config": dict(options)}}}
