"""Dividing work among several machines, where the setting `shards` names more than one.

Stretches of equal size would keep all machines waiting for the slowest one. So the work is cut into rounds of a stretch
per machine, each round a third of what is left, and Dagster's queue starts the largest first: a machine that is free
takes the next one, and the small ones at the end make up for different speeds (factoring, as loop schedulers do it).

A partition of several stretches is done by several runs, each of which encodes a range of its rows; they shrink alike.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import dagster as dg

from surge_dagster.config.settings import PRIORITY_TAG, Settings
from surge_dagster.engine.errors import Cancelled, SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.plan.ranges import range_from
from surge_dagster.engine.plan.weights import FILE_BYTES, weight_of
from surge_dagster.engine.sources.partition import Partition, PartitionRange
from surge_dagster.orchestration.active_runs import Held
from surge_dagster.orchestration.asset_events import superbatch_metrics
from surge_dagster.orchestration.discovery import known_space, list_catalog, states_of_unfinished
from surge_dagster.orchestration.launch import config_of, unattended
from surge_dagster.orchestration.names import CatalogNames, CatalogResources
from surge_dagster.orchestration.records import failed_on_record

SHARD_TAG = "surge/shard"
SHARD_BYTES = 16 * 1024 * 1024  # of text, which is worth the start of another encoder whose speed is not known yet
_ROUND = 3  # a round takes a third of what is left
_DIVIDED = 2  # a partition of so many stretches is divided
_SMALLEST_SHARE = 60  # the least stretch is this part of a machine's share: the queue takes a second for each run
# Of the newest SuperBatches, whose speed is that of the machines in use; fewer seconds are mostly a first call.
_SUPERBATCHES, _MEASURED_SECONDS = 100, 10.0
# Dagster kills a tick after a minute, without a run or an alert.
_LOOK_SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one of the runs embeds.

    Attributes:
        weight: of the partitions, in bytes of text.
        part: see `Unattended`.
    """

    keys: list[str]
    weight: int
    part: PartitionRange | None = None


def cut(keys: Sequence[str], partitions: Mapping[str, Partition], shards: int, least: int) -> list[Stretch]:
    """Divide keys into stretches for so many machines, the largest first, each in the order of the keys.

    Args:
        least: bytes of text below which no stretch is made, see `bytes_per_minute`; one machine gets one stretch.
    """
    weights = [weight_of(partitions[key]) for key in keys]
    left = sum(weights)
    least = max(least, left // (_SMALLEST_SHARE * shards))
    size = _stretch_size(left, shards, least)
    stretches, stretch, held = list[Stretch](), list[str](), 0

    def add(stretch: Stretch) -> None:
        nonlocal left, size
        stretches.append(stretch)
        left -= stretch.weight
        if len(stretches) % shards == 0:
            size = _stretch_size(left, shards, least)

    for key, weight in zip(keys, weights, strict=True):
        partition, start = partitions[key], 0
        rows = partition.rows or 0
        if shards > 1 and weight >= _DIVIDED * size and rows > 1 and partition.read_range is not None:
            groups = partition.borders()
            while start < rows:
                part = range_from(partition, start, max(1, round(rows * size / weight)), groups)
                add(Stretch([key], weight * (part.stop - start) // rows, part))
                start = part.stop
            continue
        if stretch and held + weight // 2 > size:
            add(Stretch(stretch, held))
            stretch, held = [], 0
        stretch.append(key)
        held += weight
    if stretch:
        stretches.append(Stretch(stretch, held))
    return sorted(stretches, key=lambda each: -each.weight)


def _stretch_size(left: int, shards: int, least: int) -> int:
    size = left if shards == 1 else left // (_ROUND * shards)
    return size if size >= least else left // max(1, left // least)


def bytes_per_minute(names: CatalogNames, instance: dg.DagsterInstance, space: Space | None) -> int:
    """What a machine encodes in a minute, in bytes of text: the least that is worth a run of its own.

    It is measured in the newest SuperBatches of the space, which any machine has reported: what runs teach the planner
    lies on their own machines, and the code server may have no device of that kind.
    """
    encoded = seconds = 0.0
    records = instance.fetch_materializations(names.superbatches, limit=_SUPERBATCHES).records if space else ()
    for record in records:
        metrics = superbatch_metrics(record.asset_materialization)
        if metrics and space and metrics["space"] == space.name and metrics["texts"]:
            of_call = metrics["encode_seconds"]
            computed = metrics.get("texts_per_second", 0.0) * of_call
            share = min(1.0, computed / metrics["texts"])  # others keep an old vector
            encoded += share * (metrics["text_bytes"] + FILE_BYTES * metrics["partitions"])
            seconds += of_call
    return max(1, round(60 * encoded / seconds)) if seconds >= _MEASURED_SECONDS else SHARD_BYTES


def shard_tags(number: int, count: int, run_tags: Mapping[str, str]) -> dict[str, str]:
    """The tags of one of several shards, the setting `run_tags` among them; those alone for a single run.

    They show an operator which shard a run is, and start it after the larger ones. The first has the priority of runs
    that are launched by hand, so that those do not wait for all shards.
    """
    if count == 1:
        return dict(run_tags)
    priority = int(run_tags.get(PRIORITY_TAG, 0)) + 1 - number
    return {**run_tags, PRIORITY_TAG: str(priority), SHARD_TAG: f"{number} of {count}"}


def refresh_requests(
    names: CatalogNames,
    instance: dg.DagsterInstance,
    resources: CatalogResources,
    settings: Settings,
    held: Held,
) -> list[dg.RunRequest]:
    """Runs that bring the whole catalog up to date, except for partitions that active runs hold.

    A single run covers everything and finds out itself what there is to do. Several runs, and one beside active runs,
    name their partitions. Where source or output cannot be read now, or not in time, or the settings mean no space of
    the output, the single run tries again and fails if it cannot do better; its failure is alerted.
    """
    if held.keys is None:
        return []
    space, stretches = None, list[Stretch]()
    whole_catalog = not held.keys
    try:
        with _set_after(_LOOK_SECONDS) as over:
            store = resources.output.open().until(over)
            space = known_space(names, resources, store)
            if settings.shards > 1 or held.keys:
                listing = list_catalog(names, instance, resources.catalog)
                todo = states_of_unfinished(listing, store, space).keys() | failed_on_record(names, instance)
                keys = [key for key in listing.partitions if key in todo and key not in held]
                least = bytes_per_minute(names, instance, space)
                stretches = cut(keys, listing.partitions, settings.shards, least)
                whole_catalog &= len(stretches) < 2
    except (SurgeError, Cancelled):
        whole_catalog = True
    first = unattended(space, settings.shards, settings.removed_partitions)
    if whole_catalog:
        tags = first.tags | settings.run_tags
        return [dg.RunRequest(run_key="everything", run_config=config_of(names.refresh_op, {}), tags=tags)]
    others = replace(first, removed_partitions=None)
    return [
        dg.RunRequest(
            # Dagster evaluates a tick again in which its daemon died, and launches the runs whose key is new then.
            run_key=hashlib.sha256("\n".join([*stretch.keys, repr(stretch.part)]).encode()).hexdigest(),
            run_config=config_of(names.refresh_op, {"keys": stretch.keys}),
            tags=replace(first if number == 1 else others, part=stretch.part).tags
            | shard_tags(number, len(stretches), settings.run_tags),
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
