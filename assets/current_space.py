"""The asset `current_space`: names the space that readers use; materializing it switches to another one.

A switch refuses a space that lacks a partition, so that no downstream asset reads an incomplete one. The data version
is the space: only a switch makes downstream assets stale.

Dagster reads the annotations of ops while it makes them, so they must not be strings here.
"""

from typing import Any

import dagster as dg
from pydantic import Field

from surge_dagster.engine.errors import ConfigError, SurgeError, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.switching import SwitchRefused, switch_space
from surge_dagster.orchestration.active_runs import record_process
from surge_dagster.orchestration.discovery import known_space
from surge_dagster.orchestration.failures import failure_table
from surge_dagster.orchestration.launch import RUN_TAGS
from surge_dagster.orchestration.names import CatalogNames, CatalogResources

_RETRIES = 2
_RETRY_SECONDS = 5


class SwitchConfig(dg.Config):
    """Options of a switch; without them it switches to the space of the settings."""

    space: str | None = Field(None, description="name of the space to switch to; none: the one of the settings")


def current_space(names: CatalogNames) -> dg.AssetsDefinition:
    """The asset that stands for the space that readers use."""

    @dg.asset(
        key=names.current_space,
        deps=[names.embeddings],
        group_name=names.group,
        kinds={"json"},
        required_resource_keys=names.resource_keys,
        description=(
            "The vector space that readers use. Materializing it switches to the space of the settings, or to the one "
            "named in the config, if that space has a fresh, valid file of every partition."
        ),
    )
    def switch(context: dg.AssetExecutionContext, config: SwitchConfig) -> dg.MaterializeResult:
        """Verify a space and make it the current one."""
        resources = names.resources(context.resources)
        record_process(context.op_execution_context)
        try:
            source, store = resources.catalog.open(), resources.output.open()
            space = named_space(store, config.space) if config.space else _space_of_settings(names, resources, store)
            switched = switch_space(source, store, space)
        except TransientError as error:
            raise dg.RetryRequested(_RETRIES, _RETRY_SECONDS) from error
        except SwitchRefused as refused:
            listed = failure_table([(found.key, found.reason) for found in refused.violations])
            metadata = {"counts": dg.MetadataValue.json(dict(refused.counts)), "failed": listed}
            raise dg.Failure(str(refused), metadata=metadata, allow_retries=False) from refused
        except SurgeError as error:
            raise dg.Failure(str(error), allow_retries=False) from error
        verb = "is now" if switched.changed else "was already"
        context.log.info(f"{space.name} {verb} the current space of {store.url}")
        return dg.MaterializeResult(
            metadata={
                "space": space.name,
                "previous_space": switched.current.previous,
                "changed": switched.changed,
                "model": space.requested.model,
                "dimension": space.dimension,
                "location": store.location(space.name),
            }
            | ({"partitions": switched.partitions, "rows": switched.rows} if switched.changed else {}),
            data_version=dg.DataVersion(space.name),
        )

    return switch


def switch_current_space(names: CatalogNames) -> Any:
    """The job that makes another space the current one."""
    return dg.define_asset_job(
        names.switch_job,
        selection=[names.current_space],
        executor_def=dg.in_process_executor,
        run_tags=RUN_TAGS,
        description="Verifies a space against the catalog and makes it the one that readers use.",
    )


def _space_of_settings(names: CatalogNames, resources: CatalogResources, store: Store) -> Space:
    space = known_space(names, store, resources.encoder.encoding_spec(), unattended=False)
    if space is None:
        raise ConfigError(
            f"the output {store.url!r} holds nothing of {resources.encoder.model!r} with these settings yet. Launch "
            f"{names.refresh_job}, then switch."
        )
    return space
