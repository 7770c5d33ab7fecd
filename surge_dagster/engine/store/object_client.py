"""How Google Cloud and object stores are reached: their options, and the obstore client of a bucket
with credentials and timeouts.

Credentials come from where each cloud's own tools find them: boto3 for S3, google-auth for GCS,
obstore itself for Azure. Explicit options win. An error about credentials shows only its type: its
text may quote a key file, or what a program that provides credentials has printed.

The clients are imported where they are used, because settings import this module and a local output
needs no client.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support.urls import is_bare

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

CLOUD_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_NO_KEY = (
    "gcp_credentials is not the key of a service account. Expected the JSON of its key file in "
    "base64, as `base64 -w0 key.json` prints it."
)


@dataclass(frozen=True, slots=True)
class GcpOptions:
    """Project and credentials of Google Cloud; what is not set comes from the environment.

    The fields have the names of those of dagster-gcp's resources. The representation leaves the
    credentials out.

    Attributes:
        location: where BigQuery runs queries.
        gcp_credentials: key of a service account: the JSON of its file, in base64.
    """

    project: str | None = None
    location: str | None = None
    gcp_credentials: str | None = field(default=None, repr=False)

    def load(self, scope: str) -> Credentials:
        """Return credentials of google-auth for a scope.

        Raises:
            ConfigError: `gcp_credentials` is not a usable key.
            GoogleAuthError: the environment has no usable credentials.
        """
        if self.gcp_credentials is None:
            import google.auth

            credentials, _ = google.auth.default([scope])
            return credentials

        from google.oauth2 import service_account

        key = service_account_key(self.gcp_credentials)
        try:
            return service_account.Credentials.from_service_account_info(key, scopes=[scope])
        except ValueError as error:
            refusal = (
                f"gcp_credentials cannot be used ({type(error).__name__}). Create another key."
            )
        raise ConfigError(refusal)  # without its cause, whose text may quote the key


def service_account_key(gcp_credentials: str) -> dict[str, Any]:
    """Decode the key of a service account; the `ConfigError` of anything else does not quote it."""
    try:
        key = json.loads(base64.b64decode(gcp_credentials))
    except ValueError:
        key = None
    if not isinstance(key, dict) or key.get("type") != "service_account":
        raise ConfigError(_NO_KEY)
    return key


NO_ENDPOINT = (
    "expected as endpoint the base URL of a service, without user, query or fragment; credentials "
    "belong into the environment or into storage_options"
)
_GCS_ENDPOINT = "https://storage.googleapis.com"
_GCS_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_DEFAULT_REGION = "us-east-1"
# boto3 renews credentials ten minutes or more before they expire.
_BOTO3_REFRESH = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Settings of an object store; an option that is not set comes from the environment, as in the
    cloud's own tools.

    The representation leaves secrets out. An endpoint that may hold a secret is refused with a
    `ConfigError`.

    Attributes:
        endpoint: base URL of the service, for S3-compatible stores and test servers.
        region, access_key_id, secret_access_key, session_token: S3's.
        service_account: path of a GCS service account's key file.
        gcp: project and credentials of Google Cloud, for GCS and for BigQuery. For GCS,
            `service_account` comes first.
        credentials: returns google-auth credentials for GCS, in place of all others.
    """

    endpoint: str | None = None
    region: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    service_account: str | None = None
    gcp: GcpOptions = field(default_factory=GcpOptions)
    credentials: Callable[[], object] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.endpoint is not None and not is_bare(self.endpoint):
            raise ConfigError(NO_ENDPOINT)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Constants of a client, which tests make smaller.

    Attributes:
        timeout_seconds: how long one request may take, with its body and its answer.
        part_bytes: of a part, in which larger objects are uploaded. S3 and GCS take 10,000 parts,
            78 GiB.
        retries: how often obstore sends one request again: first after about
            `first_backoff_seconds`, then after twice that.
    """

    timeout_seconds: float = 60.0
    connect_timeout_seconds: float = 10.0
    part_bytes: int = 8 * 1024 * 1024
    retries: int = 2
    first_backoff_seconds: float = 2.0


def connect(
    scheme: str, bucket: str, options: StorageOptions, limits: ClientLimits
) -> tuple[Any, str]:
    """Return the obstore client of a whole bucket, and the base URL of its service; "" if obstore
    chooses it.

    Raises:
        BaseError, ValueError, TypeError: obstore refuses the options; the text may quote them.
    """
    from obstore.store import from_url

    endpoint = (options.endpoint or "").rstrip("/")
    if scheme == "memory":
        return from_url("memory://"), ""
    if scheme in ("s3", "s3a"):
        return _connect_s3(bucket, endpoint, options, limits)
    if scheme in ("gs", "gcs"):
        return _connect_gcs(bucket, endpoint, options, limits)
    config: Any = {"endpoint": endpoint} if endpoint else {}
    return from_url(f"{scheme}://{bucket}", config=config, **_common(endpoint, limits)), endpoint


def _common(endpoint: str, limits: ClientLimits) -> dict[str, Any]:
    backoff = timedelta(seconds=limits.first_backoff_seconds)
    return {
        "client_options": {
            "timeout": timedelta(seconds=limits.timeout_seconds),
            "connect_timeout": timedelta(seconds=limits.connect_timeout_seconds),
            "allow_http": endpoint.startswith("http://"),
        },
        "retry_config": {
            "max_retries": limits.retries,
            "retry_timeout": timedelta(seconds=2 * limits.timeout_seconds),
            "backoff": {"init_backoff": backoff, "max_backoff": 8 * backoff, "base": 2},
        },
    }


def _connect_s3(
    bucket: str, endpoint: str, options: StorageOptions, limits: ClientLimits
) -> tuple[Any, str]:
    if bool(options.access_key_id) != bool(options.secret_access_key):
        raise ConfigError(
            "only one of access_key_id and secret_access_key was given; give both or neither"
        )
    from obstore.store import S3Store

    session, provider = _s3_credentials(options)
    environment = os.environ
    region = options.region or environment.get("AWS_REGION") or session.region_name
    region = region or _DEFAULT_REGION
    endpoint = endpoint or environment.get("AWS_ENDPOINT_URL_S3", "")
    endpoint = endpoint or environment.get("AWS_ENDPOINT_URL", "")
    endpoint = endpoint.rstrip("/") or f"https://s3.{region}.amazonaws.com"
    store = S3Store(
        bucket,
        config={"endpoint": endpoint, "region": region, "virtual_hosted_style_request": False},
        credential_provider=provider,
        **_common(endpoint, limits),
    )
    return store, endpoint


def _s3_credentials(options: StorageOptions) -> tuple[Any, Any]:
    """Return a session of boto3, and obstore's provider of its credentials."""
    try:
        import boto3
    except ImportError as error:
        raise ConfigError(
            f"S3 needs the package {error.name}, which is not installed: "
            "pip install 'surge-dagster[s3]'"
        ) from error
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        session = boto3.Session(
            aws_access_key_id=options.access_key_id,
            aws_secret_access_key=options.secret_access_key,
            aws_session_token=options.session_token,
        )
        if session.get_credentials() is not None:
            return session, Boto3CredentialProvider(session, ttl=_BOTO3_REFRESH)
    except Exception as error:  # what provides credentials may raise any type
        raise ConfigError(
            f"the S3 credentials cannot be read ({type(error).__name__}): check AWS_PROFILE, both "
            "of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and where the profile says that they "
            "come from."
        ) from None
    raise ConfigError(
        "no credentials for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, "
        "or run where the machine has a role."
    )


def _connect_gcs(
    bucket: str, endpoint: str, options: StorageOptions, limits: ClientLimits
) -> tuple[Any, str]:
    import google.auth
    from google.auth.exceptions import GoogleAuthError
    from obstore.auth.google import GoogleCredentialProvider
    from obstore.store import GCSStore

    credentials: Any
    try:
        if options.credentials is not None:
            credentials = options.credentials()
        elif options.service_account is not None:
            credentials, _ = google.auth.load_credentials_from_file(
                options.service_account, [_GCS_SCOPE]
            )
        else:
            credentials = options.gcp.load(_GCS_SCOPE)
    except (GoogleAuthError, OSError, ValueError) as error:
        raise ConfigError(
            f"no credentials for GCS ({type(error).__name__}): set GOOGLE_APPLICATION_CREDENTIALS, "
            "run `gcloud auth application-default login`, or give the setting gcp, or "
            "`service_account` in storage_options."
        ) from None
    store = GCSStore(
        bucket,
        config={"base_url": endpoint} if endpoint else {},
        credential_provider=GoogleCredentialProvider(credentials),
        **_common(endpoint, limits),
    )
    return store, endpoint or _GCS_ENDPOINT
