"""Which partitions a launch selects: keys that an operator typed, a file of keys, or a state that partitions are in.

Dagster launches one range of dynamic partitions per run, so scattered partitions would become a run each. A run whose
config selects its partitions here covers any set of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from enum import Enum
from pathlib import Path

import dagster as dg

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.output.freshness import Status
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import in_chunks, to_partition_key

_NAMED = 20


class Select(Enum):
    """The state that partitions of a launch are in; Dagster's config uses the members' names."""

    all = "all"
    missing = "missing"
    stale = "stale"
    failed = "failed"

    def takes(self, status: Status, has_failed: bool) -> bool:
        """Whether a partition is selected, by the state of its file and whether its last run failed."""
        if self is Select.failed:
            return has_failed
        return self is Select.all or status == self.value


def read_keys(path: str) -> list[str]:
    """Partition keys of a file: a JSON list, or one key per line; a byte-order mark is not part of the first key.

    Raises:
        ConfigError: the file cannot be read, or is not what it looks like.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if not text.lstrip().startswith("["):
            return [line for line in text.splitlines() if line.strip()]
        return [str(key) for key in json.loads(text)]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the list of partition keys {path!r} cannot be read ({error}). Such a file holds a JSON list, or a key "
            "in each line, the first without a bracket before it."
        ) from error


def catalog_keys(typed: Iterable[str], known: Collection[str], catalog: str) -> list[str]:
    """The catalog keys that an operator typed, each as the catalog has it or as Dagster shows it.

    Args:
        typed: in any order; one that comes twice counts once.
        known: the catalog's own keys.
        catalog: its URL, for the error.

    Raises:
        ConfigError: a key is not in the catalog, or may be either of two keys.
    """
    shown = {to_partition_key(key): key for key in known}
    selected: dict[str, None] = {}
    unknown, unclear = list[str](), list[str]()
    for key in typed:
        original, behind = key if key in known else None, shown.get(key)
        if original is not None and behind is not None and original != behind:
            unclear.append(
                f"{key!r} is a key of the catalog (Dagster's {to_partition_key(key)!r}) and Dagster's form "
                f"of {behind!r}"
            )
        elif (found := original or behind) is None:
            unknown.append(repr(key))
        else:
            selected[found] = None
    if unknown:
        raise ConfigError(
            f"{len(unknown):,} partition keys are not in the catalog {catalog!r}: {named(unknown)}. Nothing was "
            "encoded. Correct them or take them out, and launch again; the asset source_partitions shows all keys."
        )
    if unclear:
        raise ConfigError(f"partition keys are unclear: {named(unclear)}. Nothing was encoded. Give the other form.")
    return list(selected)


def failed_on_record(names: CatalogNames, instance: dg.DagsterInstance) -> set[str]:
    """Partition keys that Dagster shows as failed: planned by a run that failed, and not materialized since."""
    storage = instance.event_log_storage
    attempts = storage.get_latest_asset_partition_materialization_attempts_without_materializations(names.embeddings)
    runs = sorted({run_id for run_id, _ in attempts.values()})
    failed: set[str] = set()
    for run_ids in in_chunks(runs):
        failures = dg.RunsFilter(run_ids=run_ids, statuses=[dg.DagsterRunStatus.FAILURE])
        failed |= {run.run_id for run in instance.get_runs(filters=failures)}
    return {key for key, (run_id, _) in attempts.items() if run_id in failed}


def named(items: Iterable[str]) -> str:
    """The first items, and how many there are beside them."""
    items = list(items)
    return ", ".join(items[:_NAMED]) + (f" and {len(items) - _NAMED:,} others" if len(items) > _NAMED else "")
