"""Partitions that a run refused for their content, told on the partition itself.

Bad data does not get better by reading it again. So a refusal is an observation of the `embeddings` partition, with
its reason: a person finds it in the UI where the partition is, whichever run it was, and the sensor sees in one query
what it must leave alone. What failed for a passing reason has none, and is tried again.

A refusal is of one source version under certain settings, and says of which: it may be told hours after the partition
was read, and by then the source may be another one. A person may also have mended it by another setting.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import dagster as dg

from surge_dagster.engine.report import Failure
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.orchestration.asset_events import DATA_VERSION_TAG
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.names import CatalogNames, CatalogResources
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.records import Catalogued


def refusal_terms(resources: CatalogResources) -> str:
    """The settings that decide which content is refused."""
    return json.dumps(
        [
            resources.catalog.model_dump(include={"id_column", "text_column", "max_text_bytes"}),
            resources.encoder.model_dump(exclude={"grace_seconds"}),  # a text may end one device's workers alone
        ],
        sort_keys=True,
    )


def tell_of_refusals(
    names: CatalogNames,
    context: dg.OpExecutionContext,
    refused: Iterable[Failure],
    partitions: Mapping[str, Partition],
) -> None:
    """Log an observation of each partition that was refused.

    Args:
        partitions: as they were read, by catalog key.
    """
    terms = refusal_terms(names.resources(context.resources))
    reasons = {failure.key: failure.reason for failure in refused}
    events = [refusal(names, partitions[key], reason, terms) for key, reason in reasons.items()]
    report_events(context.instance, context, events)


def refusal(names: CatalogNames, partition: Partition, reason: str, terms: str) -> dg.AssetObservation:
    """The event that says that a partition was refused as it was read, under the settings of `refusal_terms`."""
    return dg.AssetObservation(
        names.embeddings,
        partition=to_partition_key(partition.key),
        description="Refused, and left alone until its source or a setting changes.",
        metadata={"key": dg.MetadataValue.text(partition.key), "refused": dg.MetadataValue.text(reason)},
        # Dagster can look up no other tag of many partitions at once.
        tags={DATA_VERSION_TAG: _version(partition, terms)},
    )


def still_refused(catalogued: Catalogued, by_key: Mapping[str, Partition], terms: str) -> set[str]:
    """Partition keys whose content was refused as it is now, by whoever looked at it last.

    Args:
        by_key: the catalog, by partition key.
        terms: the settings as they are now, from `refusal_terms`.
    """
    return {
        key
        for key, version in catalogued.refused.items()
        if key in by_key
        and version == _version(by_key[key], terms)
        and catalogued.refusal_ids.get(key, -1) > catalogued.embedding_ids.get(key, -1)
    }


def _version(partition: Partition, terms: str) -> str:
    return hashlib.sha256(f"{partition.source_version}\0{terms}".encode()).hexdigest()[:32]
