"""What a run that goes on from another one need not do again.

What is fresh is never encoded again, unless the launch asked for exactly that with `force`. Then the files cannot tell
what is done and what is to be done, and Dagster's records of the run do.
"""

from __future__ import annotations

import dagster as dg
from dagster._core.storage.tags import ASSET_RESUME_RETRY_TAG, PARENT_RUN_ID_TAG, RESUME_RETRY_TAG, RETRY_NUMBER_TAG

from surge_dagster.assets.names import CatalogNames

_GOES_ON = (RESUME_RETRY_TAG, ASSET_RESUME_RETRY_TAG, RETRY_NUMBER_TAG)


def done_before(names: CatalogNames, context: dg.OpExecutionContext) -> set[str]:
    """Partition keys that earlier attempts at this run have embedded.

    Those are attempts of the run itself, and the runs that it was launched to go on from: by Dagster after a crash, or
    by a person "from failure". A run that is executed again as a whole begins anew.
    """
    instance = context.instance
    attempts = [context.run_id] if context.retry_number else []
    run = instance.get_run_by_id(context.run_id)
    while run and (parent := run.tags.get(PARENT_RUN_ID_TAG)) and any(tag in run.tags for tag in _GOES_ON):
        attempts.append(parent)
        run = instance.get_run_by_id(parent)
    return {key for run_id in attempts for key in _embedded(names, instance, run_id)}


def _embedded(names: CatalogNames, instance: dg.DagsterInstance, run_id: str) -> set[str]:
    logged = instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    events = [entry.dagster_event for entry in logged if entry.dagster_event]
    return {
        event.partition
        for event in events
        if event.asset_key == names.embeddings
        and event.partition
        and "reused" not in event.step_materialization_data.materialization.metadata
    }
