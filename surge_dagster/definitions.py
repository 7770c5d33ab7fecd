"""The front door: one Definitions object, composed of settings, resources, assets, checks and automation."""

from __future__ import annotations

from typing import Any

import dagster as dg

from surge_dagster import automation
from surge_dagster.assets import catalog_check, embeddings, embeddings_input, source_partitions, superbatches
from surge_dagster.resources import CatalogSource, Encoder, OutputStore
from surge_dagster.settings import Settings, load_settings


def build_definitions(settings: Settings) -> dg.Definitions:
    """Everything Dagster needs to know, for one catalog and one output; neither needs to exist yet."""
    values = settings.model_dump()
    encoder = Encoder(**_named(Encoder, values))
    output = OutputStore(
        url=settings.output,
        storage=settings.storage_options.options(),  # pyright: ignore[reportArgumentType]
        **_named(OutputStore, values),
    )
    return dg.Definitions(
        assets=[source_partitions.source_partitions, superbatches.superbatches, embeddings.embeddings],
        asset_checks=[catalog_check.catalog_checks],
        jobs=automation.jobs,
        sensors=[automation.new_partitions(settings)],
        schedules=[automation.nightly_refresh(settings)],
        resources={
            "catalog": CatalogSource(url=settings.source, **_named(CatalogSource, values)),
            "encoder": encoder,
            "output": output,
            "embeddings_input": embeddings_input.EmbeddingsInput(output=output, encoder=encoder),
        },
        # The encoder pool lives in the run's own process; a process per step would only add one.
        executor=dg.in_process_executor,
    )


def _named(resource: type[dg.ConfigurableResource], values: dict[str, Any]) -> dict[str, Any]:
    """The settings that a resource has a field of the same name for."""
    return {name: values[name] for name in resource.model_fields if name in values}


defs = build_definitions(load_settings())
