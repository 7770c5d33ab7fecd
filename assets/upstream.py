"""The external assets upstream of `embeddings`: the catalog's partitions, and the input of the encode calls.

Dagster executes neither. A run of `embeddings` reports the events of both; the sensor observes the catalog too.
`superbatches` is not a second output of that run's op: an op with a partitioned and an unpartitioned asset makes
backfills from the UI impossible.
"""

from __future__ import annotations

import dagster as dg

from surge_dagster.orchestration.names import CatalogNames


def source_partitions(names: CatalogNames) -> dg.AssetSpec:
    """The external asset with one dynamic partition per catalog key."""
    return dg.AssetSpec(
        names.source_partitions,
        partitions_def=names.partitions,
        group_name=names.group,
        kinds={"parquet"},
        description=(
            "The catalog: each partition is a set of texts with ids. Its data version is the source version, a token "
            "that changes when the partition may have changed. The sensor and each run observe it."
        ),
    )


def superbatches(names: CatalogNames) -> dg.AssetSpec:
    """The asset with an event per SuperBatch."""
    return dg.AssetSpec(
        names.superbatches,
        deps=[names.source_partitions],
        group_name=names.group,
        kinds={"arrow"},
        description=(
            "The input of each encode call: many small partitions together, or a piece of a large one. One event per "
            "SuperBatch, with its metrics, and one at the end of each run, with charts; its data version is the "
            "vector space."
        ),
    )
