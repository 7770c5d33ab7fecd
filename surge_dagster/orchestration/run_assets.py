"""Which assets a run is about: whether it embeds partitions of a catalog, or changes the space that readers use.

Dagster notes on a run the assets that were chosen for it. A job of a user's own, `define_asset_job(selection=[…])`,
chooses them beforehand: launched by the clock, a sensor or a backfill of the job, its run has no such note, and only
the plan that it executes tells. Plans are stored under a digest of what they say, so each is read once.
"""

from __future__ import annotations

from collections.abc import Set

import dagster as dg

from surge_dagster.orchestration.names import CatalogNames

_PLANS_KEPT = 1000
_assets_of_plans: dict[str, Set[dg.AssetKey]] = {}


def embeds(names: CatalogNames, instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Whether a run embeds partitions of this catalog."""
    return run.job_name in (names.refresh_job, names.embed_job) or names.embeddings in _assets_of(instance, run)


def switches(names: CatalogNames, instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Whether a run may make another space the current one of this catalog."""
    return run.job_name == names.switch_job or names.current_space in _assets_of(instance, run)


def _assets_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Set[dg.AssetKey]:
    """The assets that a run executes; none where its plan is missing, or cannot be read by this version of Dagster."""
    plan_id = run.execution_plan_snapshot_id
    if run.asset_selection is not None or plan_id is None:
        return run.asset_selection or frozenset()
    if plan_id not in _assets_of_plans:
        try:
            assets = instance.get_execution_plan_snapshot(plan_id).asset_selection
        except Exception:
            return frozenset()
        while len(_assets_of_plans) >= _PLANS_KEPT:
            _assets_of_plans.pop(next(iter(_assets_of_plans)))
        _assets_of_plans[plan_id] = assets
    return _assets_of_plans[plan_id]
