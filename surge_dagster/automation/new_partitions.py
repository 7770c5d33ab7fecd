"""The sensor for what is new.

It is written by hand. Dagster's declarative conditions take seconds per tick at tens of thousands of partitions
and do not see what a run is working on already; this one costs two listings and a few queries.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import dagster as dg

from surge_dagster.assets.source_partitions import in_chunks
from surge_dagster.engine.errors import SurgeError
from surge_dagster.orchestration.active_runs import held_by_active_runs
from surge_dagster.orchestration.discovery import Look
from surge_dagster.orchestration.expected_settings import with_settings
from surge_dagster.orchestration.launch import shard_requests
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_events import made
from surge_dagster.orchestration.partition_keys import to_partition_key, with_short_keys
from surge_dagster.orchestration.pool_limit import POOL, enter_pool
from surge_dagster.orchestration.refusals import refusal_terms
from surge_dagster.orchestration.removed_partitions import Vanishing
from surge_dagster.orchestration.runless_events import is_real_tick, store_runless
from surge_dagster.orchestration.sensor_cursor import SensorCursor
from surge_dagster.settings import Settings

_SENSOR_SECONDS = 30


def new_partitions(names: CatalogNames, settings: Settings, job: dg.JobDefinition) -> dg.SensorDefinition:
    """The sensor that embeds what is new, and what has changed if the settings say so."""

    @dg.sensor(
        name=names.sensor,
        job_name=job.name,
        minimum_interval_seconds=_SENSOR_SECONDS,
        description="Registers new partitions, observes changed ones, adopts files it finds, embeds what is missing.",
        required_resource_keys=names.resource_keys,
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        instance, resources, now = context.instance, names.resources(context.resources), _now()
        try:
            look = Look(
                names,
                instance,
                resources.output.open(),
                resources.encoder.spec(),
                refresh_stale=settings.refresh_stale,
                sharding=settings.sharding(),
                vanishing=Vanishing(
                    names,
                    settings.vanished,
                    timedelta(seconds=settings.vanished_grace_seconds),
                    settings.vanished_share,
                ),
                terms=refusal_terms(resources),
            )
            held = held_by_active_runs(names, instance)
            found = look.discover(resources.catalog.open(), held, SensorCursor.read(context.cursor), now)
        except SurgeError as error:
            return dg.SkipReason(str(error))
        context.log.info(found.summary)
        requests = with_settings(
            shard_requests(names.embeddings_op, instance, found.space, found.shards),
            resources.catalog,
            resources.encoder,
        )
        events, new = found.events, found.new
        if is_real_tick(context):
            if not enter_pool(instance) and requests:
                context.log.warning(
                    f"this Dagster instance has no limit for the pool {POOL!r}, so as many runs encode at once as its "
                    "queue lets begin, each with an encoder of its own: give it the dagster.yaml that comes with "
                    "surge-dagster"
                )
            if not events or store_runless(instance, events):
                # Dagster's daemon would ask for each of them whether it is there.
                for keys in in_chunks(new):
                    instance.add_dynamic_partitions(names.partitions_name, keys)
                events, new = [], []
            if found.vanished:
                # Looking and telling took a while, in which a partition may have come back, or a run may have begun.
                try:
                    listed = with_short_keys(resources.catalog.open(), set(found.order))
                    back = {to_partition_key(partition.key) for partition in listed}
                    held = held_by_active_runs(names, instance)
                except SurgeError as error:
                    return dg.SkipReason(str(error))
                due = [key for key in found.vanished if key not in held and key not in back]
                found.vanished, trouble = look.vanishing.remove(due, found.cursor.gone, look.store, found.space)
                if trouble:
                    context.log.warning(trouble)
                    found.summary += f"; {trouble}"
        return dg.SensorResult(
            run_requests=requests,
            skip_reason=None if requests else found.summary,
            cursor=found.cursor.write(),
            dynamic_partitions_requests=[
                *(names.partitions.build_add_request(keys) for keys in in_chunks(new)),
                *(names.partitions.build_delete_request(keys) for keys in in_chunks(found.vanished)),
            ],
            asset_events=[made(event) for event in events],
        )

    return sensor


def _now() -> datetime:
    return datetime.now(UTC)
