"""The gate that each request passes before its body is read: API keys and metrics."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.errors import Refusal
from surge_dagster.service.metrics import Metrics

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PROBES = ("/healthz", "/readyz")


class ApiKeys:
    """The keys of a file, which is read again when it has changed; a change that makes it wrong is
    logged and ignored.

    Each line has the SHA-256 of a key in hex, so the file gives no key away. What follows it, and
    all after `#`, is a comment. If all lines are taken out of the file later, no key is accepted.

    Raises:
        ConfigError: the file cannot be read, or has no digest or a wrong line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._version()
        self._digests = self._read()
        if not self._digests:
            raise self._wrong("It has no line")

    def accept(self, key: bytes) -> bool:
        """Whether this is one of the keys; the empty one, whose digest an unset `$KEY` gives, never
        is."""
        version = self._version()
        if version != self._seen:
            self._seen = version
            try:
                self._digests = self._read()
            except ConfigError as error:
                log.warning("%s The keys stay as they were.", error)
        digest = hashlib.sha256(key).hexdigest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return key != b"" and any(matches)

    def _version(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_size, status.st_ino)

    def _read(self) -> list[str]:
        try:
            lines = self._path.read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The API keys in {self._path} cannot be read: {error}.") from None
        digests = list[str]()
        for number, line in enumerate(lines, 1):
            words = line.split("#")[0].lower().split()
            if not words:
                continue
            if not _DIGEST.fullmatch(words[0]):
                raise self._wrong(f"Line {number} is not a SHA-256 in hex")
            digests.append(words[0])
        return digests

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(
            f"{self._path}: {problem}. Each line has the SHA-256 of an API key in hex; make one "
            'with: printf %s "$KEY" | sha256sum'
        )


class Gate:
    """Refuses requests without a key, counts answers, and ends connections when the service ends.

    Args:
        keys: None: every request passes.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        begun_at = time.perf_counter()
        status = 500

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # The rest of a body that is too large is not read.
                if status == 413 or scope["app"].state.is_ending():
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        try:
            app = self._app if self._has_key(scope) else _unauthorized
            await app(scope, receive, send_counted)
        finally:
            self._metrics.count(scope, status, time.perf_counter() - begun_at)

    def _has_key(self, scope: Scope) -> bool:
        if self._keys is None or scope["path"] in _PROBES:
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and self._keys.accept(key.strip())


async def _unauthorized(scope: Scope, receive: Receive, send: Send) -> None:
    message = "The request has no valid API key. Send the header Authorization: Bearer KEY."
    headers = {"www-authenticate": "Bearer", "connection": "close"}
    response = Refusal(401, "invalid_api_key", message).response(headers)
    await response(scope, receive, send)
