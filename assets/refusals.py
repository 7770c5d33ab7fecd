"""Partitions that a run refused for their content, told on the partition itself.

Bad data does not get better by reading it again. So a refusal is an observation of the `embeddings` partition, with
its reason: a person finds it in the UI where the partition is, whichever run it was, and the sensor sees in one query
what it must leave alone until the source changes. What failed for a passing reason has none, and is tried again.
"""

from __future__ import annotations

from collections.abc import Iterable

import dagster as dg

from surge_dagster.assets.event_writer import EventWriter
from surge_dagster.assets.lineage import Catalogued
from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.partition_keys import to_partition_key
from surge_dagster.engine.telemetry import Failure


def tell_of_refusals(names: CatalogNames, context: dg.OpExecutionContext, refused: Iterable[Failure]) -> None:
    """Log an observation of each partition that was refused."""
    reasons = {failure.key: failure.reason for failure in refused}
    grace_seconds = names.resources(context.resources).encoder.grace_seconds
    with EventWriter(context, grace_seconds=grace_seconds) as events:
        for key, reason in reasons.items():
            metadata = {"key": dg.MetadataValue.text(key), "refused": dg.MetadataValue.text(reason)}
            events.log(
                dg.AssetObservation(
                    names.embeddings,
                    partition=to_partition_key(key),
                    description="Refused, and left alone until its source changes.",
                    metadata=metadata,
                )
            )


def refused_since_observed(catalogued: Catalogued) -> set[str]:
    """Partition keys whose content was refused in the source version observed last."""
    return {key for key, event in catalogued.refusal_ids.items() if event > catalogued.observation_ids.get(key, -1)}
