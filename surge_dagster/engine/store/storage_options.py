"""Settings of an object store: what a URL does not say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support.urls import is_bare

NO_ENDPOINT = (
    "expected as endpoint the base URL of a service, without user, query or fragment; credentials belong into the "
    "environment or into storage_options"
)


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Settings of an object store; an option that is not set comes from the environment, as in the cloud's own tools.

    The representation leaves secrets out, so that printing or logging the options shows none.

    Attributes:
        endpoint: base URL of the service, for S3-compatible stores and test servers.
        region: S3's region.
        access_key_id, secret_access_key, session_token: S3's credentials.
        service_account: path of a GCS service account's key file.
        credentials: returns google-auth credentials, such as those of dagster-gcp's `GCSResource`.

    Raises:
        ConfigError: the endpoint holds more than a service's URL does.
    """

    endpoint: str | None = None
    region: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    service_account: str | None = None
    credentials: Callable[[], object] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.endpoint is not None and not is_bare(self.endpoint):
            raise ConfigError(NO_ENDPOINT)
