"""What obstore raises, told apart: it puts status and kind into the text, which also quotes requests and answers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    NotModifiedError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from surge_dagster.engine.store.credentials import NOT_RENEWED
from surge_dagster.engine.store.retries import RequestFailed, is_retryable

UNSUPPORTED = "unsupported"
NOT_PARTIAL = "not-partial"

_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
# What our own credentials raise when they are asked, in obstore's words.
_NOT_RENEWED = re.compile(rf"credential provider: RequestFailed: {NOT_RENEWED}: ([^\n]*)")
_ANSWERS = (AlreadyExistsError, FileNotFoundError, NotFoundError, NotModifiedError, PreconditionError)
_FINAL = (NotSupportedError, UnknownConfigurationKeyError)


@contextlib.contextmanager
def request_errors() -> Iterator[None]:
    """Turn obstore's errors into `RequestFailed`, but for those that are answers: not there, there already, changed."""
    try:
        yield
    except _ANSWERS:
        raise
    except (BaseError, OSError) as error:
        raise _failed(error) from None


def _failed(error: Exception) -> RequestFailed:
    text = str(error)
    code = _CODE.search(text)
    detail = code[1] if code else ""
    if not_renewed := _NOT_RENEWED.search(text):
        return RequestFailed(NOT_RENEWED, not_renewed[1], retryable=True)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        status = 403 if isinstance(error, PermissionDeniedError) else 401
        return RequestFailed(str(status), detail or "not allowed", retryable=False, status=status)
    if isinstance(error, _FINAL):
        return RequestFailed(UNSUPPORTED, "the store cannot do this", retryable=False)
    if "source: NotPartial" in text:
        return RequestFailed(NOT_PARTIAL, "the whole object came instead of a range", retryable=False)
    if found := _STATUS.search(text):
        status = int(found[1])
        return RequestFailed(str(status), detail, retryable=is_retryable(status, detail), status=status)
    if "redirect without LOCATION" in text:
        return RequestFailed("301", "PermanentRedirect", retryable=False, status=301)
    if "InvalidCertificate" in text:
        return RequestFailed("certificate", "it could not be verified", retryable=False)
    if "InvalidMessage" in text:
        return RequestFailed("tls", "no secure connection could be made", retryable=True)
    if "kind: Timeout" in text or "timed out" in text:
        return RequestFailed("timeout", "no answer in time", retryable=True)
    if "kind: Connect" in text:
        return RequestFailed("refused", "no connection could be made", retryable=True)
    return RequestFailed("reset", "the connection was lost", retryable=True)
