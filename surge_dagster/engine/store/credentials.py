"""Who we are to a cloud, resolved once for both clients that talk to it: obstore, and the one that writes.

S3 credentials are looked for where every AWS tool does (environment, profile, web identity, container, instance),
GCS credentials where google-auth does. What is given explicitly wins. What fails there is named by its kind alone: its
text may quote a key file, or what a program that gives credentials has printed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.store.retries import RequestFailed
from surge_dagster.engine.store.storage_options import StorageOptions

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_REFRESH_EARLY = timedelta(minutes=4)
_FIXED_FOR = timedelta(minutes=5)
NOT_RENEWED = "credentials"
DEFAULT_REGION = "us-east-1"

Sign = Callable[[str, str, dict[str, str], bytes | bytearray], dict[str, str]]


class AwsCredentials:
    """Signs requests, and answers obstore when it asks for credentials.

    Raises:
        ConfigError: there are none.
    """

    def __init__(self, options: StorageOptions) -> None:
        # At this level it would print whole requests, session tokens included.
        logging.getLogger("botocore.auth").setLevel(logging.INFO)
        logging.getLogger("botocore.credentials").addFilter(_without_cause)
        if bool(options.access_key_id) != bool(options.secret_access_key):
            raise ConfigError("of access_key_id and secret_access_key one alone was given; give both or neither")
        try:
            found, region = self._look_up(options)
        except Exception as error:
            raise ConfigError(
                f"the credentials for S3 cannot be had ({type(error).__name__}): look at AWS_PROFILE, at both of "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and at what the profile names to get them from."
            ) from None
        if found is None:
            raise ConfigError(
                "no credentials for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or run where "
                "the machine has a role."
            )
        self._credentials: Any = found
        self.region: str = region or DEFAULT_REGION
        self.endpoint: str = (
            os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL")
            or f"https://s3.{self.region}.amazonaws.com"
        ).rstrip("/")

    def __call__(self) -> dict[str, Any]:
        """The credentials as obstore takes them; it asks again when they expire."""
        frozen = self._current()
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
        S3SigV4Auth(self._current(), "s3", self.region).add_auth(request)
        return dict(request.headers.items())

    @staticmethod
    def _look_up(options: StorageOptions) -> tuple[Any, str | None]:
        """Credentials and region, each None where there is none."""
        from botocore.credentials import Credentials
        from botocore.session import Session

        session = Session()
        region = options.region or os.environ.get("AWS_REGION") or session.get_config_variable("region")
        if options.access_key_id and options.secret_access_key:
            return Credentials(options.access_key_id, options.secret_access_key, options.session_token), region
        return session.get_credentials(), region

    def _current(self) -> Any:
        try:
            return self._credentials.get_frozen_credentials()
        except Exception as error:  # of a program, a service or a file: no type covers what they raise
            raise _not_renewed(error) from None


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

        if isinstance(self._credentials, AnonymousCredentials):
            return
        try:
            self._credentials.refresh(Request())
        except google.auth.exceptions.GoogleAuthError as error:
            # A machine's own credentials tell of a metadata server that does not answer as of a refusal.
            if error.retryable or any(
                isinstance(each, google.auth.exceptions.TransportError) for each in (error, error.__cause__)
            ):
                raise _not_renewed(error) from None
            raise RequestFailed(
                "401", f"the credentials were refused, {type(error).__name__}", retryable=False, status=401
            ) from None


def _not_renewed(error: Exception) -> RequestFailed:
    return RequestFailed(NOT_RENEWED, f"they could not be renewed, {type(error).__name__}", retryable=True)


def _without_cause(record: logging.LogRecord) -> bool:
    """Lets a record pass without its traceback, which quotes the error of whatever gives credentials."""
    record.exc_info = record.exc_text = None
    return True
