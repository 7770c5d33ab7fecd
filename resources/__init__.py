"""The resources of a run: the catalog, the encoder's settings, and the output.

Their fields are settings of the same names, with the same validation. None of them opens or starts anything before it
is called: a resource that Dagster starts with the run would load a model even when nothing is missing.

Dagster finds dependencies by looking at annotations while the class is created, so they must not be strings here.
"""

from dataclasses import replace
from typing import Any, Protocol

import dagster as dg
from pydantic import Field

from surge_dagster.engine.sources import ParquetCatalog
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.settings import CatalogSettings, EncoderSettings, FileSettings

__all__ = ["CatalogSource", "Encoder", "OutputStore"]


class CatalogSource(CatalogSettings, dg.ConfigurableResource):
    """Where partitions come from."""

    url: str = Field(description="path or URL of a folder that holds partition=<key>/ folders with Parquet files")

    def open(self) -> ParquetCatalog:
        """Open the catalog; `ConfigError` when there is none."""
        return self.open_catalog(self.url)


class Encoder(EncoderSettings, dg.ConfigurableResource):
    """Which vectors are computed, on which devices, in SuperBatches of which size."""


class GivesStorageClient(Protocol):
    """The part of `dagster_gcp.GCSResource` that is used. Importing its package takes two seconds."""

    def get_client(self) -> Any:
        """A `google.cloud.storage.Client`."""
        ...


class OutputStore(FileSettings, dg.ConfigurableResource):
    """Where embedding files go: `<url>/<space>/<encoded key>.<format>`.

    `storage` holds the options of a bucket. It is a dependency and not a field, since it may hold secrets: Dagster's UI
    shows fields and its event log keeps them. With `gcs`, a `dagster_gcp.GCSResource`, the store uses its credentials
    for a GCS bucket.
    """

    url: str = Field(description="path or URL; the folder need not exist yet")
    storage: dg.ResourceDependency[StorageOptions] = StorageOptions()  # pyright: ignore[reportAssignmentType]
    gcs: dg.ResourceDependency[GivesStorageClient] = None  # pyright: ignore[reportAssignmentType]

    def open(self) -> Store:
        """Open the store; `ConfigError` when the place cannot be one."""
        options = self.storage
        gcs = self.gcs
        if gcs is not None:
            options = replace(options, credentials=lambda: gcs.get_client()._credentials)
        return open_store(self.url, options)
