"""The resources of a run: a catalog to read, an encoder pool, a place for the files."""

from __future__ import annotations

from surge_dagster.resources.catalog_source import CatalogSource
from surge_dagster.resources.encoder import Encoder
from surge_dagster.resources.output_store import OutputStore

__all__ = ["CatalogSource", "Encoder", "OutputStore"]
