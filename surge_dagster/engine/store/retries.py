"""Operations on an object store that are attempted again, and counted.

obstore repeats single requests by itself. An operation that it gives up gets up to three attempts
here, about 2 and 4 seconds apart; these are counted. When several operations of one kind fail in a
row, the store is down: the run ends instead of failing one partition after the other. Each kind is
counted on its own, because a store that takes no writes may still answer reads.

obstore blocks without letting signals through, and Python waits for its threads when it exits. So
each attempt runs in a daemon thread that the caller can give up.
"""

from __future__ import annotations

import copy
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from functools import partial
from typing import Self, TypeVar

from surge_dagster.engine.errors import Cancelled, StoreUnavailable, TransientError
from surge_dagster.engine.store.request_errors import RequestFailed
from surge_dagster.engine.support.waiting import TURN_SECONDS, in_background, rest

log = logging.getLogger(__name__)

ATTEMPTS = 3
JITTER = 0.25
DOWN_AFTER = 4

T = TypeVar("T")


class Retrier:
    """Repeats and counts operations whose failure may pass; each store has one, used by all
    threads."""

    def __init__(
        self,
        where: str,
        sleep: Callable[[float], None] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._where = where
        self._sleep = sleep
        self._jitter = jitter
        self._over: tuple[threading.Event, ...] = ()
        self._lock = threading.Lock()
        self._retries: Counter[str] = Counter()  # by cause
        self._failures: Counter[str] = Counter()  # operations in a row that failed, by kind

    @property
    def counts(self) -> Mapping[str, int]:
        """Retries so far, by cause."""
        with self._lock:
            return dict(self._retries)

    def until(self, over: threading.Event) -> Self:
        """The same retrier with the same counts; once `over` is set, its calls raise `Cancelled`
        instead of waiting."""
        view = copy.copy(self)
        view._over = (*self._over, over)
        return view

    def call(self, what: str, attempt: Callable[[], T], attempts: int = ATTEMPTS) -> T:
        """The result of an operation.

        Args:
            what: for messages, such as "PUT a/b.parquet"; its first word is the kind of operation.
            attempt: raises `RequestFailed`; any other exception is an answer and is passed on.

        Raises:
            TransientError: every attempt failed, or the failure is final.
            StoreUnavailable: so did the operations of this kind before it.
        """
        kind = what.partition(" ")[0]
        for number in range(1, attempts + 1):
            try:
                result = self._result(attempt)
            except RequestFailed as failed:
                if not failed.retryable or number == attempts:
                    # a cause may quote what the store sent
                    raise self._final(what, kind, failed, number) from None
                self._wait(what, failed, number)
            except Cancelled:
                raise
            except Exception:
                self._answered(kind)
                raise
            else:
                self._answered(kind)
                return result
        raise AssertionError("unreachable")

    def _result(self, attempt: Callable[[], T]) -> T:
        self._raise_if_over()
        answer = in_background(attempt, "surge-request")
        while not wait([answer], TURN_SECONDS).done:
            self._raise_if_over()
        return answer.result()

    def _is_over(self) -> bool:
        return any(event.is_set() for event in self._over)

    def _raise_if_over(self) -> None:
        if self._is_over():
            raise Cancelled

    def _wait(self, what: str, failed: RequestFailed, number: int) -> None:
        seconds = 2.0**number * (1 - JITTER + 2 * JITTER * self._jitter())
        self._raise_if_over()
        log.warning(
            "%s: %s failed (%s); attempt %d in %.1f s",
            self._where,
            what,
            failed,
            number + 1,
            seconds,
        )
        (self._sleep or partial(rest, is_over=self._is_over))(seconds)
        self._raise_if_over()
        with self._lock:
            self._retries[failed.cause] += 1

    def _final(self, what: str, kind: str, failed: RequestFailed, number: int) -> TransientError:
        with self._lock:
            self._failures[kind] += 1
            in_a_row = self._failures[kind]
        tries = f"{number} attempts" if number > 1 else "one attempt"
        if not failed.retryable:
            tries = "one attempt, and another cannot help"
        text = f"{self._where}: {what} failed ({failed}) after {tries}."
        if in_a_row >= DOWN_AFTER:
            return StoreUnavailable(
                f"{text} {in_a_row} operations in a row failed: the store is down, or refuses them. What was "
                f"published stays. {failed.remedy}"
            )
        return TransientError(f"{text} {failed.remedy}")

    def _answered(self, kind: str) -> None:
        with self._lock:
            self._failures[kind] = 0
