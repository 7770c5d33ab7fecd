"""Active runs of a catalog: which assets they concern, and which partitions they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import dagster as dg

from surge_dagster.engine.support.counts import named
from surge_dagster.orchestration.names import CatalogNames

_ACTIVE = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.MANAGED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
_RUNS_NAMED = 3


@dataclass(frozen=True, slots=True)
class Held:
    """The partition keys that active runs may touch.

    Attributes:
        keys: None for all.
        run_ids: of these runs, first those that hold all.
    """

    keys: set[str] | None
    run_ids: tuple[str, ...] = ()

    def __contains__(self, partition_key: str) -> bool:
        return self.keys is None or partition_key in self.keys

    @property
    def by(self) -> str:
        return (
            f"active runs ({named(self.run_ids, _RUNS_NAMED)}; terminate one that makes no "
            "progress)"
        )


def active_runs(instance: dg.DagsterInstance) -> Sequence[dg.DagsterRun]:
    """Return the runs that wait or are executed, the newest first."""
    return instance.get_runs(filters=dg.RunsFilter(statuses=_ACTIVE))


def embeds(names: CatalogNames, instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Return whether a run embeds partitions of this catalog, or may do so."""
    return concerns(instance, run, {names.refresh_job, names.embed_job}, {names.embeddings})


def concerns(
    instance: dg.DagsterInstance,
    run: dg.DagsterRun,
    job_names: Set[str],
    asset_keys: Set[dg.AssetKey],
) -> bool:
    """Return whether a run is one of these jobs, or executes one of these assets, or may do so."""
    if run.job_name in job_names:
        return True
    assets = assets_of(instance, run)
    return assets is None or not assets.isdisjoint(asset_keys)


def held_by_active_runs(names: CatalogNames, instance: dg.DagsterInstance) -> Held:
    """Return the partitions that active runs may touch."""
    runs = [run for run in active_runs(instance) if embeds(names, instance, run)]
    registered = (
        dict.fromkeys(instance.get_dynamic_partitions(names.partitions_name)) if runs else {}
    )
    held: set[str] = set()
    holders_of_all: list[str] = []
    holders: list[str] = []
    for run in runs:
        keys = held_keys(names, run, registered)
        if keys is None:
            holders_of_all.append(run.run_id)
        else:
            holders.append(run.run_id)
            held |= keys
    return Held(None if holders_of_all else held, (*holders_of_all, *holders))


def held_keys(
    names: CatalogNames, run: dg.DagsterRun, registered: Mapping[str, None]
) -> set[str] | None:
    """Return the partition keys that a run may touch; None for all.

    Args:
        registered: in Dagster's order.
    """
    ops: Mapping[str, Any] = dict(run.run_config).get("ops") or {}  # pyright: ignore[reportAssignmentType]
    for op_name in (names.embeddings_op, names.refresh_op):
        config = (ops.get(op_name) or {}).get("config") or {}
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


def assets_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Set[dg.AssetKey] | None:
    """Return the assets that a run executes; None if its plan cannot be read."""
    # Dagster records the assets that were selected for a run. A user's own job,
    # `define_asset_job(selection=[…])`, selects them beforehand: a run that a schedule, a sensor or
    # a backfill of the job launches has only its plan.
    plan_id = run.execution_plan_snapshot_id
    if run.asset_selection is not None or plan_id is None:
        return run.asset_selection or frozenset()
    try:
        return instance.get_execution_plan_snapshot(plan_id).asset_selection
    except Exception:  # the database does not answer, or another version of Dagster wrote the plan
        return None
