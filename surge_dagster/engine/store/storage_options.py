"""How an object store is reached: what a URL does not say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support.urls import is_bare

MIB = 1024 * 1024
NO_ENDPOINT = (
    "expected as endpoint the base URL of a service, without user, query or fragment; credentials belong into the "
    "environment or into storage_options"
)


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Settings of an object store; what is left open comes from the environment, as the cloud's own tools read it.

    Secrets are left out of the representation, so that printing or logging the options shows none.

    Attributes:
        endpoint: base URL of the service, for S3-compatible stores and test servers.
        region: S3's region.
        access_key_id, secret_access_key, session_token: S3's credentials.
        token: an OAuth access token for GCS.
        service_account: path of a GCS service account's key file.
        credentials: gives google-auth credentials, such as those of dagster-gcp's `GCSResource`.
        timeout_seconds: how long a body may take to be sent, and how long its answer to come.
        connect_timeout_seconds: how long connecting may take.
        part_bytes: size from which an object is uploaded in parts, and of a part; at least 5 MiB in the clouds.
        abandoned_after_seconds: age from which an unfinished multipart upload is taken for a dead run's.

    Raises:
        ConfigError: the endpoint holds more than a service's URL does.
    """

    endpoint: str | None = None
    region: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    service_account: str | None = None
    credentials: Callable[[], object] | None = field(default=None, repr=False)
    timeout_seconds: float = 60.0
    connect_timeout_seconds: float = 10.0
    part_bytes: int = 16 * MIB
    abandoned_after_seconds: float = 24 * 3600.0

    def __post_init__(self) -> None:
        if self.endpoint is not None and not is_bare(self.endpoint):
            raise ConfigError(NO_ENDPOINT)
