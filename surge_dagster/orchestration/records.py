"""What Dagster has on record of a catalog, read in bulk: one query per question, never one per
partition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import dagster as dg

from surge_dagster.orchestration.asset_events import DATA_VERSION_TAG
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import in_groups, to_partition_key

_OBSERVATION = dg.DagsterEventType.ASSET_OBSERVATION
_MATERIALIZATION = dg.DagsterEventType.ASSET_MATERIALIZATION


@dataclass(frozen=True, slots=True)
class Catalogued:
    """What Dagster has on record, by partition key.

    Attributes:
        asset: `embeddings` or `next_space`, whose files these are.
        registered: the dynamic partitions, in Dagster's order.
        sources: the source version that was reported last.
        source_ids: storage id of that materialization of `source_partitions`.
        embedded: data version of the last materialization of the asset.
        embedding_ids: storage id of that materialization.
        refused: what the last observation of the asset, which reports a refusal, is about.
        refusal_ids: storage id of that observation.
    """

    asset: dg.AssetKey
    registered: dict[str, None]
    sources: dict[str, str]
    source_ids: dict[str, int]
    embedded: dict[str, str]
    embedding_ids: dict[str, int]
    refused: dict[str, str]
    refusal_ids: dict[str, int]

    def knows(self, key: str, desired_version: str, source_version: str) -> bool:
        """Return whether the last materialization has this version and the last source version."""
        # Event tags other than the data version cannot be read in bulk. That the materialization is
        # younger than the source's last event means the same. A younger refusal leaves open what
        # became of the file.
        changed = max(self.source_ids.get(key, -1), self.refusal_ids.get(key, -1))
        return (
            self.embedded.get(key) == desired_version
            and self.embedding_ids.get(key, -1) > changed
            and source_version == self.sources.get(key, source_version)
        )


def read_catalogued(
    names: CatalogNames, asset: dg.AssetKey, instance: dg.DagsterInstance
) -> Catalogued:
    """Read everything on record, with the files that an asset shows, in seven queries."""
    storage = instance.event_log_storage

    def versions(asset: dg.AssetKey, kind: dg.DagsterEventType) -> dict[str, str]:
        tags = storage.get_latest_tags_by_partition(asset, kind, [DATA_VERSION_TAG])
        return {key: of_partition[DATA_VERSION_TAG] for key, of_partition in tags.items()}

    def ids(asset: dg.AssetKey, kind: dg.DagsterEventType) -> dict[str, int]:
        return dict(instance.get_latest_storage_id_by_partition(asset, kind))

    return Catalogued(
        asset=asset,
        registered=dict.fromkeys(instance.get_dynamic_partitions(names.partitions_name)),
        sources=versions(names.source_partitions, _MATERIALIZATION),
        source_ids=ids(names.source_partitions, _MATERIALIZATION),
        embedded=versions(asset, _MATERIALIZATION),
        embedding_ids=ids(asset, _MATERIALIZATION),
        refused=versions(asset, _OBSERVATION),
        refusal_ids=ids(asset, _OBSERVATION),
    )


def last_embeddings(
    names: CatalogNames, instance: dg.DagsterInstance, keys: Iterable[str]
) -> Iterator[dg.AssetMaterialization]:
    """Yield the last materializations of partitions of `embeddings`, given by catalog key."""
    by_key = instance.get_latest_storage_id_by_partition(names.embeddings, _MATERIALIZATION)
    ids = [by_key[key] for key in map(to_partition_key, keys) if key in by_key]
    for storage_ids in in_groups(ids):
        wanted = dg.AssetRecordsFilter(names.embeddings, storage_ids=storage_ids)
        for record in instance.fetch_materializations(wanted, limit=len(storage_ids)).records:
            if record.asset_materialization:
                yield record.asset_materialization


def failed_on_record(asset: dg.AssetKey, instance: dg.DagsterInstance) -> set[str]:
    """Return the partition keys that Dagster shows as failed."""
    # They were planned by a run that failed, and not materialized since.
    storage = instance.event_log_storage
    attempts = storage.get_latest_asset_partition_materialization_attempts_without_materializations(
        asset
    )
    runs = sorted({run_id for run_id, _ in attempts.values()})
    failed: set[str] = set()
    for run_ids in in_groups(runs):
        failures = dg.RunsFilter(run_ids=run_ids, statuses=[dg.DagsterRunStatus.FAILURE])
        failed |= {run.run_id for run in instance.get_runs(filters=failures)}
    return {key for key, (run_id, _) in attempts.items() if run_id in failed}
