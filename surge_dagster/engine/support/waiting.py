"""Waits that a signal can end, whichever thread of the process received it.

The kernel may deliver a signal to any thread, or to the main thread just before it begins to wait. Python raises the
exception (`KeyboardInterrupt`, Dagster's termination) in the main thread when that thread runs again, which never
happens in an endless wait. Code that may run in a main thread therefore waits in short turns.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

TURN_SECONDS = 0.1
T = TypeVar("T")


def wait_in_turns(wait: Callable[[float], bool], seconds: float | None = None) -> bool:
    """Wait without end, or at most so many seconds; returns whether `wait` succeeded.

    Args:
        wait: waits for at most the given seconds and returns whether it succeeded.
    """
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        if wait(TURN_SECONDS if left is None else min(TURN_SECONDS, left)):
            return True
        if left is not None and left <= TURN_SECONDS:
            return False


def next_item(items: queue.Queue[T] | queue.SimpleQueue[T]) -> T:
    """The next item of a queue; waits until there is one."""
    while True:
        try:
            return items.get(timeout=TURN_SECONDS)
        except queue.Empty:
            continue


def wait_for_thread(thread: threading.Thread, seconds: float | None = None) -> bool:
    """Wait for the end of a thread; returns whether it has ended."""

    def wait(turn: float) -> bool:
        thread.join(turn)
        return not thread.is_alive()

    return wait_in_turns(wait, seconds)


def rest(seconds: float) -> None:
    """Sleep in turns, so that a signal that another thread received ends the sleep."""

    def wait(turn: float) -> bool:
        time.sleep(turn)
        return False

    wait_in_turns(wait, seconds)
