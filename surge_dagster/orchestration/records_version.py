"""Cheap tokens that change when what Dagster has on record of a catalog may have changed.

A sensor reads every observation and materialization of a catalog at each tick, and nearly always finds what it found
before. Counting them in the database takes a fiftieth of the time of fetching them. The token of the events holds, for
each kind of event, how many there are, the sum of their storage ids, and which one is the newest and from when: events
that were added, deleted with their run, or deleted and replaced under the same ids differ in one of these. It also
holds how many data versions there are and when the assets were wiped. The dynamic partitions have a token of their own.

Every night adds events, and years of them take long to count as well. So there is a mark, which looks at the newest
event of each kind and at how many runs there are, and costs the same however many events there are. What is added is
newer than the newest, and events are deleted with their run, or wiped with their asset: as long as the mark is what it
was, the events are what they were.

Dagster has no public call for this. The tables are its own, so they are asked only in versions that this was tried
with; elsewhere, and for an instance that is not on disk, there is no token.
"""

from __future__ import annotations

from collections.abc import Hashable

import dagster as dg
import sqlalchemy as sql
from dagster._core.storage.event_log import SqlEventLogStorage
from dagster._core.storage.event_log.schema import (
    AssetEventTagsTable,
    AssetKeyTable,
    DynamicPartitionsTable,
    SqlEventLogStorageTable,
)
from dagster._core.storage.legacy_storage import LegacyEventLogStorage

from surge_dagster.assets.source_partitions import DATA_VERSION_TAG
from surge_dagster.orchestration.event_batches import CHECKED_VERSIONS
from surge_dagster.orchestration.names import CatalogNames

# Others cut off what they join, MySQL after 1,024 bytes.
_WHOLE_STRINGS = ("sqlite", "postgresql")
_KINDS = [kind.value for kind in (dg.DagsterEventType.ASSET_OBSERVATION, dg.DagsterEventType.ASSET_MATERIALIZATION)]


def event_log_identity(instance: dg.DagsterInstance) -> Hashable | None:
    """Tells this event log from every other one; None where nothing about it may be remembered."""
    if not instance.is_persistent:
        return None
    ref = instance.get_ref()
    return ref.local_artifact_storage_data, ref.storage_data, ref.event_storage_data


def records_version(names: CatalogNames, instance: dg.DagsterInstance) -> Hashable | None:
    """The token of all events of the catalog's partitions, None where there is none; four queries that count them."""
    storage = _storage(instance)
    if storage is None:
        return None
    assets = [asset.to_string() for asset in (names.source_partitions, names.embeddings)]
    events, tags, records = SqlEventLogStorageTable.c, AssetEventTagsTable.c, AssetKeyTable.c
    count, newest = sql.func.count(), sql.func.max(events.id)
    of_kind = (
        sql.select(events.asset_key, events.dagster_event_type, count, sql.func.sum(events.id), newest)
        .where(events.asset_key.in_(assets), events.dagster_event_type.in_(_KINDS), events.partition.is_not(None))
        .group_by(events.asset_key, events.dagster_event_type)
        .order_by(events.asset_key, events.dagster_event_type)
    )
    versions = (
        sql.select(tags.asset_key, count)
        .where(tags.asset_key.in_(assets), tags.key == DATA_VERSION_TAG)
        .group_by(tags.asset_key)
        .order_by(tags.asset_key)
    )
    wiped = (
        sql.select(records.asset_key, records.asset_details)
        .where(records.asset_key.in_(assets))
        .order_by(records.asset_key)
    )
    with storage.index_connection() as connection:
        kinds = [tuple(row) for row in connection.execute(of_kind)]
        last = sql.select(events.id, events.timestamp).where(events.id.in_([kind[-1] for kind in kinds]))
        return (
            *kinds,
            *(tuple(row) for row in connection.execute(last.order_by(events.id))),
            *(tuple(row) for row in connection.execute(versions)),
            *(tuple(row) for row in connection.execute(wiped)),
        )


def records_mark(names: CatalogNames, instance: dg.DagsterInstance) -> Hashable | None:
    """What cannot stay the same when the token of the events changes, None where there is none.

    It may change without them: other runs and other assets change it too. A run that is deleted goes before its events,
    so a mark says nothing about events that were looked at while they went; it has to be the same once more.
    """
    storage = _storage(instance)
    if storage is None:
        return None
    assets = [asset.to_string() for asset in (names.source_partitions, names.embeddings)]
    events, tags, records = SqlEventLogStorageTable.c, AssetEventTagsTable.c, AssetKeyTable.c
    newest = [
        sql.select(events.id, events.timestamp)
        .where(events.asset_key == asset, events.dagster_event_type == kind, events.partition.is_not(None))
        .order_by(events.id.desc())
        .limit(1)
        for asset in assets
        for kind in _KINDS
    ]
    wiped = sql.select(records.asset_key, records.asset_details).where(records.asset_key.in_(assets))
    runs = (instance.get_runs_count(), *(record.dagster_run.run_id for record in instance.get_run_records(limit=1)))
    with storage.index_connection() as connection:
        return (
            *runs,
            connection.execute(sql.select(sql.func.max(tags.id))).scalar(),
            *(tuple(map(tuple, connection.execute(query))) for query in newest),
            *(tuple(row) for row in connection.execute(wiped.order_by(records.asset_key))),
        )


def registered_version(names: CatalogNames, instance: dg.DagsterInstance) -> Hashable | None:
    """A token of the dynamic partitions and their order, None where there is none; one query.

    It holds all of them and their ids, joined by the database: that takes a fraction of the time that as many rows
    take. Dagster takes no key with a line break in it.
    """
    storage = _storage(instance)
    if storage is None:
        return None
    columns, joined = DynamicPartitionsTable.c, sql.func.aggregate_strings
    of_catalog = sql.select(joined(columns.partition, "\n"), joined(sql.cast(columns.id, sql.Text), ","))
    with storage.index_connection() as connection:
        if connection.dialect.name not in _WHOLE_STRINGS:
            return None
        return tuple(connection.execute(of_catalog.where(columns.partitions_def_name == names.partitions_name)).one())


def _storage(instance: dg.DagsterInstance) -> SqlEventLogStorage | LegacyEventLogStorage | None:
    storage = instance.event_log_storage
    if dg.__version__ not in CHECKED_VERSIONS or not isinstance(storage, SqlEventLogStorage | LegacyEventLogStorage):
        return None
    return storage
