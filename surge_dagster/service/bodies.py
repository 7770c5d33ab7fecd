"""The limit of the bytes of a body, and the types of bodies that are read."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surge_dagster.service.errors import ClientError, error_response
from surge_dagster.service.settings import ServiceSettings


class BodyLimit:
    """Refuses bodies that are too large with 413, and compressed ones with 415; files may be larger
    than others."""

    def __init__(self, app: ASGIApp, settings: ServiceSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        encoding = Headers(scope=scope).get("content-encoding", "identity").lower()
        if encoding != "identity":
            message = (
                f"The body has the Content-Encoding {encoding!r}. Send it without compression."
            )
            refused = error_response(415, message, "unsupported_content_encoding")
            await refused(scope, receive, send)
            return

        limit = self._settings.max_body_bytes
        remedy = "Send fewer texts in each request."
        if scope["path"].endswith("/files"):
            limit = self._settings.max_file_bytes
            remedy = "Divide the file among several."
        received_bytes = 0

        async def receive_within_limit() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > limit:
                raise HTTPException(413, f"The body is larger than {limit:,} bytes. {remedy}")
            return message

        await self._app(scope, receive_within_limit, send)


async def require_json(request: Request) -> None:
    """Refuse a body of another type than JSON; raises `ClientError`."""
    _require_type(request, "application/json")


async def require_form(request: Request) -> None:
    """Refuse a body of another type than a form with files; raises `ClientError`."""
    _require_type(request, "multipart/form-data")


def _require_type(request: Request, expected: str) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != expected:
        message = f"The body is of type {kind!r}. Send {expected}, and the header Content-Type that says so."
        raise ClientError(415, message, "unsupported_media_type")
