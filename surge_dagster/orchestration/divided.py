"""Refreshes that several runs share, if the setting `max_runs` allows more than one.

The work is cut into pieces of equal weight, and Dagster's queue starts them as its pool has room.
Equal pieces wait for the slowest machine: a cluster divides work among unequal machines.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import dagster as dg

from surge_dagster.config.settings import Settings
from surge_dagster.engine.errors import Cancelled, SurgeError
from surge_dagster.engine.plan.dividing import cut
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration.active_runs import Held
from surge_dagster.orchestration.catalog_resources import CatalogResources
from surge_dagster.orchestration.discovery import Listing, list_catalog, states_of_unfinished
from surge_dagster.orchestration.launch import config_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.readers_space import asset_of
from surge_dagster.orchestration.records import failed_on_record
from surge_dagster.orchestration.space_of_settings import known_space

LEAST_BYTES = 16 << 20  # of text, which is worth the start of another encoder
# Dagster kills a tick after a minute, without a run or an alert.
_LOOK_SECONDS = 40.0


def cut_keys(listing: Listing, keys: Sequence[str], max_runs: int) -> list[list[str]]:
    """Divide partition keys, in their order, into at most `max_runs` equal pieces."""
    pieces = cut([listing.partitions[key] for key in keys], max_runs, LEAST_BYTES)
    return [list(map(to_partition_key, piece.keys)) for piece in pieces]


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
    next to active runs, name their partitions; the first one handles removed partitions. If source
    or output cannot be read now, or not in time, the single run tries again and fails if it cannot
    do better; its failure is alerted.
    """
    if held.keys is None:
        return []

    pieces: Sequence[list[str] | None] = [None]  # the whole catalog
    if settings.max_runs > 1 or held.keys:
        over = threading.Event()
        timer = threading.Timer(_LOOK_SECONDS, over.set)
        timer.daemon = True
        timer.start()
        with suppress(SurgeError, Cancelled):
            store = resources.output.open().until(over)
            found = _pieces_to_do(names, instance, resources, store, held, settings.max_runs)
            if held.keys or len(found) > 1:
                pieces = found

    requests = []
    for number, keys in enumerate(pieces):
        removed = settings.removed_partitions if number == 0 else "leave"
        options = {"keys": keys, "unattended": True, "removed_partitions": removed}
        config = config_of(names.refresh_op, options)
        # Dagster evaluates a tick again in which its daemon died, and launches the runs whose key
        # is new then.
        run_key = keys[0] if keys else "everything"
        requests.append(dg.RunRequest(run_key, run_config=config, tags=settings.run_tags))
    return requests


def _pieces_to_do(
    names: CatalogNames,
    instance: dg.DagsterInstance,
    resources: CatalogResources,
    store: Store,
    held: Held,
    max_runs: int,
) -> list[list[str]]:
    """Return the partition keys that need work and that no active run holds, in pieces."""
    space = known_space(resources, store)
    asset = asset_of(names, store, space)
    listing = list_catalog(names, asset, instance, resources.open_source())
    todo = states_of_unfinished(listing, store, space).keys() | failed_on_record(asset, instance)
    keys = [key for key in listing.partitions if key in todo and key not in held]
    return cut_keys(listing, keys, max_runs)
