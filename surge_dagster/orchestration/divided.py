"""Refreshes that several runs share, if the setting `max_runs` allows more than one.

The work is cut into pieces of equal weight, and Dagster's queue starts them as its pool has room.
Equal pieces wait for the slowest machine: a cluster divides work among unequal machines.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import dagster as dg

from surge_dagster.config.settings import Settings
from surge_dagster.engine.errors import Cancelled, SurgeError
from surge_dagster.engine.plan.dividing import cut
from surge_dagster.orchestration.active_runs import Held
from surge_dagster.orchestration.discovery import (
    Listing,
    known_space,
    list_catalog,
    states_of_unfinished,
)
from surge_dagster.orchestration.launch import Unattended, config_of
from surge_dagster.orchestration.names import CatalogNames, CatalogResources
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.records import failed_on_record

PIECE_TAG = "surge/piece"
LEAST_BYTES = 16 << 20  # of text, which is worth the start of another encoder
# Dagster kills a tick after a minute, without a run or an alert.
_LOOK_SECONDS = 40.0


def cut_keys(listing: Listing, keys: Sequence[str], max_runs: int) -> list[list[str]]:
    """Divide partition keys, in their order, into at most `max_runs` equal pieces."""
    pieces = cut([listing.partitions[key] for key in keys], max_runs, LEAST_BYTES)
    return [list(map(to_partition_key, piece.keys)) for piece in pieces]


def piece_tags(number: int, count: int, run_tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of the setting `run_tags`, and which of several pieces a run has."""
    if count == 1:
        return dict(run_tags)
    return {**run_tags, PIECE_TAG: f"{number} of {count}"}


def refresh_requests(
    names: CatalogNames,
    instance: dg.DagsterInstance,
    resources: CatalogResources,
    settings: Settings,
    held: Held,
) -> list[dg.RunRequest]:
    """Return runs that bring the whole catalog up to date, except for partitions that active runs
    hold.

    A single run covers everything and finds out itself what there is to do. Several runs, and one
    next to active runs, name their partitions. If source or output cannot be read now, or not in
    time, or the settings mean no space of the output, the single run tries again and fails if it
    cannot do better; its failure is alerted.
    """
    if held.keys is None:
        return []

    space = None
    pieces: list[list[str]] = []
    is_whole_catalog = not held.keys
    try:
        with _set_after(_LOOK_SECONDS) as over:
            store = resources.output.open().until(over)
            space = known_space(names, resources, store)
            if settings.max_runs > 1 or held.keys:
                listing = list_catalog(names, instance, resources.catalog.open())
                todo = states_of_unfinished(listing, store, space).keys()
                todo |= failed_on_record(names, instance)
                keys = [key for key in listing.partitions if key in todo and key not in held]
                pieces = cut_keys(listing, keys, settings.max_runs)
                is_whole_catalog = is_whole_catalog and len(pieces) < 2
    except (SurgeError, Cancelled):
        is_whole_catalog = True

    unattended = Unattended(space.name if space else None, settings.removed_partitions)
    if is_whole_catalog:
        config = config_of(names.refresh_op, {})
        tags = unattended.tags | settings.run_tags
        return [dg.RunRequest(run_key="everything", run_config=config, tags=tags)]
    return _requests_of(names, settings, pieces, unattended)


def _requests_of(
    names: CatalogNames, settings: Settings, pieces: list[list[str]], unattended: Unattended
) -> list[dg.RunRequest]:
    """Return a run for each piece; the first one handles removed partitions."""
    requests = []
    for number, keys in enumerate(pieces, 1):
        # Dagster evaluates a tick again in which its daemon died, and launches the runs whose key
        # is new then.
        run_key = hashlib.sha256("\n".join(keys).encode()).hexdigest()
        config = config_of(names.refresh_op, {"keys": keys})
        tags = unattended.tags | piece_tags(number, len(pieces), settings.run_tags)
        requests.append(dg.RunRequest(run_key=run_key, run_config=config, tags=tags))
        unattended = replace(unattended, removed_partitions=None)
    return requests


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
