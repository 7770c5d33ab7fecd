"""What a run needs from outside: a catalog to read, a pool that encodes, a place for the files."""

from __future__ import annotations

from surge_dagster.resources.catalog_source import CatalogSource
from surge_dagster.resources.encoder import Encoder
from surge_dagster.resources.output_store import OutputStore

__all__ = ["CatalogSource", "Encoder", "OutputStore"]
