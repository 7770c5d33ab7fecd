"""What Dagster knows of the catalog, and the events that tell it more.

Dagster decides that a partition is up to date from four tags of its last materialization: its own data and code
version, and which version and which event of each upstream asset it was made from. They are written here, the same way
for a partition that was just encoded and for a valid file that is adopted. All reads are one query per question, never
one per partition.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import dagster as dg
from dagster._core.events import DagsterEventType

from surge_dagster.assets.source_partitions import DATA_VERSION_TAG
from surge_dagster.engine.report import Receipt
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_events import FilePath, PartitionEvent
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.records_version import (
    event_log_identity,
    records_mark,
    records_version,
    registered_version,
)

# Raised by hand when the same texts in the same space would give other files.
CODE_VERSION = "1"

_INPUT_VERSION_TAG = "dagster/input_data_version/"
_INPUT_EVENT_TAG = "dagster/input_event_pointer/"
_NO_EVENT = "NULL"

_known: dict[Hashable, _Known] = {}  # by event log and catalog
_known_keys: dict[Hashable, tuple[Hashable, dict[str, None]]] = {}


@dataclass(frozen=True, slots=True)
class Catalogued:
    """What Dagster has on record, by partition key.

    Attributes:
        registered: the dynamic partitions, in Dagster's order.
        observed: source version observed last.
        observation_ids: storage id of that observation.
        embedded: data version of the last materialization of `embeddings`.
        embedding_ids: storage id of that materialization.
        refused: what the last observation of `embeddings`, which tells of a refusal, is about.
        refusal_ids: storage id of that observation.
    """

    registered: dict[str, None]
    observed: dict[str, str]
    observation_ids: dict[str, int]
    embedded: dict[str, str]
    embedding_ids: dict[str, int]
    refused: dict[str, str]
    refusal_ids: dict[str, int]

    def knows(self, key: str, desired_version: str, source_version: str | None = None) -> bool:
        """Whether a partition key's last materialization is of this version, from the source version observed last.

        Args:
            source_version: that it must be, None for any.

        Event tags other than the data version cannot be read in bulk; that the materialization is younger than the
        observation says the same. A refusal that is younger still leaves open what became of the file.
        """
        made = self.embedding_ids.get(key, -1)
        since = max(self.observation_ids.get(key, -1), self.refusal_ids.get(key, -1))
        return (
            self.embedded.get(key) == desired_version
            and made > since
            and source_version in (None, self.observed.get(key))
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """What was read before.

    Attributes:
        mark: with which the events were found unchanged by two looks, None as long as there were none.
        seen: the mark at the last look that counted the events.
        version: token of the events that were read.
        catalogued: what they say.
    """

    mark: Hashable | None
    seen: Hashable
    version: Hashable
    catalogued: Catalogued


def read_catalogued(
    names: CatalogNames, instance: dg.DagsterInstance, registered: dict[str, None] | None = None
) -> Catalogued:
    """Everything on record, in seven queries whatever the number of partitions.

    Args:
        registered: the dynamic partitions, where they are known.
    """
    storage = instance.event_log_storage

    def versions(asset: dg.AssetKey, kind: DagsterEventType) -> dict[str, str]:
        tags = storage.get_latest_tags_by_partition(asset, kind, [DATA_VERSION_TAG])
        return {key: tagged[DATA_VERSION_TAG] for key, tagged in tags.items()}

    def ids(asset: dg.AssetKey, kind: DagsterEventType) -> dict[str, int]:
        return dict(storage.get_latest_storage_id_by_partition(asset, kind))

    return Catalogued(
        registered=_registered(names, instance) if registered is None else registered,
        observed=versions(names.source_partitions, DagsterEventType.ASSET_OBSERVATION),
        observation_ids=ids(names.source_partitions, DagsterEventType.ASSET_OBSERVATION),
        embedded=versions(names.embeddings, DagsterEventType.ASSET_MATERIALIZATION),
        embedding_ids=ids(names.embeddings, DagsterEventType.ASSET_MATERIALIZATION),
        refused=versions(names.embeddings, DagsterEventType.ASSET_OBSERVATION),
        refusal_ids=ids(names.embeddings, DagsterEventType.ASSET_OBSERVATION),
    )


def read_catalogued_again(names: CatalogNames, instance: dg.DagsterInstance) -> Catalogued:
    """Everything on record, for a process that asks again and again: events are fetched when there may be others.

    What is given is shared with later calls; nobody changes it.
    """
    identity = event_log_identity(instance)
    # Before the events: one that comes between is fetched now or, since the token has moved, by the next call.
    mark = None if identity is None else records_mark(names, instance)
    if mark is None:
        return read_catalogued(names, instance)
    known = _known.get((identity, names))
    registered = _registered_again(names, instance, identity)
    if known is None or known.mark != mark:
        version = records_version(names, instance)
        if known is None or known.version != version:
            known = _Known(None, mark, version, read_catalogued(names, instance, registered))
        else:  # the same events with the same mark, one look after the other: nobody is deleting them
            known = replace(known, mark=mark if known.seen == mark else None, seen=mark)
        _known[identity, names] = known
    return replace(known.catalogued, registered=registered)


def _registered_again(names: CatalogNames, instance: dg.DagsterInstance, identity: Hashable) -> dict[str, None]:
    version = registered_version(names, instance)
    known, registered = _known_keys.get((identity, names), (None, {}))
    if version is None or known != version:
        registered = _registered(names, instance)
        _known_keys[identity, names] = version, registered
    return registered


def _registered(names: CatalogNames, instance: dg.DagsterInstance) -> dict[str, None]:
    return dict.fromkeys(instance.get_dynamic_partitions(names.partitions_name))


def materialization(
    names: CatalogNames,
    receipt: Receipt,
    observation_id: int | None,
    superbatch_event_id: int | None = None,
    *,
    reused: bool = False,
    adopted: bool = False,
) -> PartitionEvent:
    """The event of one embedded partition.

    Args:
        names: of its catalog.
        receipt: of its file.
        observation_id: storage id of the observation of the source version it was made from.
        superbatch_event_id: storage id of the event of its SuperBatch, where it was encoded in this run.
        reused: the file was there already and is on record; said again because a backfill asked for it.
        adopted: the file was there already and was not on record.
    """
    metadata: dict[str, str | int | float] = {
        "key": receipt.key,
        "dagster/row_count": receipt.rows,
        "rows": receipt.rows,
        "dimension": receipt.dimension,
        "path": FilePath(receipt.path),
        "bytes": receipt.bytes,
        "truncated": receipt.truncated,
        "space": receipt.space,
        "source_version": receipt.source_version,
        "content_digest": receipt.content_digest,
        "etag": receipt.etag,
        "action": "adopted" if adopted else receipt.action,
    }
    if receipt.superbatch is not None:
        metadata["superbatch"] = receipt.superbatch
    if receipt.texts_per_second is not None:
        metadata["texts_per_second"] = float(round(receipt.texts_per_second, 1))
    if receipt.previous_cosine is not None:
        metadata["compared_rows"] = receipt.compared_rows
        metadata["previous_cosine"] = float(round(receipt.previous_cosine, 6))
    if reused:
        metadata["reused"] = True
    source, superbatch = names.source_partitions.to_user_string(), names.superbatches.to_user_string()
    return PartitionEvent(
        dg.AssetMaterialization,
        names.embeddings,
        partition=to_partition_key(receipt.key),
        metadata=metadata,
        tags={
            DATA_VERSION_TAG: receipt.desired_version,
            "dagster/data_version_is_user_provided": "true",
            "dagster/code_version": CODE_VERSION,
            f"{_INPUT_VERSION_TAG}{source}": receipt.source_version,
            f"{_INPUT_EVENT_TAG}{source}": _NO_EVENT if observation_id is None else str(observation_id),
            f"{_INPUT_VERSION_TAG}{superbatch}": receipt.space,
            f"{_INPUT_EVENT_TAG}{superbatch}": (_NO_EVENT if superbatch_event_id is None else str(superbatch_event_id)),
        },
    )
