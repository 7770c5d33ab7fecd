"""Who we are to a cloud, resolved once for both clients that talk to it: obstore, and the one that writes.

S3 credentials are looked for where every AWS tool does (environment, profile, web identity, container, instance),
GCS credentials where google-auth does. What is given explicitly wins.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.output.storage_options import StorageOptions

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_REFRESH_EARLY = timedelta(minutes=4)
_FIXED_FOR = timedelta(minutes=5)
DEFAULT_REGION = "us-east-1"

Sign = Callable[[str, str, dict[str, str], bytes | bytearray], dict[str, str]]


class AwsCredentials:
    """Signs requests, and answers obstore when it asks for credentials.

    Raises:
        ConfigError: there are none.
    """

    def __init__(self, options: StorageOptions) -> None:
        from botocore.credentials import Credentials
        from botocore.session import Session

        # At this level it would print whole requests, session tokens included.
        logging.getLogger("botocore.auth").setLevel(logging.INFO)
        session = Session()
        if bool(options.access_key_id) != bool(options.secret_access_key):
            raise ConfigError("of access_key_id and secret_access_key one alone was given; give both or neither")
        if options.access_key_id and options.secret_access_key:
            found = Credentials(options.access_key_id, options.secret_access_key, options.session_token)
        else:
            found = session.get_credentials()
        if found is None:
            raise ConfigError(
                "no credentials for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or run where "
                "the machine has a role."
            )
        self._credentials: Any = found
        self.region: str = (
            options.region or os.environ.get("AWS_REGION") or session.get_config_variable("region") or DEFAULT_REGION
        )
        self.endpoint: str = (
            os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL")
            or f"https://s3.{self.region}.amazonaws.com"
        ).rstrip("/")

    def __call__(self) -> dict[str, Any]:
        """The credentials as obstore takes them; it asks again when they expire."""
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _FIXED_FOR,
        }

    def sign(self, method: str, url: str, headers: dict[str, str], body: bytes | bytearray) -> dict[str, str]:
        """The headers of a request with its signature (SigV4) added."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        request = AWSRequest(method=method, url=url, headers=headers, data=body)
        if url.startswith("https:"):  # the body is guarded by TLS and its MD5, and need not be hashed twice
            request.context["payload_signing_enabled"] = False
        S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", self.region).add_auth(request)
        return dict(request.headers.items())


class GoogleCredentials:
    """Puts a bearer token on requests, and answers obstore when it asks for one.

    Raises:
        ConfigError: there are no credentials.
    """

    def __init__(self, options: StorageOptions) -> None:
        self._token = options.token
        self._lock = threading.Lock()
        self._credentials: Any = None
        if options.token is not None:
            return
        import google.auth
        import google.auth.exceptions

        try:
            if options.credentials is not None:
                self._credentials = options.credentials()
            elif options.service_account is not None:
                self._credentials, _ = google.auth.load_credentials_from_file(options.service_account, [_SCOPE])
            else:
                self._credentials, _ = google.auth.default([_SCOPE])
        except (google.auth.exceptions.GoogleAuthError, OSError, ValueError) as error:
            # What it says may quote a key file.
            raise ConfigError(
                f"no credentials for GCS ({type(error).__name__}): set GOOGLE_APPLICATION_CREDENTIALS, run `gcloud "
                "auth application-default login`, or give `service_account` or a GCSResource."
            ) from None

    def __call__(self) -> dict[str, Any]:
        """A token as obstore takes it; it asks again when the token expires."""
        return {"token": self._current(), "expires_at": datetime.now(UTC) + _FIXED_FOR}

    def sign(self, method: str, url: str, headers: dict[str, str], body: bytes | bytearray) -> dict[str, str]:
        """The headers of a request with the token added."""
        token = self._current()
        return {**headers, "Authorization": f"Bearer {token}"} if token else headers

    def _current(self) -> str:
        if self._token is not None:
            return self._token
        with self._lock:
            found = self._credentials
            expiry = getattr(found, "expiry", None)
            soon = expiry is not None and expiry.replace(tzinfo=UTC) - datetime.now(UTC) < _REFRESH_EARLY
            if not getattr(found, "token", None) or soon:
                self._refresh()
            return getattr(found, "token", None) or ""

    def _refresh(self) -> None:
        import google.auth.exceptions
        from google.auth.credentials import AnonymousCredentials
        from google.auth.transport.requests import Request

        from surge_dagster.engine.output.retries import RequestFailed

        if isinstance(self._credentials, AnonymousCredentials):
            return
        try:
            self._credentials.refresh(Request())
        except google.auth.exceptions.TransportError:
            raise RequestFailed("token", "the token service does not answer", retryable=True) from None
        except google.auth.exceptions.GoogleAuthError as error:
            raise RequestFailed(
                "token", f"the credentials were refused ({type(error).__name__})", retryable=False, status=401
            ) from None
