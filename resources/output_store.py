"""The output as a Dagster resource.

How a bucket is reached is a dependency, not a field: fields are configuration, which Dagster's UI shows and its event
log keeps, and these options hold secrets. Dagster finds dependencies by looking at annotations while the class is made,
so they must not be strings here.
"""

from dataclasses import replace
from typing import Annotated, Any, Protocol

import dagster as dg
from pydantic import Field

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import FILE_FORMATS, FileFormat
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.store import Store


class GivesStorageClient(Protocol):
    """What a `dagster_gcp.GCSResource` does. Its package takes two seconds to import, in every process of Dagster."""

    def get_client(self) -> Any:
        """A `google.cloud.storage.Client`."""
        ...


class OutputStore(dg.ConfigurableResource):
    """Where embedding files go: `<url>/<space>/<encoded key>.<format>`.

    `storage` holds the options of a bucket. With `gcs`, a `dagster_gcp.GCSResource`, a GCS bucket is reached with its
    credentials.
    """

    url: str = Field(description="a path or URL; the folder need not exist yet")
    include_text: bool = Field(True, description="whether files carry the texts beside the vectors")
    format: Annotated[str, Field(description="of files that are written: parquet or arrow; one per space")] = "parquet"
    storage: dg.ResourceDependency[StorageOptions] = StorageOptions()  # pyright: ignore[reportAssignmentType]
    gcs: dg.ResourceDependency[GivesStorageClient] = None  # pyright: ignore[reportAssignmentType]

    def file_format(self) -> FileFormat:
        """The format; `ConfigError` when there is none of that name."""
        for known in FILE_FORMATS:
            if known == self.format:
                return known
        raise ConfigError(f"format is one of {', '.join(FILE_FORMATS)}, not {self.format!r}")

    def open(self) -> Store:
        """The store; `ConfigError` when the place cannot be one."""
        options = self.storage
        gcs = self.gcs
        if gcs is not None:
            options = replace(options, credentials=lambda: gcs.get_client()._credentials)
        return open_store(self.url, options)
