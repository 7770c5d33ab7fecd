"""Why the service does not answer a request, and the answer: an object `error`, as clients of
OpenAI's API read it.

Each error says what a client can do about it.
"""

from __future__ import annotations

import errno
import math
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from surge_dagster.engine.errors import SurgeError


class ErrorFacts(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class Error(BaseModel):
    error: ErrorFacts


class Refusal(SurgeError):
    """A request is not answered.

    Attributes:
        status, code: of the answer.
        param: the field of the request at fault.
        retry_after_seconds: when another attempt is worth it, after 429 and 503.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after_seconds: float = 1.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    def headers(self) -> dict[str, str]:
        """Return when to come back, if that helps, or how to give a key."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.status not in (429, 503):
            return {}
        milliseconds = max(1, math.ceil(1000 * self.retry_after_seconds))
        return {
            "retry-after-ms": str(milliseconds),
            "retry-after": str(math.ceil(milliseconds / 1000)),
        }

    def body(self) -> Error:
        kind = "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status >= 500:
            kind = "server_error"
        facts = ErrorFacts(message=str(self), type=kind, param=self.param, code=self.code)
        return Error(error=facts)

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        return JSONResponse(self.body().model_dump(), self.status, headers or self.headers())


def too_long(is_too_long: np.ndarray, max_length: int) -> Refusal:
    """Return the refusal of texts that are longer than the model reads."""
    rows = np.flatnonzero(is_too_long).tolist()
    shown = ", ".join(map(str, rows[:10]))
    if len(rows) > 10:
        shown += ", …"
    message = (
        f"The model reads {max_length:,} tokens of a text, prompt and special tokens included. "
        f"These rows of the request have more: {shown}. Shorten or split such texts, or allow "
        "truncation: send `truncate: true`."
    )
    return Refusal(400, "context_length_exceeded", message, "input")


def unusable_text(row: int, reason: str) -> Refusal:
    message = f"Row {row} of the request cannot be encoded: {reason}. Leave it out."
    return Refusal(400, "unusable_text", message, "input")


def invalid(details: Sequence[Any], what: str = "body") -> Refusal:
    """Return the first problem that pydantic has found in a JSON object."""
    first = details[0]
    if not first["loc"] or first["type"] == "json_invalid":
        message = (
            f"The {what} is no JSON object: {first['msg']}. Send JSON in UTF-8, and the header "
            "Content-Type: application/json."
        )
        return Refusal(400, "invalid_json", message)
    name = ".".join(map(str, first["loc"])).encode("utf-8", "replace").decode()
    if first["type"] == "missing":
        message = f"The field {name!r} is missing."
        return Refusal(400, "missing_required_parameter", message, name)
    code = first["type"] if first["type"] == "tokens_not_supported" else "invalid_value"
    return Refusal(400, code, f"The field {name!r} is wrong: {first['msg']}.", name)


def disk_full(error: BaseException | None) -> Refusal | None:
    """Return the refusal if an error, or one that it comes from, is that of a full disk."""
    while error is not None:
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if is_full or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            message = "The disk is full. Delete files of batches, or ask the operator for room."
            return Refusal(507, "insufficient_storage", message)
        error = error.__cause__ or error.__context__
    return None


async def answer_invalid(request: Request, error: Any) -> Response:
    # FastAPI puts the part of the request, such as the body, in front of the field.
    details = [detail | {"loc": detail["loc"][1:]} for detail in error.errors()]
    return invalid(details).response()


async def answer_http_error(request: Request, error: Any) -> Response:
    """Answer a body that cannot be read or is too large, and a wrong path or method."""
    if error.status_code == 400:
        message = f"The body cannot be read: {error.detail}"
        refusal = disk_full(error) or Refusal(400, "invalid_body", message)
        return refusal.response()
    message = (
        f"{request.method} {request.url.path}: {error.detail}. The base URL ends with /v1 for "
        "queries and with /documents/v1 for documents; /openapi.json lists all paths. Files and "
        "batches need the option --batches FOLDER."
    )
    code = error.detail.lower().replace(" ", "_")
    return Refusal(error.status_code, code, message).response(error.headers)


# The gate answers refusals and defects.
HANDLERS: dict[int | type[Exception], Any] = {
    RequestValidationError: answer_invalid,
    HTTPException: answer_http_error,
}
