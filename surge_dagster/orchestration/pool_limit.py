"""The pool in which runs encode, and its limit, which Dagster knows before the first of them waits.

Dagster enters a pool when it first meets it in its queue, and lets every run go that waits there at that moment: on a
new instance a refresh in eight shards would start eight encoder pools at once.
"""

from __future__ import annotations

from contextlib import suppress

import dagster as dg

POOL = "gpu"


def enter_pool(instance: dg.DagsterInstance) -> bool:
    """Have Dagster know the pool with the limit of its settings, unless it does; gives whether it has one."""
    storage = instance.event_log_storage
    if POOL in storage.get_concurrency_keys():
        return True
    if instance.global_op_concurrency_default_limit is None:
        return False
    with suppress(Exception):  # of two at once, Dagster fails one on Postgres
        storage.initialize_concurrency_limit_to_default(POOL)
    return True
