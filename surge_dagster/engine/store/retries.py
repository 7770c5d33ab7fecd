"""Requests to an object store, tried again: what can help is repeated, counted and logged, what cannot is not.

The clients that are used retry nothing themselves, so that every retry is seen here. A request gets three attempts; the
waits between them are 2 and 4 seconds with jitter, or what the store asks for (`Retry-After`). A store in which
several requests of one kind in a row came to nothing is down: then the run ends, instead of failing one partition after
the other. Each kind is counted by itself, since a store that stores nothing any more may still answer who looks.
A run that is over waits for nothing: what its threads would have tried again is left to the next one.

An answer may stay away for as long as the client waits, and neither a signal nor the end of the process comes before
it: obstore lets no signal through, and the interpreter joins its threads. So whoever asks has a daemon do it and waits
for that one, which can be given up. That costs some 60 µs a request.
"""

from __future__ import annotations

import contextlib
import email.utils
import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, TransientError
from surge_dagster.engine.store.remedies import remedy_of

log = logging.getLogger(__name__)

ATTEMPTS = 3
JITTER = 0.25
LONGEST_WAIT_SECONDS = 300.0
DOWN_AFTER = 4
_POLL_SECONDS = 0.1
# For what is under way when a run is over, and for aborting the uploads that it leaves: a store that lives takes less.
_LAST_SECONDS = 1.0
_RETRYABLE_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
# Answered with status 400: what was sent came damaged, came in part, or too slowly.
_RETRYABLE_CODES = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"})

# Beginning an upload stores nothing yet.
Kind = Literal["read", "begin", "write", "remove"]
T = TypeVar("T")


class RequestFailed(Exception):
    """One attempt that failed; its text holds no secret, since it is built from codes and kinds alone.

    Attributes:
        cause: one word to count it under: "503", "reset", "timeout".
        retryable: whether another attempt can help.
        status: of the answer, None where there was none.
        retry_after_seconds: what the store asks for.
    """

    def __init__(
        self,
        cause: str,
        detail: str,
        *,
        retryable: bool,
        status: int | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        self.cause = cause
        self.detail = detail
        self.retryable = retryable
        self.status = status
        self.retry_after_seconds = retry_after_seconds
        super().__init__(f"{cause}: {detail}" if detail else cause)


@dataclass(slots=True)
class _Books:
    """Retries by cause, and requests in a row that came to nothing, by kind."""

    retries: Counter[str] = field(default_factory=Counter)
    lost: Counter[Kind] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class Retrier:
    """Calls again what failed in a way that may pass, and keeps count; one for each store, used by all threads.

    Args:
        where: the store, for messages.
        attempts: of each request.
        sleep, jitter: replaced by tests, which never wait for real.
        down_after: requests of a kind that come to nothing in a row, after which the store is taken for down.
        over: set when nobody wants the requests any more; see `until`.
    """

    where: str
    attempts: int = ATTEMPTS
    sleep: Callable[[float], None] | None = None
    jitter: Callable[[], float] = field(default_factory=lambda: random.Random().random)
    down_after: int = DOWN_AFTER
    over: threading.Event = field(default_factory=threading.Event)
    _books: _Books = field(default_factory=_Books)
    _around: tuple[threading.Event, ...] = ()  # which end it too
    _given_up_at: float = field(default=math.inf, init=False)

    @property
    def counts(self) -> Mapping[str, int]:
        """Retries so far, by cause."""
        with self._books.lock:
            return dict(self._books.retries)

    def until(self, over: threading.Event) -> Retrier:
        """The same, with the same count, which waits and tries again no longer than until `over` is set, too."""
        return replace(self, over=over, _around=(*self._around, self.over))

    def call(self, what: str, attempt: Callable[[], T], *, kind: Kind = "read", attempts: int | None = None) -> T:
        """The result of the first attempt that succeeds.

        Args:
            what: the request in words, such as "PUT a/b.parquet".
            attempt: raises `RequestFailed`; anything else it raises is an answer too and is passed on.

        Raises:
            TransientError: every attempt failed, or the failure is final.
            StoreUnavailable: so did those before it, of other requests of this kind.
            Cancelled: nobody wants it any more, and it failed, or its answer does not come.
        """
        limit = attempts or self.attempts
        for number in range(1, limit + 1):
            try:
                result = self._result(attempt)
            except Cancelled:
                raise
            except RequestFailed as failed:
                if not failed.retryable or number == limit:
                    raise self._give_up(what, kind, failed, number) from None  # a cause may quote what the store sent
                self._wait(what, failed, number)
            except Exception:
                self._answered(kind)
                raise
            else:
                self._answered(kind)
                return result
        raise AssertionError("unreachable")

    def _result(self, attempt: Callable[[], T]) -> T:
        self._require_wanted()
        answer = _ask(attempt)
        try:
            while not answer.done():
                with contextlib.suppress(TimeoutError):
                    answer.exception(_POLL_SECONDS)
                    break
                self._require_wanted()
        except BaseException:
            answer.cancel()  # what is not sent yet
            raise
        return answer.result()

    @property
    def _is_over(self) -> bool:
        return self.over.is_set() or any(over.is_set() for over in self._around)

    def _require_wanted(self) -> None:
        if self._is_over:
            now = time.monotonic()
            self._given_up_at = min(self._given_up_at, now + _LAST_SECONDS)
            if now >= self._given_up_at:
                raise Cancelled

    def _rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._is_over and (left := end - time.monotonic()) > 0:
            self.over.wait(min(left, _POLL_SECONDS))

    def _wait(self, what: str, failed: RequestFailed, number: int) -> None:
        spread = self.jitter()
        if failed.retry_after_seconds is not None:
            seconds = min(failed.retry_after_seconds + spread * JITTER, LONGEST_WAIT_SECONDS)
        else:
            seconds = 2.0**number * (1 - JITTER + 2 * JITTER * spread)
        if not self._is_over:
            log.warning("%s: %s failed (%s); attempt %d in %.1f s", self.where, what, failed, number + 1, seconds)
            (self.sleep or self._rest)(seconds)
        if self._is_over:
            raise Cancelled from None
        with self._books.lock:
            self._books.retries[failed.cause] += 1

    def _give_up(self, what: str, kind: Kind, failed: RequestFailed, number: int) -> TransientError:
        with self._books.lock:
            self._books.lost[kind] += 1
            lost = self._books.lost[kind]
        tries = f"{number} attempts" if number > 1 else "one attempt, and another cannot help"
        text = f"{self.where}: {what} failed ({failed}) after {tries}."
        remedy = remedy_of(failed.cause, failed.detail)
        if lost >= self.down_after:
            return StoreUnavailable(
                f"{text} {lost} requests in a row came to nothing: the store is down, or refuses them. What was "
                f"published stays. {remedy}"
            )
        return TransientError(f"{text} {remedy}")

    def _answered(self, kind: Kind) -> None:
        if self._books.lost[kind]:
            with self._books.lock:
                self._books.lost[kind] = 0


def _ask(attempt: Callable[[], T]) -> Future[T]:
    """Make a request in a thread of its own, which holds up no process that ends."""
    answer: Future[T] = Future()

    def run() -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(attempt())
            except BaseException as error:
                answer.set_exception(error)

    threading.Thread(target=run, name="surge-request", daemon=True).start()
    return answer


def is_retryable(status: int, code: str) -> bool:
    """Whether another attempt can help after an answer with this status and this `<Code>` in its body."""
    return status in _RETRYABLE_STATUS or code in _RETRYABLE_CODES


def retry_after(value: str | None, now: Callable[[], float] = time.time) -> float | None:
    """Seconds that a `Retry-After` header asks for, given as a number or a date; None when it asks for nothing."""
    if not value:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now())
    except (ValueError, OverflowError):
        return None
