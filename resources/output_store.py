"""The output as a Dagster resource.

The options of a bucket are a dependency and not a field: Dagster's UI shows fields and its event log keeps them, and
these options hold secrets. Dagster finds dependencies by looking at the annotations while the
class is created, so the annotations of this module must not be strings.
"""

from dataclasses import replace
from typing import Any, Protocol

import dagster as dg
from pydantic import Field

from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.settings import FileSettings


class GivesStorageClient(Protocol):
    """The part of `dagster_gcp.GCSResource` that is used. Importing its package takes two seconds."""

    def get_client(self) -> Any:
        """A `google.cloud.storage.Client`."""
        ...


class OutputStore(FileSettings, dg.ConfigurableResource):
    """Where embedding files go: `<url>/<space>/<encoded key>.<format>`.

    `storage` holds the options of a bucket. With `gcs`, a `dagster_gcp.GCSResource`, the store uses its credentials
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
