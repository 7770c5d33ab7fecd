"""The resources of a run: the catalog, the encoder, and the output.

Their fields are settings of the same names, with the same validation. None of them opens or starts
anything before it is called: a run in which nothing is missing loads no model.

Dagster finds dependencies by looking at annotations while the class is created, so they must not be
strings here.
"""

from copy import copy
from dataclasses import replace
from typing import Any, Protocol, Self

import dagster as dg
from pydantic import Field, PrivateAttr

from surge_dagster.config.catalog_settings import CatalogSettings
from surge_dagster.config.settings import FileSettings, absolute_place
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.sources import Source
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.object_client import GcpOptions
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.tables.bigquery import BIGQUERY_SCHEME
from surge_dagster.resources.encoder import EncoderResource
from surge_dagster.resources.upstream_asset import asset_key, open_asset

__all__ = ["CatalogSource", "EncoderResource", "OutputStore"]


class GoogleResource(Protocol):
    """The part of the resources of `dagster_gcp` that is used. Importing the package takes two
    seconds."""

    project: str | None


class CatalogSource(CatalogSettings, dg.ConfigurableResource):
    """Where partitions come from.

    `gcs`, a `dagster_gcp.GCSResource`, and `bigquery`, a `dagster_gcp.BigQueryResource`, give
    project, location and credentials for a bucket of Google Cloud Storage and for BigQuery.
    """

    url: str = Field(
        description="path or URL of a folder, or a pattern such as data/{category}.parquet"
    )
    storage: dg.ResourceDependency[StorageOptions] = StorageOptions()  # pyright: ignore[reportAssignmentType]
    gcs: dg.ResourceDependency[GoogleResource] = None  # pyright: ignore[reportAssignmentType]
    bigquery: dg.ResourceDependency[GoogleResource] = None  # pyright: ignore[reportAssignmentType]

    _context: Any = PrivateAttr(None)

    def within(self, context: Any) -> Self:
        """Return the source that finds a Dagster asset in the code location of this context."""
        bound = copy(self)
        bound._context = context
        return bound

    def open(self, spec: EncodingSpec) -> Source:
        """Open the catalog with the rows of a spec; `ConfigError` when there is none."""
        if asset_key(self.url) is None:
            return self.open_catalog(self.url, self.cloud_options(), spec)
        self.require_no_bigquery(self.url)
        selection = self.selection(spec.chunks)
        source = open_asset(self.url, self._context, selection, self.partition_by)
        return self.with_rows_of(source, spec)

    def cloud_options(self) -> StorageOptions:
        """Return how the bucket, or BigQuery, is reached."""
        is_bigquery = self.url.startswith(BIGQUERY_SCHEME)
        return _with_google(self.storage, self.bigquery if is_bigquery else self.gcs)

    def describe(self) -> str:
        """Describe the catalog without opening it."""
        key = asset_key(self.url)
        if key is not None:
            where = f"The asset `{key.to_user_string()}`, through its IO manager."
        elif self.query:
            where = (
                f"A query that the project `{self.url.removeprefix(BIGQUERY_SCHEME)}` of BigQuery "
                "runs."
            )
        else:
            where = f"The catalog in `{absolute_place(self.url)}`."
        if self.partition_by:
            columns = " and ".join(f"`{name}`" for name in self.partition_by)
            where += f" The values of {columns} are its partitions."
        return f"{where} `{self.id}` identifies a row, `{self.text}` is embedded."


class OutputStore(FileSettings, dg.ConfigurableResource):
    """Where embedding files go: `<url>/<space>/<encoded key>.parquet`.

    `storage` holds the options of a bucket. It is a dependency and not a field, since it may hold
    secrets: Dagster's UI shows fields and its event log keeps them. `gcs`, a
    `dagster_gcp.GCSResource`, gives the credentials for a bucket of Google Cloud Storage.
    """

    url: str = Field(description="path or URL; the folder need not exist yet")
    storage: dg.ResourceDependency[StorageOptions] = StorageOptions()  # pyright: ignore[reportAssignmentType]
    gcs: dg.ResourceDependency[GoogleResource] = None  # pyright: ignore[reportAssignmentType]

    def open(self) -> Store:
        """Open the store; `ConfigError` when the place cannot be one."""
        return open_store(self.url, self.cloud_options())

    def cloud_options(self) -> StorageOptions:
        """Return how the bucket is reached."""
        return _with_google(self.storage, self.gcs)


def _with_google(storage: StorageOptions, resource: GoogleResource | None) -> StorageOptions:
    """Return the options with project and credentials of a resource, if there is one."""
    if resource is None:
        return storage
    location = getattr(resource, "location", None)
    key = getattr(resource, "gcp_credentials", None)
    return replace(storage, gcp=GcpOptions(resource.project, location, key))
