"""A service account of Google, and a server on 127.0.0.1 that the real google-auth asks for tokens.

The same server stands for Google's buckets: none has an object, and it records which token a
request carries.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.http_server import Answer, Request, json_server

TOKEN = "token-of-the-account"
EMAIL = "runs@my-project.iam.gserviceaccount.com"


@cache
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


class GoogleAccount:
    """The account, and what its server was asked.

    Attributes:
        key: the content of the account's key file.
        gcp_credentials: the same in base64.
        is_revoked: whether the server refuses to give a token.
        requests: method and header Authorization of each request to a bucket.
        blobs: what a listing of objects by Google's own client shows.
    """

    def __init__(self) -> None:
        self.url = ""
        self.key = ""
        self.gcp_credentials = ""
        self.is_revoked = False
        self.requests = list[tuple[str, str | None]]()
        self.blobs = list[dict[str, str]]()

    @contextmanager
    def serve(self) -> Iterator[None]:
        """Run the server at `url`, which the key names."""
        with json_server(self._answer) as self.url:
            content = {
                "type": "service_account",
                "project_id": "project-of-the-key",
                "client_email": EMAIL,
                "private_key": private_key(),
                "token_uri": f"{self.url}/token",
            }
            self.key = json.dumps(content)
            self.gcp_credentials = base64.b64encode(self.key.encode()).decode()
            yield

    def is_quoted(self, text: str) -> bool:
        """Whether a text has a part of the key, as it is or in base64."""
        lines = private_key().splitlines()
        parts = [*lines[1:-1], self.gcp_credentials[:40], self.gcp_credentials[-40:]]
        return any(part in text for part in parts)

    def _answer(self, request: Request) -> Answer:
        if request.method == "POST" and self.is_revoked:
            error = {"error": "invalid_grant", "error_description": "Invalid JWT Signature."}
            return Answer(error, 400)
        if request.method == "POST":
            token = {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"}
            return Answer(token)

        self.requests.append((request.method, request.headers["Authorization"]))
        is_listing = request.path.partition("?")[0].endswith("/o")
        if is_listing:
            return Answer({"items": self.blobs})
        return Answer({}, 404)
