"""The jobs that sensor and schedules launch."""

from __future__ import annotations

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from surge_dagster.assets.names import CatalogNames


def catalog_check(names: CatalogNames, checks: dg.AssetChecksDefinition) -> UnresolvedAssetJobDefinition:
    """The job that evaluates the catalog's checks."""
    return dg.define_asset_job(
        names.check_job,
        selection=dg.AssetSelection.checks(checks),
        executor_def=dg.in_process_executor,
        description="Reads the whole catalog and the whole output and compares them.",
    )
