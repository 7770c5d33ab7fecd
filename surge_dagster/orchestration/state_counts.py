"""How many partitions of a catalog are in which state: the sensor's message, and an observation of `embeddings`.

Each partition is in one count. The observation is on the page of the asset, where its numbers can be plotted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from datetime import datetime

import dagster as dg

from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration.active_runs import Held
from surge_dagster.orchestration.discovery import Listing
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.requests import Undone

_OF_FILES = {None: "unreadable", "foreign": "of_another_space"}
_TEXTS = {
    "up_to_date": "up to date",
    "missing": "missing",
    "stale": "stale",
    "not_on_record": "whose file is not on record",
    "held": "held by",
    "refused": "refused",
    "of_another_space": "whose place is taken by a file of another space",
    "unreadable": "with a file that cannot be read now",
    "unregistered": "to be registered by the next ticks",
    "waiting": "waiting after a failure",
    "canceled": "left alone after a canceled run",
}
_CHANGED_BY_RUNS = ("up_to_date", "held")


def count_states(
    listing: Listing,
    states: Mapping[str, str | None],
    held: Held,
    refused: Collection[str],
    undone: Mapping[str, Undone],
    unregistered: Collection[str],
    now: datetime,
) -> dict[str, int]:
    """Count the partitions of a catalog by state; the first state that applies counts.

    Args:
        listing: all of them.
        states: of files that are not fresh or not on record, by partition key.
        held: what active runs hold.
        refused: partition keys whose content was refused as it is.
        undone: partitions that earlier runs left undone.
        unregistered: partition keys that are left to the next ticks.
        now: a partition that is due again counts as missing or stale.
    """

    def state_of(key: str) -> str:
        state, before = states[key], undone.get(key)
        if state in _OF_FILES:
            return _OF_FILES[state]
        if key in refused:
            return "refused"
        if key in held:
            return "held"
        if key in unregistered:
            return "unregistered"
        if before is not None and before.due is None:
            return "canceled"
        if before is not None and before.due is not None and before.due > now:
            return "waiting"
        return "not_on_record" if state == "unknown" else str(state)

    counts = Counter(map(state_of, states))
    counts["up_to_date"] = len(listing.partitions) - len(states)
    return {state: counts[state] for state in _TEXTS}


def describe(counts: Mapping[str, int], held: Held, undone: Mapping[str, Undone], now: datetime) -> str:
    """The counts in one line; those that are 0 are left out, except for the first."""
    due = [(each.due, each.attempt) for key, each in undone.items() if each.due and each.due > now and key not in held]
    details = {"held": f" {held.by}"}
    if due:
        until, attempt = min(due)[0].isoformat(sep=" ", timespec="seconds"), max(attempt for _, attempt in due)
        details["waiting"] = f" (attempt {attempt}), the next ones until {until}"
    parts = [
        f"{count:,} {_TEXTS[state]}{details.get(state, '')}"
        for state, count in counts.items()
        if count or state == "up_to_date"
    ]
    return f"{counted(sum(counts.values()), 'partition')}: {', '.join(parts)}"


def report_counts(names: CatalogNames, instance: dg.DagsterInstance, counts: Mapping[str, int], summary: str) -> None:
    """Observe `embeddings` with the counts, unless its newest observation has them; an active run changes some."""
    newest = instance.fetch_observations(names.embeddings, limit=1).records
    metadata = event.metadata if newest and (event := newest[0].asset_observation) else {}
    before = {state: metadata[state].value for state in counts if state in metadata}
    ignored = _CHANGED_BY_RUNS if counts["held"] and before.get("held") else ()
    if any(before.get(state) != count for state, count in counts.items() if state not in ignored):
        report_events(instance, None, [dg.AssetObservation(names.embeddings, description=summary, metadata=counts)])
