"""How Dagster queues and retries runs: the pool in which they encode, with its limit, and the tags of the jobs.

Dagster records a pool's limit when its queue first meets the pool, and releases every run that waits at that moment: on
a new instance a refresh in eight shards would start eight encoder pools. So the sensors record the limit beforehand.

Where run retries are on, Dagster launches every failed run again unless its tags say otherwise, and would read bad data
three times. The attempts of a run retry what is transient, so only a run whose process died should be launched again.
The jobs have tags that say so. Runs of an asset follow the instance: `run_retries: {retry_on_asset_or_op_failure:
false}`.
"""

from __future__ import annotations

from contextlib import suppress

import dagster as dg

POOL = "gpu"
RUN_TAGS = {"dagster/retry_on_asset_or_op_failure": "false"}


def record_pool_limit(instance: dg.DagsterInstance) -> bool:
    """Record the pool with the limit of the instance's settings, unless it is recorded; returns whether it has one."""
    storage = instance.event_log_storage
    if POOL in storage.get_concurrency_keys():
        return True
    if instance.global_op_concurrency_default_limit is None:
        return False
    with suppress(Exception):  # of two concurrent calls, one fails on Postgres
        storage.initialize_concurrency_limit_to_default(POOL)
    return True
