"""The catalog as a Dagster resource."""

from __future__ import annotations

import dagster as dg
from pydantic import Field

from surge_dagster.engine.sources import ParquetCatalog
from surge_dagster.settings import CatalogSettings


class CatalogSource(CatalogSettings, dg.ConfigurableResource):
    """Where partitions come from, with the settings of the same names. Nothing is opened before `open` is called."""

    url: str = Field(description="path or URL of a folder that holds partition=<key>/ folders with Parquet files")

    def open(self) -> ParquetCatalog:
        """Open the catalog; `ConfigError` when there is none."""
        return self.open_catalog(self.url)
