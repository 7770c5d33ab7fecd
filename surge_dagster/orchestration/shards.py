"""Dividing work among several runs, where the setting `shards` allows more than one."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import dagster as dg

from surge_dagster.engine.errors import Cancelled, SurgeError
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.orchestration.active_runs import Held
from surge_dagster.orchestration.discovery import known_space, list_catalog, states_of_unfinished
from surge_dagster.orchestration.launch import config_of, unattended
from surge_dagster.orchestration.names import CatalogNames, CatalogResources
from surge_dagster.orchestration.records import failed_on_record

SHARD_TAG = "surge/shard"
SHARD_BYTES = 16 * 1024 * 1024  # of text, which is worth the start of another encoder
# What publishing a file costs beside its texts, and the size of a row whose partition has only a row count; both in
# bytes of text.
_FILE_BYTES = 4096
_ROW_BYTES = 64
# Dagster kills a tick after a minute, without a run or an alert.
_LOOK_SECONDS = 40.0


def cut(keys: Sequence[str], partitions: Mapping[str, Partition], shards: int) -> list[list[str]]:
    """Divide keys into at most so many stretches of about equal weight, in their order; little work makes fewer."""
    weights = [_weight(partitions[key]) for key in keys]
    total = sum(weights)
    count = min(shards, max(1, total // SHARD_BYTES), len(keys))
    stretches: list[list[str]] = [[] for _ in range(count)]
    before = 0
    for key, weight in zip(keys, weights, strict=True):
        stretches[(before + weight // 2) * count // total].append(key)
        before += weight
    return [stretch for stretch in stretches if stretch]


def shard_tags(number: int, count: int) -> dict[str, str]:
    """The tag that shows an operator which of several shards a run is; none for a single run."""
    return {SHARD_TAG: f"{number} of {count}"} if count > 1 else {}


def refresh_requests(
    names: CatalogNames,
    instance: dg.DagsterInstance,
    resources: CatalogResources,
    shards: int,
    removed_partitions: Literal["report", "delete"],
    held: Held,
) -> list[dg.RunRequest]:
    """At most `shards` runs that bring the whole catalog up to date, except for partitions that active runs hold.

    A single run covers everything and finds out itself what there is to do. Several runs, and one beside active runs,
    name their partitions. Where source or output cannot be read now, or not in time, or the settings mean no space of
    the output, the single run tries again and fails if it cannot do better; its failure is alerted.
    """
    if held.keys is None:
        return []
    space, stretches = None, list[list[str]]()
    whole_catalog = not held.keys
    try:
        with _set_after(_LOOK_SECONDS) as over:
            store = resources.output.open().until(over)
            space = known_space(names, resources, store)
            if shards > 1 or held.keys:
                listing = list_catalog(names, instance, resources.catalog)
                todo = states_of_unfinished(listing, store, space).keys() | failed_on_record(names, instance)
                keys = [key for key in listing.partitions if key in todo and key not in held]
                stretches = cut(keys, listing.partitions, shards) if keys else []
                whole_catalog &= len(stretches) < 2
    except (SurgeError, Cancelled):
        whole_catalog = True
    first = unattended(resources, space, removed_partitions)
    if whole_catalog:
        return [dg.RunRequest(run_key="everything", run_config=config_of(names.refresh_op, {}), tags=first.tags)]
    others = replace(first, removed_partitions=None)
    return [
        dg.RunRequest(
            # Dagster evaluates a tick again in which its daemon died, and launches the runs whose key is new then.
            run_key=hashlib.sha256("\n".join(stretch).encode()).hexdigest(),
            run_config=config_of(names.refresh_op, {"keys": stretch}),
            tags=(first if number == 1 else others).tags | shard_tags(number, len(stretches)),
        )
        for number, stretch in enumerate(stretches, 1)
    ]


@contextmanager
def _set_after(seconds: float) -> Iterator[threading.Event]:
    over = threading.Event()
    timer = threading.Timer(seconds, over.set)
    timer.daemon = True
    timer.start()
    try:
        yield over
    finally:
        timer.cancel()


def _weight(partition: Partition) -> int:
    """The cost of a partition, in bytes of text; one whose source knows nothing of its size counts as small."""
    if partition.text_bytes is not None:
        return _FILE_BYTES + partition.text_bytes
    return _FILE_BYTES + (partition.rows or 0) * _ROW_BYTES
