"""The sensor that makes a new space the current one as soon as it has everything, where the settings ask for it.

It begins no space: one that the settings mean and the output does not have is a person's to launch. While a space is
incomplete it costs two listings; when it is complete, the job that verifies and switches is asked for once per state of
its files, so that a space that is refused is looked at again only when something in it has changed.
"""

from __future__ import annotations

import hashlib

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.outputs import known_space
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.output.current_space import space_of_readers
from surge_dagster.engine.output.store import Store
from surge_dagster.engine.switching import missing_from
from surge_dagster.settings import Settings

_SENSOR_SECONDS = 60


def complete_space(
    names: CatalogNames, settings: Settings, job: UnresolvedAssetJobDefinition
) -> list[dg.SensorDefinition]:
    """The sensor that asks for a switch to the space that the settings mean, once that is complete."""
    if not settings.switch_when_complete:
        return []

    @dg.sensor(
        name=names.switch_sensor,
        job=job,
        minimum_interval_seconds=_SENSOR_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Switches to the space that the settings mean once every partition has a fresh file in it.",
        required_resource_keys=names.resource_keys,
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        resources = names.resources(context.resources)
        try:
            store = resources.output.open()
            space = known_space(names, store, resources.encoder.spec(), unattended=True)
            if space is None:
                return dg.SkipReason("there are no embeddings yet")
            if space_of_readers(store).name == space.name:
                return dg.SkipReason(f"readers use {space.name}, which the settings mean")
            missing, partitions = missing_from(resources.catalog.open(), store, space)
        except SurgeError as error:
            return dg.SkipReason(str(error))
        if missing or not partitions:
            return dg.SkipReason(f"{space.name} has {partitions - len(missing):,} of {partitions:,} partitions")
        config = {"ops": {names.current_space_op: {"config": {"space": space.name}}}}
        return dg.RunRequest(run_key=_state_of(store, space.name), run_config=config)

    return [sensor]


def _state_of(store: Store, space: str) -> str:
    """A name for what lies in a space now, and for how it got there."""
    digest = hashlib.sha256(space.encode())
    for stored in sorted(store.list(space), key=lambda stored: stored.name):
        digest.update(f"\n{stored.name} {stored.size} {stored.etag}".encode())
    return digest.hexdigest()
