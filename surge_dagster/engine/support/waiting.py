"""Waits that a signal can end, whichever thread of the process received it, and the signal that
ends a run early.

The kernel may deliver a signal to any thread, or to the main thread just before it begins to wait.
Python raises the exception (`KeyboardInterrupt`, Dagster's termination) in the main thread when
that thread runs again, which never happens in an endless wait. Code that may run in a main thread
therefore waits in short turns.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from contextlib import contextmanager
from typing import TypeVar

from surge_dagster.engine.errors import Cancelled

log = logging.getLogger(__name__)
TURN_SECONDS = 0.1
T = TypeVar("T")


def wait_in_turns(wait: Callable[[float], bool], seconds: float | None = None) -> bool:
    """Wait without end or for some seconds until `wait`, which gets the seconds of a turn, is true;
    return whether it was."""
    end = math.inf if seconds is None else time.monotonic() + seconds
    while True:
        remaining = max(0.0, end - time.monotonic())
        if wait(min(TURN_SECONDS, remaining)):
            return True
        if remaining <= TURN_SECONDS:
            return False


def next_item(items: queue.Queue[T] | queue.SimpleQueue[T]) -> T:
    """Return the next item of a queue; waits until there is one."""
    while True:
        try:
            return items.get(timeout=TURN_SECONDS)
        except queue.Empty:
            continue


def in_background(call: Callable[[], T], name: str) -> Future[T]:
    """Call it in a daemon thread, because Python waits for its other threads when it exits."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def result_of(answer: Future[T]) -> T:
    """Return the result of a call in the background, or raise what it raised; waits for it."""
    while not futures_wait([answer], TURN_SECONDS).done:
        pass
    return answer.result()


def wait_for_thread(thread: threading.Thread, seconds: float | None = None) -> bool:
    """Wait for the end of a thread; returns whether it has ended."""

    def wait(turn: float) -> bool:
        thread.join(turn)
        return not thread.is_alive()

    return wait_in_turns(wait, seconds)


@contextmanager
def every(seconds: float, call: Callable[[], object], name: str) -> Iterator[None]:
    """Call it again and again, in a thread, as long as the block runs; what it raises is logged."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            try:
                call()
            except Exception as error:
                log.warning(
                    "%s: %s: %s; it goes on in %g s", name, type(error).__name__, error, seconds
                )

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        wait_for_thread(thread, seconds)


class StopSignal:
    """Says what the threads of a run may still begin, and how long they may wait.

    Args:
        grace_seconds: how long a run that was asked to stop may take to publish what is encoded.

    Attributes:
        stopping: set when no further SuperBatch is begun, for whatever reason.
        over: set when no thread waits for the store any longer: it is down, or the grace time has
            passed.
        requested_at: when the run was asked to stop, on the monotonic clock; None if it was not.
        abandoned: whether the caller no longer waits for the run.
    """

    def __init__(self, grace_seconds: float = 20.0) -> None:
        self.grace_seconds = grace_seconds
        self.stopping = threading.Event()
        self.over = threading.Event()
        self.requested_at: float | None = None
        self.abandoned = False

    def request(self) -> None:
        """Ask the run to stop: the grace time begins with the first request."""
        if self.requested_at is None:
            self.requested_at = time.monotonic()
        self.stopping.set()

    def abandon(self) -> None:
        """End the grace time now: the caller was interrupted again and goes on without the run."""
        self.abandoned = True
        self.over.set()

    def seconds_left(self, share: float = 1.0) -> float | None:
        """Seconds until this share of the grace time has passed; None as long as the run was not
        asked to stop."""
        if self.abandoned:
            return 0.0
        if self.requested_at is None:
            return None
        return max(0.0, self.requested_at + share * self.grace_seconds - time.monotonic())

    def require_running(self) -> None:
        """Raise `Cancelled` when no further SuperBatch is to be begun."""
        if self.stopping.is_set():
            raise Cancelled

    def require_not_over(self) -> None:
        """Raise `Cancelled` when no thread is to wait for the store any longer."""
        if self.over.is_set():
            raise Cancelled
