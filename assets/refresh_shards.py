"""Dividing a refresh of the whole catalog among several runs, where the settings ask for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import dagster as dg

from surge_dagster.assets.active_runs import held_by_active_runs
from surge_dagster.assets.launch import SHARD_TAG, name_keys, unattended_config
from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.outputs import file_states
from surge_dagster.assets.partition_keys import to_partition_key
from surge_dagster.engine.catalog import Partition
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.store import Store
from surge_dagster.shards import Sharding


def refresh_requests(
    names: CatalogNames,
    instance: dg.DagsterInstance,
    store: Store,
    space: Space | None,
    sharding: Sharding,
    partitions: Iterable[Partition],
    options: Mapping[str, Any],
) -> list[dg.RunRequest]:
    """Runs that bring everything up to date: one that sees for itself what there is to do, or several that are told.

    What an active run holds is left to it when there are several. A large catalog may make more runs than there are
    shards, since `max_partitions_per_run` bounds each.

    Args:
        names, instance: of the catalog, and where runs are recorded.
        store, space: the output and the space in it, None where it is still to be begun.
        sharding: how to divide the work.
        partitions: the catalog; not looked at where one run is asked for.
        options: of the op's config; with `force` everything is to be done.
    """
    single = [dg.RunRequest(run_config=unattended_config(names.refresh_op, space, options))]
    if sharding.shards == 1:
        return single
    held = held_by_active_runs(names, instance)
    outputs = OutputState(store, space.name, space.file_format) if space else None
    free = {} if held is None else {to_partition_key(partition.key): partition for partition in partitions}
    free = {key: partition for key, partition in free.items() if key not in (held or ())}
    states = file_states(free, outputs)
    # What only a person can put right is in a run too, which then says so.
    todo = {key: part for key, part in free.items() if options.get("force") or states[key] != "fresh"}
    shards = list(sharding.cut(list(todo), todo))
    if len(shards) < 2:
        return single
    return [
        dg.RunRequest(
            run_config=unattended_config(names.refresh_op, space, {**options, **name_keys(instance, keys)}),
            run_key=f"{number} of {len(shards)}",
            tags={SHARD_TAG: f"{number} of {len(shards)}"},
        )
        for number, keys in enumerate(shards, 1)
    ]
