"""Bodies of requests: how large each may be, how long it may take, and how many bytes of all are held at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.types import Message

from surge_dagster.service.errors import ClientError, Overloaded
from surge_dagster.service.settings import ServiceSettings

_FREE_BYTES = 4 * 1024  # of each body, so that large ones keep no short text out; headers may have more
_RETRY_SECONDS = 5.0


class HeldBytes:
    """Bytes of the bodies of requests that have no answer yet; what comes when they are too many is refused."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0

    @contextmanager
    def of_request(self) -> Iterator[Callable[[int], None]]:
        """Gives what counts further bytes of a request, and raises `Overloaded`; at the end they are held no longer."""
        counted, free = 0, _FREE_BYTES

        def count(size: int) -> None:
            nonlocal counted, free
            counts = max(0, size - free)
            free -= size - counts
            if counts and self._held + counts > self._most:
                raise Overloaded(f"other requests wait, and have {self._held:,} bytes", _RETRY_SECONDS)
            counted += counts
            self._held += counts

        try:
            yield count
        finally:
            self._held -= counted


def bounded(request: Request, count: Callable[[int], None], limit: int, seconds: float, remedy: str) -> Request:
    """The same request, whose body is refused when it is larger, or has not come in so many seconds from now."""
    deadline, size = asyncio.get_running_loop().time() + seconds, 0

    async def receive() -> Message:
        nonlocal size
        try:
            async with asyncio.timeout_at(deadline):
                message = await request.receive()
        except TimeoutError:
            said = f"The body did not arrive within {seconds:g} s. Send the request again."
            raise ClientError(408, said, "request_timeout") from None
        received = len(message.get("body", b""))
        size += received
        if size > limit:
            raise ClientError(413, f"The body is larger than {limit:,} bytes. {remedy}", "request_too_large")
        count(received)
        return message

    return Request(request.scope, receive)


def require_type(request: Request, expected: str) -> None:
    """Refuse a body of another type, before it is read; raises `ClientError`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != expected:
        message = f"The body is of type {kind!r}. Send {expected}, and the header Content-Type that says so."
        raise ClientError(415, message, "unsupported_media_type")


async def read_body(request: Request, settings: ServiceSettings, count: Callable[[int], None]) -> bytes:
    """The body of a request that holds JSON.

    Raises:
        ClientError: it is of another type, compressed, too large, or takes too long.
        Overloaded: `count` does.
    """
    require_type(request, "application/json")
    if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        message = f"The body has the Content-Encoding {encoding!r}. Send it without compression."
        raise ClientError(415, message, "unsupported_content_encoding")
    remedy = "Send fewer texts in each request."
    return await bounded(request, count, settings.max_body_bytes, settings.body_seconds, remedy).body()
