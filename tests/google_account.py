"""A service account of Google, and a server on 127.0.0.1 that the real google-auth asks for tokens.

The same server stands for Google's buckets: none has an object, and it records which token a
request carries.
"""

from __future__ import annotations

import base64
import json
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

TOKEN = "token-of-the-account"
EMAIL = "runs@my-project.iam.gserviceaccount.com"


@cache
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


class GoogleAccount:
    """The account and its server, which runs until `close`.

    Attributes:
        url: of the server.
        key: the content of the account's key file.
        gcp_credentials: the same in base64.
        is_revoked: whether it refuses to.
        requests: method and header Authorization of each request to a bucket.
        blobs: what a listing of objects by Google's own client shows.
    """

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        content = {
            "type": "service_account",
            "project_id": "project-of-the-key",
            "client_email": EMAIL,
            "private_key": private_key(),
            "token_uri": f"{self.url}/token",
        }
        self.key = json.dumps(content)
        self.gcp_credentials = base64.b64encode(self.key.encode()).decode()
        self.is_revoked = False
        self.requests = list[tuple[str, str | None]]()
        self.blobs = list[dict[str, str]]()
        self._serving = threading.Thread(target=self._server.serve_forever)
        self._serving.start()

    def close(self) -> None:
        self._server.shutdown()
        self._serving.join()
        self._server.server_close()

    def is_quoted(self, text: str) -> bool:
        """Whether a text has a part of the key, as it is or in base64."""
        lines = private_key().splitlines()
        parts = [*lines[1:-1], self.gcp_credentials[:40], self.gcp_credentials[-40:]]
        return any(part in text for part in parts)


def _handler(account: GoogleAccount) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if account.is_revoked:
                self._answer(
                    400, {"error": "invalid_grant", "error_description": "Invalid JWT Signature."}
                )
                return
            self._answer(200, {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"})

        def do_GET(self) -> None:
            account.requests.append(("GET", self.headers["Authorization"]))
            is_listing = self.path.partition("?")[0].endswith("/o")
            if is_listing:
                self._answer(200, {"items": account.blobs})
            else:
                self._answer(404, {})

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _answer(self, status: int, document: dict[str, Any]) -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler
