"""The catalog's partitions as Dagster sees them: an external asset with one dynamic partition per catalog key.

Nothing here is executed. A key is registered when it is first seen, and its source version is observed when it has
changed, so Dagster's own staleness follows the catalog.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import dagster as dg

from surge_dagster.engine.sources.partition import Partition
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_events import PartitionEvent
from surge_dagster.orchestration.partition_keys import to_partition_key

DATA_VERSION_TAG = "dagster/data_version"
# SQLite takes 32,766 parameters.
_KEYS_PER_STATEMENT = 10_000


def source_partitions(names: CatalogNames) -> dg.AssetSpec:
    """The asset that stands for the catalog."""
    return dg.AssetSpec(
        names.source_partitions,
        partitions_def=names.partitions,
        group_name=names.group,
        kinds={"parquet"},
        description=(
            "The catalog: every partition is a set of texts with ids. Its data version is the source version, a token "
            "that changes when the partition may have changed. Observed by the sensor and by each run, never executed."
        ),
    )


def observation(names: CatalogNames, partition: Partition) -> PartitionEvent:
    """The event that says which source version a partition has now."""
    metadata: dict[str, str | int | float] = {"key": partition.key, "source_version": partition.source_version}
    if partition.rows is not None:
        metadata["dagster/row_count"] = partition.rows
    return PartitionEvent(
        dg.AssetObservation,
        names.source_partitions,
        partition=to_partition_key(partition.key),
        metadata=metadata,
        tags={DATA_VERSION_TAG: partition.source_version},
    )


def in_chunks(keys: Sequence[str]) -> Iterator[list[str]]:
    """Keys in numbers that one statement of Dagster's storage can take as parameters."""
    for start in range(0, len(keys), _KEYS_PER_STATEMENT):
        yield list(keys[start : start + _KEYS_PER_STATEMENT])


def changed(by_key: Mapping[str, Partition], observed: Mapping[str, str]) -> Iterator[Partition]:
    """Those whose source version is not the one observed last; both go by partition key."""
    for key, partition in by_key.items():
        if observed.get(key) != partition.source_version:
            yield partition
