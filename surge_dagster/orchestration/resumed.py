"""What a run that goes on from another one need not do again.

What is fresh is never encoded again, unless the launch asked for exactly that with `force`. Then the files cannot tell
what is done and what is to be done, and Dagster's records of the run do.
"""

from __future__ import annotations

import dagster as dg
from dagster._core.storage.tags import PARENT_RUN_ID_TAG, RESUME_RETRY_TAG, RETRY_NUMBER_TAG

from surge_dagster.orchestration.names import CatalogNames

# Tags that Dagster leaves out when the run is executed again as a whole.
_GOES_ON = (RESUME_RETRY_TAG, RETRY_NUMBER_TAG)
_RECORDS_AT_ONCE = 1000


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
    found: set[str] = set()
    cursor, more = None, True
    while more:  # a page at a time: the events of a large run are many times as large as its keys
        page = instance.get_records_for_run(
            run_id, cursor, dg.DagsterEventType.ASSET_MATERIALIZATION, limit=_RECORDS_AT_ONCE
        )
        cursor, more = page.cursor, page.has_more
        events = [record.event_log_entry.dagster_event for record in page.records]
        found |= {
            event.partition
            for event in events
            if event
            and event.asset_key == names.embeddings
            and event.partition
            and "reused" not in event.step_materialization_data.materialization.metadata
        }
    return found
