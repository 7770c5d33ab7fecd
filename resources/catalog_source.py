"""The catalog as a Dagster resource."""

from __future__ import annotations

import dagster as dg
from pydantic import Field

from surge_dagster.engine.sources import DEFAULT_MAX_TEXT_BYTES, ParquetCatalog, open_source


class CatalogSource(dg.ConfigurableResource):
    """Where partitions come from. Nothing is opened before `open` is called."""

    url: str = Field(description="a path or URL: a folder of partition=<key>/ folders with Parquet files")
    id_column: str = Field("id", description="identifies a row within its partition")
    text_column: str = Field("text", description="what is embedded")
    max_text_bytes: int = Field(DEFAULT_MAX_TEXT_BYTES, description="a longer text refuses its partition")

    def open(self) -> ParquetCatalog:
        """The catalog; `ConfigError` when there is none."""
        return open_source(
            self.url, id_column=self.id_column, text_column=self.text_column, max_text_bytes=self.max_text_bytes
        )
