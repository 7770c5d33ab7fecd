"""The front door: definitions of one catalog, composed of settings, resources, assets, checks and
automation.

`embedding_catalog` makes them for one catalog, and several fit into one code location. This module
loaded as a code location is the one catalog of `surge.yaml` and the `SURGE_…` variables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import dagster as dg

from surge_dagster.assets.catalog_check import catalog_check, catalog_checks
from surge_dagster.assets.compare_spaces import compare_spaces
from surge_dagster.assets.consumers import target_assets
from surge_dagster.assets.current_space import current_space, next_space, switch_current_space
from surge_dagster.assets.derived_spaces import derive_job, derived_space
from surge_dagster.assets.embeddings import (
    Execute,
    embedding_jobs,
    embeddings,
    source_partitions,
    superbatches,
)
from surge_dagster.assets.embeddings_input import ChangesInput, EmbeddingsInput
from surge_dagster.automation.alerts import webhook_alerts
from surge_dagster.automation.embedding_runs import new_partitions, nightly_refresh, scheduled_check
from surge_dagster.automation.hand_over import hand_over_changes, hand_over_job
from surge_dagster.automation.lost_runs import lost_runs
from surge_dagster.config.nested_settings import GcpSettings
from surge_dagster.config.settings import Settings, load_settings
from surge_dagster.engine.errors import ConfigError
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.resources import CatalogSource, EncoderResource, OutputStore
from surge_dagster.resources.upstream_asset import asset_url

SpecHook: TypeAlias = Callable[[dg.AssetSpec], dg.AssetSpec]


def embedding_catalog(
    settings: Settings | None = None, *, name: str | None = None, **arguments: Any
) -> dg.Definitions:
    """Return the definitions of one catalog and one output, which need not exist yet.

    Args:
        settings: all of them. Without, they are read as everywhere: `arguments`, then the
            environment, then the file.
        name: tells catalogs of one code location apart: `shop` has the assets `shop/embeddings` and
            so on, the job `shop_catalog_refresh`, the resource `shop_output`. None is for plain
            names.
        arguments: settings by name, such as `source=` and `output=`; the source may be a Dagster
            asset or its key.
    """
    if settings is not None and arguments:
        raise TypeError(
            f"give either settings or arguments; both were given: {', '.join(arguments)}"
        )
    source = arguments.get("source")
    if isinstance(source, dg.AssetKey | dg.AssetsDefinition | dg.AssetSpec):
        arguments["source"] = asset_url(source)
    settings = settings or load_settings(**arguments)
    return catalog_definitions(settings, CatalogNames(name))


def catalog_definitions(
    settings: Settings,
    names: CatalogNames,
    *,
    get_asset_spec: SpecHook = lambda spec: spec,
    execute: Execute = lambda context, run: run.embed(),
) -> dg.Definitions:
    """Return the definitions of one catalog, with what a subclass of the component changes.

    Args:
        get_asset_spec: returns the spec of each asset, given the catalog's own.
        execute: does the work of each run that embeds.
    """
    resources = _resources(names, settings)
    checks = catalog_checks(names, settings)
    refresh, embed = embedding_jobs(names, settings, execute)
    tables = target_assets(names, settings)
    follow = [*derive_job(names, settings.derived, resources), *hand_over_job(names, tables)]
    assets = [
        source_partitions(names, resources[names.catalog_resource]),
        superbatches(names),
        embeddings(names, settings, execute),
        next_space(names),
        current_space(names),
        *(derived_space(names, settings, each) for each in settings.derived),
        *tables,
    ]
    jobs = [
        refresh,
        embed,
        catalog_check(names, checks),
        compare_spaces(names),
        switch_current_space(names),
        *follow,
    ]
    sensors = [
        new_partitions(names, settings, embed),
        lost_runs(names, settings),
        *webhook_alerts(names, settings),
        *hand_over_changes(names, settings, follow),
    ]
    return dg.Definitions(
        assets=dg.map_asset_specs(
            lambda spec: _spec(spec.replace_attributes(owners=settings.owners), get_asset_spec),
            assets,
        ),
        asset_checks=[checks],
        jobs=jobs,
        sensors=sensors,
        schedules=[nightly_refresh(names, settings, refresh), *scheduled_check(names, settings)],
        resources=resources,
    )


def _spec(spec: dg.AssetSpec, get_asset_spec: SpecHook) -> dg.AssetSpec:
    """Return the spec that a subclass of the component gives an asset, if it leaves what runs
    report."""
    key = spec.key.to_user_string()
    made: Any = get_asset_spec(spec)
    if not isinstance(made, dg.AssetSpec):
        raise ConfigError(
            f"get_asset_spec returned {type(made).__name__} for the asset {key}. Return an "
            "AssetSpec; of an asset that stays as it is, the argument."
        )
    for name in ("key", "partitions_def", "code_version"):
        if getattr(made, name) != getattr(spec, name):
            raise ConfigError(
                f"get_asset_spec changed {name} of the asset {key}, with which runs report it. "
                "Leave it; the attribute name is the prefix of all keys."
            )
    return made


def _resources(names: CatalogNames, settings: Settings) -> dict[str, Any]:
    values = settings.model_dump()
    storage: Any = settings.cloud_options()
    output = OutputStore(url=settings.output, storage=storage, **_named(OutputStore, values))
    return {
        names.catalog_resource: CatalogSource(
            url=settings.source, storage=storage, **_named(CatalogSource, values)
        ),
        names.encoder_resource: EncoderResource(**_named(EncoderResource, values)),
        names.output_resource: output,
        names.input_resource: EmbeddingsInput(output=output),
        names.changes_resource: ChangesInput(output=output),
        **_google_resources(names, settings.gcp),
    }


def _google_resources(names: CatalogNames, gcp: GcpSettings | None) -> dict[str, Any]:
    """Return the resources of dagster-gcp for other assets, which are not imported if the setting
    `gcp` is not given."""
    if gcp is None:
        return {}

    from surge_dagster.resources.google import CatalogBigQueryResource, CatalogGCSResource

    options: Any = gcp.options()
    project = gcp.project
    return {
        names.gcs_resource: CatalogGCSResource(project=project, gcp=options),
        names.bigquery_resource: CatalogBigQueryResource(
            project=project, location=gcp.location, gcp=options
        ),
    }


def _named(resource: type[dg.ConfigurableResource], values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in resource.model_fields if name in values}


@dg.definitions
def defs() -> dg.Definitions:
    """Return the one catalog of the settings, when Dagster loads the code location."""
    # The encoder pool lives in the run's own process; a process per step would only add one.
    return dg.Definitions.merge(
        embedding_catalog(), dg.Definitions(executor=dg.in_process_executor)
    )
