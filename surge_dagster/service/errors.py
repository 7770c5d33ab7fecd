"""Why the service does not answer a request, and the answer: an object `error`, as clients of
OpenAI's API read it.

Each error says what a client can do about it.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from surge_dagster.engine.errors import SurgeError


class Refusal(SurgeError):
    """A request is not answered.

    Attributes:
        status, code: of the answer.
        param: the field of the body at fault.
        retry_after_seconds: when another attempt is worth it, after 429 and 503.
    """

    status, code = 500, "encoder_failed"
    param: str | None = None
    retry_after_seconds = 1.0


class ClientError(Refusal):
    """A request that no lane sees, because it is wrong: the message says what was expected, what
    came, what to do."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class NotNow(Refusal):
    """Not answered now."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = max(retry_after_seconds, 0.001)


class Overloaded(NotNow):
    """The request could not be answered in time."""

    status, code = 429, "rate_limit_exceeded"


class SpaceLoading(NotNow):
    """The model of the space is being loaded."""

    status, code, param = 503, "space_loading", "model"


class RequestTooLarge(Refusal):
    """An idle lane could not answer the request within the promise either, or a text has too many
    bytes."""

    status, code, param = 400, "request_too_large", "input"


class TooLong(Refusal):
    """Texts, at these rows of the request, are longer than the model reads."""

    status, code, param = 400, "context_length_exceeded", "input"

    def __init__(self, rows: list[int], limit: int) -> None:
        shown = ", ".join(map(str, rows[:10])) + (", …" if len(rows) > 10 else "")
        which = (
            f"row {shown} of the request has"
            if len(rows) == 1
            else f"rows {shown} of the request have"
        )
        super().__init__(
            f"the model reads {limit:,} tokens of a text, prompt and special ones included, and {which} more; shorten "
            "or split such texts, or allow truncation: send `truncate: true`"
        )
        self.rows = rows


class UnusableText(Refusal):
    """A text of the request cannot be encoded, whatever is tried: `row` says which one."""

    status, code, param = 400, "unusable_text", "input"

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row} of the request cannot be encoded: {reason}")
        self.row = row


class LaneDown(Refusal):
    """The encoder pool of the lane failed: no worker encodes any more."""

    status, code = 503, "encoder_down"


class LaneClosed(Refusal):
    """The lane takes no more requests, or ended before this one was answered: the service stops, or
    left the space."""

    status, code = 503, "shutting_down"


class UnknownSpace(Refusal):
    """No space that is served has this name; `names` lists what is answered."""

    status, code, param = 404, "model_not_found", "model"

    def __init__(self, model: str, names: list[str]) -> None:
        super().__init__(
            f"the model {reprlib.repr(model)} is not served; expected one of {', '.join(names)}"
        )
        self.names = names


def error_response(
    status: int,
    message: str,
    code: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    kind = (
        "server_error"
        if status >= 500
        else "rate_limit_error"
        if status == 429
        else "invalid_request_error"
    )
    facts = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": facts}, status, headers)


def refusal_response(error: Refusal) -> Response:
    """Says when to come back, where that helps."""
    seconds, headers = error.retry_after_seconds, dict[str, str]()
    if error.status in (429, 503):
        headers = {
            "retry-after-ms": str(math.ceil(1000 * seconds)),
            "retry-after": str(math.ceil(seconds)),
        }
    return error_response(error.status, str(error), error.code, error.param, headers)


async def answer_error(request: Request, error: Exception) -> Response:
    """The answer to an error of any kind."""
    match error:
        case SurgeError():
            return refusal_response(error if isinstance(error, Refusal) else Refusal(str(error)))
        case HTTPException(status_code=413):
            return error_response(
                413, error.detail, "request_too_large", headers={"connection": "close"}
            )
        case HTTPException(status_code=400):
            kind = request.headers.get("content-type", "")
            code = "invalid_form" if kind.lower().startswith("multipart/") else "invalid_json"
            return error_response(400, f"The body cannot be read: {error.detail}", code)
        case HTTPException():  # no such path or method
            reason = HTTPStatus(error.status_code).phrase
            message = (
                f"{request.method} {request.url.path}: {reason}. The base URL ends with /v1 for queries and with "
                "/documents/v1 for documents; /openapi.json lists all paths."
            )
            return error_response(
                error.status_code, message, reason.lower().replace(" ", "_"), None, error.headers
            )
    message = "The service has failed; its log says why. Send the request again."
    return error_response(500, message, "internal_error")
