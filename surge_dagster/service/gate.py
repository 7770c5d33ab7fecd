"""The gate that each request passes before its body is read: API keys and metrics."""

from __future__ import annotations

import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surge_dagster.service.errors import Refusal
from surge_dagster.service.keys import ApiKeys
from surge_dagster.service.metrics import Metrics

_PROBES = ("/healthz", "/readyz")


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
