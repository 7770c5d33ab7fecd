"""What starts runs: a sensor for what is new, a schedule for what has changed, and the jobs that they launch.

The sensor is written by hand. Dagster's declarative conditions take seconds per tick at tens of thousands of partitions
and do not see what a run is working on already; this one costs two listings and a few queries.
"""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from surge_dagster.assets.catalog_check import catalog_checks
from surge_dagster.assets.discovery import Look, read_cursor, write_cursor
from surge_dagster.assets.embeddings import EMBEDDINGS_OP, REFRESH_OP, catalog_refresh
from surge_dagster.assets.launch import active_runs, held_keys, name_keys
from surge_dagster.assets.lineage import EMBEDDINGS
from surge_dagster.assets.outputs import known_space
from surge_dagster.assets.source_partitions import CATALOG_PARTITIONS, in_chunks
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import SurgeError
from surge_dagster.resources import CatalogSource, Encoder, OutputStore
from surge_dagster.settings import Settings

_SENSOR_SECONDS = 30

embed_partitions = dg.define_asset_job(
    "embed_partitions",
    selection=[EMBEDDINGS],
    executor_def=dg.in_process_executor,
    description="Partitions that the sensor found, named in the run's config.",
)
catalog_check = dg.define_asset_job(
    "catalog_check",
    selection=dg.AssetSelection.checks(catalog_checks),
    executor_def=dg.in_process_executor,
    description="Reads the whole catalog and the whole output and compares them.",
)
jobs = [catalog_refresh, embed_partitions, catalog_check]


def new_partitions(settings: Settings) -> dg.SensorDefinition:
    """The sensor that embeds what is new, and what has changed if the settings say so."""

    @dg.sensor(
        name="new_partitions",
        job=embed_partitions,
        minimum_interval_seconds=_SENSOR_SECONDS,
        description="Registers new partitions, observes changed ones, adopts files it finds, embeds what is missing.",
    )
    def sensor(
        context: dg.SensorEvaluationContext, catalog: CatalogSource, encoder: Encoder, output: OutputStore
    ) -> dg.SensorResult | dg.SkipReason:
        instance = context.instance
        try:
            look = Look(
                instance,
                output.open(),
                encoder.spec(),
                refresh_stale=settings.refresh_stale,
                limit=settings.max_partitions_per_run,
            )
            found = look.discover(catalog.open(), _held(instance), read_cursor(context.cursor))
        except SurgeError as error:
            return dg.SkipReason(str(error))
        requests = []
        if found.chosen:
            config = name_keys(instance, found.chosen)
            tags = {
                "dagster/asset_partition_range_start": found.chosen[0],
                "dagster/asset_partition_range_end": found.chosen[-1],
            }
            requests.append(dg.RunRequest(run_config=_run_config(EMBEDDINGS_OP, found.space, config), tags=tags))
        return dg.SensorResult(
            run_requests=requests,
            skip_reason=None if requests else found.summary,
            cursor=write_cursor(found.asked),
            dynamic_partitions_requests=[CATALOG_PARTITIONS.build_add_request(keys) for keys in in_chunks(found.new)],
            asset_events=found.events,
        )

    return sensor


def nightly_refresh(settings: Settings) -> dg.ScheduleDefinition:
    """The schedule that brings everything up to date, changed partitions included."""

    @dg.schedule(
        name="nightly_refresh",
        job=catalog_refresh,
        cron_schedule=settings.nightly_cron,
        execution_timezone=settings.timezone,
        description="Everything that is missing or stale, once a night; never begins another vector space by itself.",
    )
    def schedule(encoder: Encoder, output: OutputStore) -> dg.RunRequest | dg.SkipReason:
        try:
            space = known_space(output.open(), encoder.spec(), unattended=True)
        except SurgeError as error:
            return dg.SkipReason(str(error))
        return dg.RunRequest(run_config=_run_config(REFRESH_OP, space, {}))

    return schedule


def _run_config(op_name: str, space: Space | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Config of an unattended run: it may fill the space that is there, or begin the first one of an empty output."""
    expected = {"expected_space": space.name} if space else {}
    return {"ops": {op_name: {"config": {"unattended": True, **expected, **options}}}}


def _held(instance: dg.DagsterInstance) -> set[str] | None:
    registered = dict.fromkeys(instance.get_dynamic_partitions(CATALOG_PARTITIONS.name or ""))
    held: set[str] = set()
    for run in list(active_runs(instance, _embeds)):
        keys = held_keys(run, registered, (EMBEDDINGS_OP, REFRESH_OP))
        if keys is None:
            return None
        held |= keys
    return held


def _embeds(run: dg.DagsterRun) -> bool:
    return run.job_name in (catalog_refresh.name, embed_partitions.name) or EMBEDDINGS in (run.asset_selection or ())
