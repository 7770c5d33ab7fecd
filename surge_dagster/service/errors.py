"""Errors as clients of OpenAI's API read them: an HTTP status and an object `error`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from surge_dagster.engine.errors import SurgeError
from surge_dagster.service import refusals

# Status, code and field at fault of an error of lanes and spaces, with `SurgeError` for all others.
_ANSWERS: dict[type[SurgeError], tuple[int, str, str | None]] = {
    refusals.TooLong: (400, "context_length_exceeded", "input"),
    refusals.RequestTooLarge: (400, "request_too_large", "input"),
    refusals.UnusableText: (400, "unusable_text", "input"),
    refusals.UnknownSpace: (404, "model_not_found", "model"),
    refusals.Overloaded: (429, "rate_limit_exceeded", None),
    refusals.SpaceLoading: (503, "space_loading", "model"),
    refusals.LaneClosed: (503, "shutting_down", None),
    refusals.LaneDown: (503, "encoder_down", None),
    SurgeError: (500, "encoder_failed", None),
}
_RETRY_SECONDS = 1.0  # after an error that does not say when


class ClientError(Exception):
    """A request that no lane sees, because it is wrong: the message says what was expected, what came and what to do.

    Args:
        param: the field of the body at fault.
    """

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def error_response(
    status: int, message: str, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    facts = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": facts}, status, headers)


def surge_error_response(error: SurgeError) -> Response:
    status, code, param = next(answer for kind, answer in _ANSWERS.items() if isinstance(error, kind))
    seconds = max(getattr(error, "retry_after_seconds", _RETRY_SECONDS), 0.001)
    when = {"retry-after-ms": str(math.ceil(1000 * seconds)), "retry-after": str(math.ceil(seconds))}
    remedy = ": send `truncate: true`" if isinstance(error, refusals.TooLong) else ""
    return error_response(status, f"{error}{remedy}", code, param, when if status in (429, 503) else None)


async def answer_error(request: Request, error: Exception) -> Response:
    """The answer to an error of any kind; 429 and 503 say when to come back."""
    match error:
        case ClientError():
            headers = (
                {"connection": "close"} if error.status == 408 else {}
            )  # what is sent yet of other bodies is ignored
            return error_response(error.status, str(error), error.code, error.param, headers)
        case SurgeError():
            return surge_error_response(error)
        case HTTPException():  # no such path or method
            reason = HTTPStatus(error.status_code).phrase
            message = (
                f"{request.method} {request.url.path}: {reason}. The base URL ends with /v1 for queries and with "
                "/documents/v1 for documents; /openapi.json lists all paths."
            )
            return error_response(error.status_code, message, reason.lower().replace(" ", "_"), None, error.headers)
    message = "The service has failed; its log says why. Send the request again."
    return error_response(500, message, "internal_error")
