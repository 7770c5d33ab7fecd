"""Requests to an object store, and its errors in words for the operator.

obstore repeats a request by itself: three tries with exponential back-off (`ClientLimits`). What it
gives up is final. A request that the store refuses (4xx) fails the partition of its object. The run
ends if the next object would meet the error too: the credentials or the bucket are wrong, or the
store does not answer.

obstore's errors quote requests and answers, which may hold secrets. The errors raised here show
only the status, the store's own code and a remedy.

obstore blocks without letting signals through, and Python waits for its threads when it exits. So
each request runs in a daemon thread that the caller can leave behind.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, TransientError
from surge_dagster.engine.support.waiting import TURN_SECONDS, in_background

T = TypeVar("T")

_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_CODE = re.compile(r"(?:<Code>|\(code: )([A-Za-z0-9]{1,60})[<)]")
_OBJECT = re.compile(r'invalid path: .*?Path "(.*?)"[ :]')

_LATER = "Run again when the store answers."
_STAYS = "What was published stays."
_REGION = "The bucket is in another region. Set AWS_REGION, or `region` in storage_options."
_CREDENTIALS = (
    "The credentials are missing, wrong, expired or lack a right. Provide others, run again."
)
_BUCKET = "Is there such a bucket? Correct the URL, or create the bucket, and run again."
_ROOM = "The store is full: make room, or raise its quota, and run again."

# What concerns every object. A part of the error's text: the store's code, a status, or obstore's
# words. What is wrong, unless the status says it. The remedy. The first that matches counts.
_CAUSES = (
    (
        "credential provider",
        "credentials: they could not be renewed",
        "Check the program or service that provides the credentials, and run again.",
    ),
    ("PermanentRedirect", "", _REGION),
    ("AuthorizationHeaderMalformed", "", _REGION),
    ("IllegalLocationConstraintException", "", _REGION),
    ("redirect without LOCATION", "301: PermanentRedirect", _REGION),
    ("RequestTimeTooSkewed", "", "This machine's clock is wrong: set it, and run again."),
    ("ExpiredToken", "", _CREDENTIALS),
    ("InvalidToken", "", _CREDENTIALS),
    ("TokenRefreshRequired", "", _CREDENTIALS),
    ("InvalidAccessKeyId", "", _CREDENTIALS),
    ("SignatureDoesNotMatch", "", _CREDENTIALS),
    ("AuthenticationFailed", "", _CREDENTIALS),
    ("code: 401", "", _CREDENTIALS),
    ("NoSuchBucket", "", _BUCKET),
    ("ContainerNotFound", "", _BUCKET),
    ("QuotaExceeded", "", _ROOM),
    ("code: 507", "", _ROOM),
    (
        "path segment",
        "name: an object's name has an empty or dotted part, or a control character",
        "Rename or remove that object, or give a folder without it, and run again.",
    ),
    (
        "InvalidCertificate",
        "certificate: it could not be verified",
        "The store's certificate is not valid for it, or is not trusted here: correct `endpoint`, "
        "or have this machine trust who signed it, and run again.",
    ),
    (
        "InvalidMessage",
        "tls: no secure connection could be made",
        "Does the store speak plain HTTP there? Then its `endpoint` begins with http://. "
        "Correct it, run again.",
    ),
    (
        "dns error",
        "dns: the name of the host does not resolve",
        "Correct `endpoint` or the URL, or have this machine's name service resolve the host, "
        "and run again.",
    ),
    ("kind: Connect,", "refused: no connection could be made", _LATER),  # not ConnectionReset
)
# Of a refusal that concerns one object.
_REFUSALS = (
    (
        "NoSuchUpload",
        "It was completed or aborted already, by a lifecycle rule perhaps. Run again.",
    ),
    ("AccessDenied", _CREDENTIALS),
    ("code: 403", _CREDENTIALS),
    ("", "Run again."),
)
_REFUSED_DELETION = "(code: AccessDenied)"  # in an answer with status 200
_BUSY = frozenset({"408", "429"})
# With status 400: the body arrived damaged, in part, or too slowly.
_DAMAGED = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"})
_LOST = (
    ("kind: Timeout", "timeout: no answer in time"),
    ("timed out", "timeout: no answer in time"),
    ("", "reset: the connection was lost"),
)
_MISSING_PARENTS = frozenset({"NoSuchBucket", "ContainerNotFound", "NoSuchUpload"})


class AnswerLost(StoreUnavailable):
    """A request whose connection broke. obstore does not repeat it if it has a condition."""


class BodyDamaged(TransientError):
    """A request whose body did not arrive as it was sent. obstore does not repeat it."""


class Requests:
    """Sends the requests of one store, from any thread."""

    def __init__(self, where: str, over: tuple[threading.Event, ...] = ()) -> None:
        self._where = where
        self._over = over

    def until(self, over: threading.Event) -> Requests:
        """Return the same; once `over` is set, `send` raises `Cancelled` instead of waiting."""
        return Requests(self._where, (*self._over, over))

    def send(self, what: str, request: Callable[[], T]) -> T:
        """Return the answer to a request.

        Args:
            what: method and key, for messages: "PUT a/b.parquet".

        Raises:
            FileNotFoundError: there is no such object.
            AlreadyExistsError, PreconditionError: the condition of the request does not hold.
            TransientError: the store refuses this request.
            StoreUnavailable: it does not answer, or refuses what every object needs.
        """
        self._require_not_over()
        answer = in_background(request, "surge-request")
        while not wait([answer], TURN_SECONDS).done:
            self._require_not_over()

        try:
            return answer.result()
        except (AlreadyExistsError, PreconditionError):
            raise
        except (BaseError, OSError) as error:
            raise self._error(what, error) from None  # its text may quote a secret

    def _require_not_over(self) -> None:
        if any(event.is_set() for event in self._over):
            raise Cancelled

    def _error(self, what: str, error: BaseError | OSError) -> Exception:
        text = str(error)
        code = _first(_CODE, text)
        is_missing = isinstance(error, FileNotFoundError | NotFoundError)
        if is_missing and code not in _MISSING_PARENTS:
            return FileNotFoundError(f"{self._where}: {what}: there is no such object")

        status = _first(_STATUS, text)
        answered = ": ".join(filter(None, (status, code)))
        failed = f"{self._where}: {what} failed"
        for sign, words, remedy in _CAUSES:
            if sign in text:
                if name := _first(_OBJECT, text):
                    words = f"{words}: {name!r}"
                return StoreUnavailable(f"{failed} ({words or answered}). {remedy} {_STAYS}")

        if code in _DAMAGED:
            return BodyDamaged(f"{failed} ({answered}). Run again.")
        is_refused = status.startswith("4") and status not in _BUSY
        if is_refused or _REFUSED_DELETION in text:
            remedy = next(remedy for sign, remedy in _REFUSALS if sign in text)
            # a listing is of the bucket
            refused = StoreUnavailable if what.startswith("LIST") else TransientError
            return refused(f"{failed} ({answered}). {remedy}")
        if status:
            return StoreUnavailable(f"{failed} ({answered}). {_LATER} {_STAYS}")
        words = next(words for sign, words in _LOST if sign in text)
        return AnswerLost(f"{failed} ({words}). {_LATER} {_STAYS}")


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""
