"""Requests to an object store: their errors, classified by cause, and operations that are attempted again.

obstore puts status and cause into the text of an error, which also quotes requests and answers. A `RequestFailed` is
built from codes and kinds alone, so that it holds no secret. It says whether another attempt can help, and what an
operator should do.

obstore repeats single requests by itself. An operation that it gives up gets up to three attempts here, about 2 and 4
seconds apart; these are counted. When several operations of one kind fail in a row, the store is down: the run ends
instead of failing one partition after the other. Each kind is counted on its own, because a store that takes no writes
may still answer reads.

obstore blocks without letting signals through, and Python waits for its threads when it exits. So each attempt runs in
a daemon thread that the caller can give up. That costs about 60 µs per operation.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from obstore.exceptions import (
    BaseError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, TransientError
from surge_dagster.engine.support.waiting import TURN_SECONDS, wait_in_turns

log = logging.getLogger(__name__)

ATTEMPTS = 3
JITTER = 0.25
DOWN_AFTER = 4
UNSUPPORTED = "unsupported"
NOT_PARTIAL = "not-partial"

_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_CREDENTIAL_PROVIDER = re.compile(r"credential provider: (?:[\w.]*\.)?(\w+)")
_RETRYABLE_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
# With status 400: the body arrived damaged, in part, or too slowly.
_RETRYABLE_CODES = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"})

_LATER = "Run again when the store answers."
_REGION = "The bucket is in another region: set it (AWS_REGION, or `region` in storage_options), run again."
_CREDENTIALS = "The credentials are missing, wrong, expired or lack a right. Provide others, run again."
_ROOM = "The store is full: make room, or raise its quota, and run again."
_REMEDIES = {
    "301": _REGION,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "404": "Is there such a bucket? Correct the output's URL, or create the bucket, and run again.",
    "NoSuchUpload": "Another process aborted the upload, a lifecycle rule perhaps. Run again.",
    "401": _CREDENTIALS,
    "403": _CREDENTIALS,
    "ExpiredToken": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "TokenRefreshRequired": _CREDENTIALS,
    "credentials": "Check the program or service that provides the credentials, and run again.",
    "RequestTimeTooSkewed": "This machine's clock is wrong: set it, and run again.",
    "507": _ROOM,
    "QuotaExceeded": _ROOM,
    "certificate": (
        "The store's certificate is not valid for it, or is not trusted here: correct `endpoint`, or have this machine "
        "trust who signed it, and run again."
    ),
    "tls": "Does the store speak plain HTTP there? Then its `endpoint` begins with http://. Correct it, run again.",
}

# Beginning a multipart upload stores nothing yet.
Kind = Literal["read", "begin", "write", "remove"]
T = TypeVar("T")


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
    """Turn obstore's errors into `RequestFailed`, except for a missing object and a condition that does not hold."""
    try:
        yield
    except (FileNotFoundError, NotFoundError, PreconditionError):
        raise
    except (BaseError, OSError) as error:
        raise classified(error) from None


def classified(error: Exception) -> RequestFailed:
    """The failure behind an error that obstore raised."""
    text = str(error)
    found = _CODE.search(text)
    code = found[1] if found else ""
    if provider := _CREDENTIAL_PROVIDER.search(text):
        return RequestFailed("credentials", f"they could not be renewed, {provider[1]}", retryable=True)
    if isinstance(error, PermissionDeniedError):
        return RequestFailed("403", code or "not allowed", retryable=False)
    if isinstance(error, UnauthenticatedError):
        return RequestFailed("401", code or "not allowed", retryable=False)
    if isinstance(error, NotSupportedError | UnknownConfigurationKeyError):
        return RequestFailed(UNSUPPORTED, "the store does not support this request", retryable=False)
    if "source: NotPartial" in text:
        return RequestFailed(NOT_PARTIAL, "the whole object came instead of a range", retryable=False)
    if status := _STATUS.search(text):
        retryable = int(status[1]) in _RETRYABLE_STATUS or code in _RETRYABLE_CODES
        return RequestFailed(status[1], code, retryable=retryable)
    if "redirect without LOCATION" in text:
        return RequestFailed("301", "PermanentRedirect", retryable=False)
    if "InvalidCertificate" in text:
        return RequestFailed("certificate", "it could not be verified", retryable=False)
    if "InvalidMessage" in text:
        return RequestFailed("tls", "no secure connection could be made", retryable=True)
    if "kind: Timeout" in text or "timed out" in text:
        return RequestFailed("timeout", "no answer in time", retryable=True)
    if "kind: Connect" in text:
        return RequestFailed("refused", "no connection could be made", retryable=True)
    return RequestFailed("reset", "the connection was lost", retryable=True)


@dataclass(slots=True)
class _Counts:
    """Retries by cause, and operations in a row that failed, by kind."""

    retries: Counter[str] = field(default_factory=Counter)
    failed: Counter[Kind] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class Retrier:
    """Repeats and counts operations whose failure may pass; each store has one, used by all threads.

    Args:
        where: the store, for messages.
        sleep, jitter: replaced by tests, which never wait.
        over: events that end every wait; see `until`.
    """

    where: str
    sleep: Callable[[float], None] | None = None
    jitter: Callable[[], float] = random.random
    over: tuple[threading.Event, ...] = ()
    _counts: _Counts = field(default_factory=_Counts)

    @property
    def counts(self) -> Mapping[str, int]:
        """Retries so far, by cause."""
        with self._counts.lock:
            return dict(self._counts.retries)

    def until(self, over: threading.Event) -> Retrier:
        """The same retrier with the same counts; once `over` is set, its calls raise `Cancelled` instead of waiting."""
        return replace(self, over=(*self.over, over))

    def call(self, what: str, attempt: Callable[[], T], kind: Kind = "read", attempts: int = ATTEMPTS) -> T:
        """The result of an operation.

        Args:
            what: for messages, such as "PUT a/b.parquet".
            attempt: raises `RequestFailed`; any other exception is an answer and is passed on.

        Raises:
            TransientError: every attempt failed, or the failure is final.
            StoreUnavailable: so did the operations of this kind before it.
            Cancelled: an `over` event is set.
        """
        for number in range(1, attempts + 1):
            try:
                result = self._result(attempt)
            except Cancelled:
                raise
            except RequestFailed as failed:
                if not failed.retryable or number == attempts:
                    raise self._final(what, kind, failed, number) from None  # a cause may quote what the store sent
                self._wait(what, failed, number)
            except Exception:
                self._answered(kind)
                raise
            else:
                self._answered(kind)
                return result
        raise AssertionError("unreachable")

    def _result(self, attempt: Callable[[], T]) -> T:
        self._raise_if_over()
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(attempt())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="surge-request", daemon=True).start()
        while not wait([answer], TURN_SECONDS).done:
            self._raise_if_over()
        return answer.result()

    def _is_over(self) -> bool:
        return any(event.is_set() for event in self.over)

    def _raise_if_over(self) -> None:
        if self._is_over():
            raise Cancelled

    def _wait(self, what: str, failed: RequestFailed, number: int) -> None:
        seconds = 2.0**number * (1 - JITTER + 2 * JITTER * self.jitter())
        self._raise_if_over()
        log.warning("%s: %s failed (%s); attempt %d in %.1f s", self.where, what, failed, number + 1, seconds)
        (self.sleep or self._rest)(seconds)
        self._raise_if_over()
        with self._counts.lock:
            self._counts.retries[failed.cause] += 1

    def _rest(self, seconds: float) -> None:
        def wait_turn(turn: float) -> bool:
            time.sleep(turn)
            return self._is_over()

        wait_in_turns(wait_turn, seconds)

    def _final(self, what: str, kind: Kind, failed: RequestFailed, number: int) -> TransientError:
        with self._counts.lock:
            self._counts.failed[kind] += 1
            in_a_row = self._counts.failed[kind]
        if failed.retryable:
            tries = f"{number} attempts" if number > 1 else "one attempt"
        else:
            tries = "one attempt, and another cannot help"
        text = f"{self.where}: {what} failed ({failed}) after {tries}."
        if in_a_row >= DOWN_AFTER:
            return StoreUnavailable(
                f"{text} {in_a_row} operations in a row failed: the store is down, or refuses them. What was "
                f"published stays. {failed.remedy}"
            )
        return TransientError(f"{text} {failed.remedy}")

    def _answered(self, kind: Kind) -> None:
        with self._counts.lock:
            self._counts.failed[kind] = 0
