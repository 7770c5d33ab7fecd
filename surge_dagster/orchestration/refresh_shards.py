"""Dividing a refresh of the whole catalog among several runs, where it is large or the settings ask for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg

from surge_dagster.engine.errors import Cancelled, SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState, PublishedFile
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration.active_runs import Held
from surge_dagster.orchestration.launch import SHARD_TAG, name_keys, remove_old_key_files, unattended_config
from surge_dagster.orchestration.lineage import read_catalogued
from surge_dagster.orchestration.names import CatalogNames, CatalogResources
from surge_dagster.orchestration.outputs import SpaceNotBegun, file_states, known_space
from surge_dagster.orchestration.partition_keys import to_partition_key, with_short_keys
from surge_dagster.orchestration.selection import failed_on_record
from surge_dagster.orchestration.sensor_cursor import digest
from surge_dagster.shards import Sharding

# A tick that Dagster's daemon died in is evaluated again, and what is left is cut otherwise then. A run whose key was
# used in the tick counts as launched; one without a key does where the tick has launched any.
_EVERYTHING = "everything"
# Dagster gives a tick a minute, and evaluates one that takes longer again and again.
_LOOK_SECONDS = 40.0


def refresh_requests(
    names: CatalogNames,
    instance: dg.DagsterInstance,
    resources: CatalogResources,
    sharding: Sharding,
    options: Mapping[str, Any],
    held: Held,
) -> list[dg.RunRequest]:
    """Runs that bring everything up to date: one that sees for itself what there is to do, or some that are told.

    What an active run holds is left to it, so there may be none. A large catalog may make more runs than there are
    shards, since `max_partitions_per_run` bounds each.

    Args:
        names, instance: of the catalog, and where runs are recorded.
        resources: where catalog or output cannot be looked at now, the one run tries again, and if it fails on that
            too, it is told as any failure is.
        sharding: how to divide the work.
        options: of the op's config; with `force` everything is to be done.
        held: what is left to active runs.

    Raises:
        SpaceNotBegun: another space would have to be begun, which is a person's to do.
    """
    if held.keys is None:
        return []
    force = bool(options.get("force"))
    space: Space | None = None
    try:
        with _set_after(_LOOK_SECONDS) as over:
            store = resources.output.open().until(over)
            space = known_space(names, store, resources.encoder.spec(), unattended=True)
            registered = set(instance.get_dynamic_partitions(names.partitions_name))
            partitions = with_short_keys(resources.catalog.open(), registered)
            listed = {to_partition_key(partition.key): partition for partition in partitions}
            if not held.keys and sharding.shards == 1 and len(listed) <= sharding.most_each:
                return [_whole(names, space, options)]  # however much there is to do: the outputs need not be looked at
            free = {key: partition for key, partition in listed.items() if key not in held}
            todo = free if force else _todo(names, instance, store, space, free)
    except SpaceNotBegun:
        raise
    except (SurgeError, Cancelled):
        return [_whole(names, space, options)]
    shards = list(sharding.cut(list(todo), todo))
    if not held.keys and len(shards) < 2:
        return [_whole(names, space, options)]
    remove_old_key_files(instance)
    return [
        dg.RunRequest(
            run_config=unattended_config(names.refresh_op, space, {**options, **name_keys(instance, keys)}),
            run_key=digest("\n".join(keys)),
            tags={SHARD_TAG: f"{number} of {len(shards)}"} if len(shards) > 1 else {},
        )
        for number, keys in enumerate(shards, 1)
    ]


@contextmanager
def _set_after(seconds: float) -> Iterator[threading.Event]:
    """An event that is set once the block takes longer."""
    over = threading.Event()
    clock = threading.Timer(seconds, over.set)
    clock.daemon = True
    clock.start()
    try:
        yield over
    finally:
        clock.cancel()


def _whole(names: CatalogNames, space: Space | None, options: Mapping[str, Any]) -> dg.RunRequest:
    """The one run that is told no partitions."""
    return dg.RunRequest(run_config=unattended_config(names.refresh_op, space, options), run_key=_EVERYTHING)


def _todo(
    names: CatalogNames, instance: dg.DagsterInstance, store: Store, space: Space | None, free: dict[str, Partition]
) -> dict[str, Partition]:
    """The partitions that a run has something to do for: to encode, to adopt, or to say what a person must mend."""
    outputs = OutputState(store, space.name, space.file_format) if space else None
    fresh: dict[str, PublishedFile] = {}
    file_states(free, outputs, fresh)
    catalogued = read_catalogued(names, instance)
    failed = failed_on_record(names, instance)
    settled = {
        key
        for key, file in fresh.items()
        if key not in failed and catalogued.knows(key, file.facts.desired_version, free[key].source_version)
    }
    return {key: partition for key, partition in free.items() if key not in settled}
