"""The sensor for what is new.

It is written by hand. Dagster's declarative conditions take seconds per tick at tens of thousands of partitions
and do not see what a run is working on already; this one costs two listings and a few queries.
"""

from __future__ import annotations

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from surge_dagster.assets.discovery import Look, read_cursor, write_cursor
from surge_dagster.assets.launch import held_by_active_runs, name_keys, unattended_config
from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.source_partitions import in_chunks
from surge_dagster.engine.errors import SurgeError
from surge_dagster.settings import Settings

_SENSOR_SECONDS = 30


def new_partitions(names: CatalogNames, settings: Settings, job: UnresolvedAssetJobDefinition) -> dg.SensorDefinition:
    """The sensor that embeds what is new, and what has changed if the settings say so."""

    @dg.sensor(
        name=names.sensor,
        job=job,
        minimum_interval_seconds=_SENSOR_SECONDS,
        description="Registers new partitions, observes changed ones, adopts files it finds, embeds what is missing.",
        required_resource_keys=names.resource_keys,
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        instance, resources = context.instance, names.resources(context.resources)
        try:
            look = Look(
                names,
                instance,
                resources.output.open(),
                resources.encoder.spec(),
                refresh_stale=settings.refresh_stale,
                limit=settings.max_partitions_per_run,
            )
            found = look.discover(
                resources.catalog.open(), held_by_active_runs(names, instance), read_cursor(context.cursor)
            )
        except SurgeError as error:
            return dg.SkipReason(str(error))
        requests = []
        if found.chosen:
            config = name_keys(instance, found.chosen)
            tags = {
                "dagster/asset_partition_range_start": found.chosen[0],
                "dagster/asset_partition_range_end": found.chosen[-1],
            }
            run_config = unattended_config(names.embeddings_op, found.space, config)
            requests.append(dg.RunRequest(run_config=run_config, tags=tags))
        return dg.SensorResult(
            run_requests=requests,
            skip_reason=None if requests else found.summary,
            cursor=write_cursor(found.asked),
            dynamic_partitions_requests=[names.partitions.build_add_request(keys) for keys in in_chunks(found.new)],
            asset_events=found.events,
        )

    return sensor
