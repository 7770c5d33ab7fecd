"""How many partitions of a catalog are in which state: the sensor's message, and an observation of `embeddings`.

Each partition is in one count. The observation is on the page of the asset, where its numbers can be plotted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import dagster as dg

from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration.active_runs import Held
from surge_dagster.orchestration.discovery import Listing
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.removed_partitions import removed_keys
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
    "removed": "removed from the source",
}


def report_states(
    names: CatalogNames,
    instance: dg.DagsterInstance,
    listing: Listing,
    states: Mapping[str, str | None],
    held: Held,
    refused: Collection[str],
    undone: Mapping[str, Undone],
    unregistered: Collection[str],
) -> str:
    """Count the partitions of a catalog by state, observe `embeddings` with the counts and return them as one line."""

    def state_of(key: str) -> str:
        """The first state that applies; a partition that is due again counts as missing or stale."""
        state, before = states[key], undone.get(key)
        if state in _OF_FILES:
            return _OF_FILES[state]
        if key in refused:
            return "refused"
        if key in held:
            return "held"
        if key in unregistered:
            return "unregistered"
        if before is not None and not before.is_due:
            return "canceled" if before.due is None else "waiting"
        return "not_on_record" if state == "unknown" else str(state)

    counted_states = Counter(map(state_of, states))
    counted_states["up_to_date"] = len(listing.partitions) - len(states)
    counted_states["removed"] = len(removed_keys(listing))
    counts = {state: counted_states[state] for state in _TEXTS}
    summary = _summary(counts, held, [each for key, each in undone.items() if key not in held])
    newest = instance.fetch_observations(names.embeddings, limit=1).records
    metadata = event.metadata if newest and (event := newest[0].asset_observation) else {}
    before = {state: metadata[state].value for state in counts if state in metadata}
    if before != counts:
        report_events(instance, None, [dg.AssetObservation(names.embeddings, description=summary, metadata=counts)])
    return summary


def _summary(counts: Mapping[str, int], held: Held, undone: Iterable[Undone]) -> str:
    """The counts in one line; those that are 0 are left out, except for the first."""
    details = {"held": f" {held.by}"}
    if waiting := [(each.due, each.attempt) for each in undone if each.due and not each.is_due]:
        until, attempt = min(waiting)[0].isoformat(sep=" ", timespec="seconds"), max(each[1] for each in waiting)
        details["waiting"] = f" (attempt {attempt}), the next ones until {until}"
    parts = [
        f"{count:,} {_TEXTS[state]}{details.get(state, '')}"
        for state, count in counts.items()
        if count or state == "up_to_date"
    ]
    return f"{counted(sum(counts.values()), 'partition')}: {', '.join(parts)}"
