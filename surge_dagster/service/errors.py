"""Errors as clients of OpenAI's API read them: an HTTP status and an object `error`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from surge_dagster.engine.errors import SurgeError
from surge_dagster.service.refusals import (
    LaneClosed,
    LaneDown,
    Overloaded,
    RequestTooLarge,
    SpaceLoading,
    TooLong,
    UnknownSpace,
    UnusableText,
)

# When a client may come back after an error that does not say it.
RETRY_SECONDS = 1.0
_INVALID, _BUSY, _SERVER = "invalid_request_error", "rate_limit_error", "server_error"
# Status, `param` and `code` of errors of the lanes and spaces; a base class stands after the classes made from it.
_ANSWERS: dict[type[SurgeError], tuple[int, str | None, str]] = {
    TooLong: (400, "input", "context_length_exceeded"),
    RequestTooLarge: (400, "input", "request_too_large"),
    UnusableText: (400, "input", "unusable_text"),
    UnknownSpace: (404, "model", "model_not_found"),
    Overloaded: (429, None, "rate_limit_exceeded"),
    SpaceLoading: (503, "model", "space_loading"),
    LaneClosed: (503, None, "shutting_down"),
    LaneDown: (503, None, "encoder_down"),
    SurgeError: (500, None, "encoder_failed"),
}


class ClientError(Exception):
    """A request that no lane gets to see, because it is wrong.

    Args:
        message: what was expected, what came, and what to do.
        param: the field of the body at fault.
        ends_connection: whether the connection is closed, as it has to be where part of the body was not read.
    """

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, *, ends_connection: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {"connection": "close"} if ends_connection else {}


def error_response(
    status: int, message: str, code: str | None, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    kind = _INVALID if status < 500 and status != 429 else _BUSY if status == 429 else _SERVER
    body = to_json({"error": {"message": message, "type": kind, "param": param, "code": code}})
    return Response(body, status, headers, media_type="application/json")


async def answer_client_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ClientError)
    return error_response(error.status, error.message, error.code, error.param, error.headers)


async def answer_surge_error(request: Request, error: Exception) -> Response:
    """The answer to an error of the lanes and spaces; 429 and 503 say when to come back."""
    status, param, code = next(answer for kind, answer in _ANSWERS.items() if isinstance(error, kind))
    headers = {}
    if status in (429, 503):
        seconds = max(getattr(error, "retry_after_seconds", RETRY_SECONDS), 0.001)
        headers = {"retry-after-ms": f"{math.ceil(seconds * 1000)}", "retry-after": f"{math.ceil(seconds)}"}
    remedy = ": send `truncate: true`" if isinstance(error, TooLong) else ""
    return error_response(status, f"{error}{remedy}", code, param, headers)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """The answer to a path or method that there is not."""
    assert isinstance(error, HTTPException)
    paths = "/v1 for queries, /documents/v1 for documents; /openapi.json lists all paths"
    reason = HTTPStatus(error.status_code).phrase
    message = f"{request.method} {request.url.path}: {reason}. The base URL of a client ends with {paths}."
    return error_response(error.status_code, message, reason.lower().replace(" ", "_"), headers=error.headers)


async def answer_defect(request: Request, error: Exception) -> Response:
    """The answer to an error that nobody foresaw; the server logs it."""
    message = "The service has failed; its log says why. Send the request again."
    return error_response(500, message, "internal_error")
