"""Errors of requests to an object store, classified by cause.

obstore puts status and cause into the text of an error, which also quotes requests and answers. A
`RequestFailed` is built from codes and kinds alone, so that it holds no secret. It says whether
another attempt can help, and what an operator should do.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

UNSUPPORTED = "unsupported"
NOT_PARTIAL = "not-partial"

# Types of obstore's errors that no other attempt can change: cause, and detail where the store's
# own code says none.
_UNSUPPORTED = (UNSUPPORTED, "the store does not support this request")
_REFUSALS: dict[type[BaseException], tuple[str, str]] = {
    PermissionDeniedError: ("403", ""),
    UnauthenticatedError: ("401", ""),
    NotSupportedError: _UNSUPPORTED,
    UnknownConfigurationKeyError: _UNSUPPORTED,
    InvalidPathError: ("name", "an object's name has an empty or dotted part, such as a//b"),
}
# Parts of the texts of errors without an answer: cause, detail, and whether another attempt can
# help.
_CONNECTIONS = (
    ("redirect without LOCATION", "301", "PermanentRedirect", False),
    ("InvalidCertificate", "certificate", "it could not be verified", False),
    ("InvalidMessage", "tls", "no secure connection could be made", True),
    ("kind: Timeout", "timeout", "no answer in time", True),
    ("timed out", "timeout", "no answer in time", True),
    ("dns error", "dns", "the name of the host does not resolve", True),
    ("IncompleteBody", "incomplete", "the answer ended before all of it had come", True),
    ("kind: Connect,", "refused", "no connection could be made", True),  # not ConnectionReset
)
_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_CREDENTIAL_PROVIDER = re.compile(r"credential provider: (?:[\w.]*\.)?(\w+)")
_RETRYABLE_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
# With status 400: the body arrived damaged, in part, or too slowly.
_RETRYABLE_CODES = frozenset(
    {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"}
)

_LATER = "Run again when the store answers."
_REGION = "The bucket is in another region: set it (AWS_REGION, or `region` in storage_options), run again."
_CREDENTIALS = (
    "The credentials are missing, wrong, expired or lack a right. Provide others, run again."
)
_ROOM = "The store is full: make room, or raise its quota, and run again."
_REMEDIES = {
    "301": _REGION,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "404": "Is there such a bucket? Correct the URL, or create the bucket, and run again.",
    "NoSuchUpload": "Another process aborted the upload, a lifecycle rule perhaps. Run again.",
    "401": _CREDENTIALS,
    "403": _CREDENTIALS,
    "ExpiredToken": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "TokenRefreshRequired": _CREDENTIALS,
    "credentials": "Check the program or service that provides the credentials, and run again.",
    "name": "Rename or remove that object, or give a folder without it, and run again.",
    "RequestTimeTooSkewed": "This machine's clock is wrong: set it, and run again.",
    "507": _ROOM,
    "QuotaExceeded": _ROOM,
    "dns": "Correct `endpoint` or the URL, or have this machine's name service know the host, and run again.",
    "certificate": (
        "The store's certificate is not valid for it, or is not trusted here: correct `endpoint`, or have this machine "
        "trust who signed it, and run again."
    ),
    "tls": "Does the store speak plain HTTP there? Then its `endpoint` begins with http://. Correct it, run again.",
}


class RequestFailed(Exception):
    """One attempt that failed.

    Attributes:
        cause: one word to count it under: "503", "reset", "timeout".
        detail: the store's error code, or a few words.
        retryable: whether another attempt can help.
    """

    def __init__(self, cause: str, detail: str, *, retryable: bool) -> None:
        self.cause = cause
        self.detail = detail
        self.retryable = retryable
        super().__init__(f"{cause}: {detail}" if detail else cause)

    @property
    def remedy(self) -> str:
        """A sentence for the operator; the store's own code counts more than the status."""
        return _REMEDIES.get(self.detail) or _REMEDIES.get(self.cause, _LATER)


@contextlib.contextmanager
def request_errors() -> Iterator[None]:
    """Turn obstore's errors into `RequestFailed`, except for a missing object and a condition that
    does not hold."""
    try:
        yield
    except (FileNotFoundError, NotFoundError, PreconditionError):
        raise
    except (BaseError, OSError) as error:
        raise classified(error) from None


def classified(error: Exception) -> RequestFailed:
    text = str(error)
    code_found = _CODE.search(text)
    code = code_found[1] if code_found else ""
    if provider := _CREDENTIAL_PROVIDER.search(text):
        return RequestFailed(
            "credentials", f"they could not be renewed, {provider[1]}", retryable=True
        )
    for kind, (cause, detail) in _REFUSALS.items():
        if isinstance(error, kind):
            return RequestFailed(cause, detail or code or "not allowed", retryable=False)
    if "source: NotPartial" in text:
        return RequestFailed(
            NOT_PARTIAL, "the whole object came instead of a range", retryable=False
        )
    if status := _STATUS.search(text):
        retryable = int(status[1]) in _RETRYABLE_STATUS or code in _RETRYABLE_CODES
        return RequestFailed(status[1], code, retryable=retryable)
    for part, cause, detail, retryable in _CONNECTIONS:
        if part in text:
            return RequestFailed(cause, detail, retryable=retryable)
    return RequestFailed("reset", "the connection was lost", retryable=True)
