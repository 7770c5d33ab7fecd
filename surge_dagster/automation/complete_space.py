"""The sensor that makes a new space the current one as soon as it has everything, where the settings ask for it.

It begins no space: one that the settings mean and the output does not have is a person's to launch. While a space is
incomplete it costs two listings; when it is complete, the job that verifies and switches is asked for once per state of
its files, so that a space that is refused is looked at again only when something in it has changed. A run that ended
without an answer, because it was canceled, killed or met an outage, is asked for again, after a wait that doubles.
While a switch is waiting or going on, whoever launched it, none is asked for: of two the one that ends last fails.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from functools import partial

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from surge_dagster.assets.current_space import REFUSED_TAG
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.output.current_space import space_of_readers
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.switching import missing_from
from surge_dagster.orchestration.active_runs import active_runs
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outputs import known_space
from surge_dagster.orchestration.run_assets import switches
from surge_dagster.orchestration.sensor_cursor import Request
from surge_dagster.settings import Settings

_SENSOR_SECONDS = 60
_STATE_TAG = "surge/switch_state"
_UNSUCCESSFUL = (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)


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
        instance, resources = context.instance, names.resources(context.resources)
        try:
            store = resources.output.open()
            space = known_space(names, store, resources.encoder.spec(), unattended=True)
            if space is None:
                return dg.SkipReason("there are no embeddings yet")
            if space_of_readers(store).name == space.name:
                return dg.SkipReason(f"readers use {space.name}, which the settings mean")
            going_on = [run.run_id for run in active_runs(instance, partial(switches, names, instance))]
            if going_on:
                return dg.SkipReason(f"a switch is waiting or going on already: run {', '.join(going_on)}")
            missing, partitions = missing_from(resources.catalog.open(), store, space)
        except SurgeError as error:
            return dg.SkipReason(str(error))
        if missing or not partitions:
            return dg.SkipReason(f"{space.name} has {partitions - len(missing):,} of {partitions:,} partitions")
        state = _state_of(store, space.name)
        unanswered = _unanswered(instance, state)
        if unanswered is not None and _now() < unanswered.due:
            return dg.SkipReason(
                f"{space.name} is complete; the switch was asked for {unanswered.attempt:,} times without an answer, "
                f"and is asked for again from {unanswered.due.isoformat(sep=' ', timespec='seconds')}"
            )
        return dg.RunRequest(
            run_key=f"{state} {unanswered.attempt}" if unanswered else state,
            run_config={"ops": {names.current_space_op: {"config": {"space": space.name}}}},
            tags={_STATE_TAG: state},
        )

    return [sensor]


def _unanswered(instance: dg.DagsterInstance, state: str) -> Request | None:
    """The runs of a state that ended without telling whether it may become the current one, None without any."""
    records = instance.get_run_records(dg.RunsFilter(tags={_STATE_TAG: state}))
    ended = [
        record.update_timestamp
        for record in records
        if record.dagster_run.status in _UNSUCCESSFUL and REFUSED_TAG not in record.dagster_run.tags
    ]
    return Request("", len(ended), max(ended).replace(tzinfo=UTC), set()) if ended else None


def _now() -> datetime:
    return datetime.now(UTC)


def _state_of(store: Store, space: str) -> str:
    """A name for what lies in a space now, and for how it got there."""
    digest = hashlib.sha256(space.encode())
    for stored in sorted(store.list(space), key=lambda stored: stored.name):
        digest.update(f"\n{stored.name} {stored.size} {stored.etag}".encode())
    return digest.hexdigest()
