"""How Google Cloud is reached: a project and credentials, from the settings or else from the
environment.

google-auth is imported where it is used, because settings import this module.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surge_dagster.engine.errors import ConfigError

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
