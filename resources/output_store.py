"""The output as a Dagster resource."""

from __future__ import annotations

import dagster as dg
from pydantic import Field

from surge_dagster.engine.output import open_store
from surge_dagster.engine.output.store import Store


class OutputStore(dg.ConfigurableResource):
    """Where embedding files go: `<url>/<space>/<encoded key>.parquet`."""

    url: str = Field(description="a path or URL; the folder need not exist yet")
    include_text: bool = Field(True, description="whether files carry the texts beside the vectors")

    def open(self) -> Store:
        """The store; `ConfigError` when the place cannot be one."""
        return open_store(self.url)
