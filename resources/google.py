"""The resources of dagster-gcp with the project and the credentials of the setting `gcp`.

Importing dagster_gcp takes two seconds, so this module is imported only if the setting is given.
Dagster finds dependencies by looking at annotations while the class is created, so they must not be
strings here.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
from dagster_gcp import BigQueryResource, GCSResource
from google.cloud import bigquery, storage

from surge_dagster.engine.store.object_client import CLOUD_SCOPE, GcpOptions


class CatalogGCSResource(GCSResource):
    """A `GCSResource` with a key, which dagster-gcp's has not.

    `gcp` is a dependency and not a field, since it holds the key: Dagster's UI shows fields and its
    event log keeps them.
    """

    gcp: dg.ResourceDependency[GcpOptions]

    def get_client(self) -> storage.Client:
        return storage.Client(self.project, self.gcp.load(CLOUD_SCOPE))


class CatalogBigQueryResource(BigQueryResource):
    """A `BigQueryResource` whose key Dagster does not show, and which needs no file and no
    environment variable."""

    gcp: dg.ResourceDependency[GcpOptions]

    @contextmanager
    def get_client(self) -> Iterator[bigquery.Client]:
        credentials = self.gcp.load(CLOUD_SCOPE)
        yield bigquery.Client(self.project, credentials, location=self.location)
