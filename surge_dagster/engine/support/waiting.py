"""Waits that a signal ends, whichever thread of the process was given it.

The kernel may hand a signal to any thread, or to the main one just before it begins to wait. Python raises what follows
(`KeyboardInterrupt`, Dagster's termination) in the main thread when that runs again, which one that waits without end
never does. So whatever may run in a main thread waits in turns. Nothing is lost by that: what is waited for still ends
the turn at once.
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
    """Wait for as long as it takes, or at most so many seconds; gives whether what is waited for has come.

    Args:
        wait: waits for at most the seconds it is given, and says the same.
    """
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        if wait(TURN_SECONDS if left is None else min(TURN_SECONDS, left)):
            return True
        if left is not None and left <= TURN_SECONDS:
            return False


def next_item(items: queue.Queue[T] | queue.SimpleQueue[T]) -> T:
    """The next item of a queue, whenever it comes."""
    while True:
        try:
            return items.get(timeout=TURN_SECONDS)
        except queue.Empty:
            continue


def wait_for_thread(thread: threading.Thread, seconds: float | None = None) -> bool:
    """Wait for the end of a thread; gives whether it has ended."""

    def wait(turn: float) -> bool:
        thread.join(turn)
        return not thread.is_alive()

    return wait_in_turns(wait, seconds)


def rest(seconds: float) -> None:
    """Sleep, in turns too: a signal that another thread was given does not end a sleep either."""

    def wait(turn: float) -> bool:
        time.sleep(turn)
        return False

    wait_in_turns(wait, seconds)
