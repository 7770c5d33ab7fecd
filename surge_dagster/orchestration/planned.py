"""Planned events that name a partition: they decide which run Dagster takes for the last one that tried it.

Runs here plan their whole range in one event, without which fresh partitions that a failing run skipped would be shown
as failed too. A partition that truly failed is planned by itself just before its run ends, and is then shown as failed
by exactly that. From then on every run that materializes it plans it as well, just before: its page would go on saying
that the run which failed did not materialize it, however green it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import dagster as dg
from dagster._core.events import AssetMaterializationPlannedData, DagsterEvent, DagsterEventType

from surge_dagster.orchestration.event_batches import is_checked, report_batch
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_events import AnyEvent, class_of
from surge_dagster.orchestration.row_store import writers_turn

# Each takes Dagster some 20 ms on Postgres, and other writers wait for all of them.
_AT_ONCE = 50


def plan(names: CatalogNames, context: dg.OpExecutionContext, partition_keys: Iterable[str]) -> None:
    """Say that the run was to materialize these partitions, each by its name."""
    step, keys = str(context.op_handle), list(dict.fromkeys(partition_keys))
    build = DagsterEvent.build_asset_materialization_planned_event
    for start in range(0, len(keys), _AT_ONCE):
        planned = [
            AssetMaterializationPlannedData(names.embeddings, partition=key) for key in keys[start : start + _AT_ONCE]
        ]
        # From then on Dagster looks for events above these alone.
        with writers_turn(context.instance) if is_checked() else nullcontext():
            report_batch(context.instance, context.run_id, [build(context.job_name, step, each) for each in planned])


class PlansAgain:
    """Plans what was ever planned by name, before it is materialized.

    Args:
        names: of the catalog.
        context: of the op that materializes.
    """

    def __init__(self, names: CatalogNames, context: dg.OpExecutionContext) -> None:
        self._names = names
        self._context = context
        storage = context.instance.event_log_storage
        kind = DagsterEventType.ASSET_MATERIALIZATION_PLANNED
        self._named = storage.get_latest_storage_id_by_partition(names.embeddings, kind).keys()

    def before(self, events: Sequence[AnyEvent]) -> None:
        """See what is about to be stored."""
        if not self._named:
            return
        embeddings = self._names.embeddings
        made = [event for event in events if class_of(event) is dg.AssetMaterialization]
        keys = [event.partition for event in made if event.asset_key == embeddings and event.partition in self._named]
        if keys:
            plan(self._names, self._context, filter(None, keys))
