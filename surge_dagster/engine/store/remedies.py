"""What to do about a request that failed for good, by what was answered: most of it no waiting mends."""

from __future__ import annotations

_LATER = "Run again when the store answers."
_REGION = "The bucket lies in another region: name that one (AWS_REGION, or `region` in storage_options), run again."
_BUCKET = "Is there such a bucket? Correct the output's URL, or make the bucket, and run again."
_CREDENTIALS = "The credentials are missing, wrong, out of date or lack a right. Give others, run again."
_RENEWAL = "See that the program or service that gives the credentials does so, and run again."
_CLOCK = "This machine's clock is wrong: set it, and run again."
_ROOM = "The store is full: make room, or raise its quota, and run again."
_CERTIFICATE = (
    "The store's certificate is not valid for it, or is not trusted here: correct `endpoint`, or have this machine "
    "trust who signed it, and run again."
)
_NOT_TLS = "Does the store speak plain HTTP there? Then its `endpoint` begins with http://. Correct it, run again."

_REMEDIES = {
    "301": _REGION,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "404": _BUCKET,
    "NoSuchUpload": "Somebody has aborted the upload, a lifecycle rule perhaps. Run again.",
    "401": _CREDENTIALS,
    "403": _CREDENTIALS,
    "ExpiredToken": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "TokenRefreshRequired": _CREDENTIALS,
    "credentials": _RENEWAL,
    "RequestTimeTooSkewed": _CLOCK,
    "507": _ROOM,
    "QuotaExceeded": _ROOM,
    "certificate": _CERTIFICATE,
    "tls": _NOT_TLS,
}


def remedy_of(cause: str, code: str) -> str:
    """A sentence for the person who runs it.

    Args:
        cause, code: cause and detail of a `RequestFailed`; what the store says counts more than its status.
    """
    return _REMEDIES.get(code) or _REMEDIES.get(cause, _LATER)
