"""Threads that publish, and that hold up no process that has given them up.

The threads of a `ThreadPoolExecutor` are waited for when the process ends, however long a network mount or another
process's lock keeps them. Daemons are not.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable

# For taking back what they had begun: a store that lives takes less.
_LAST_SECONDS = 2.0
_Task = Callable[[], None]


class PublishingThreads:
    """Do tasks in the order in which they are handed over, so many at a time.

    Args:
        count: how many there are at most; each begins when it is needed.
        name: what the name of each begins with.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._ended = False
        self._given_up = False

    def submit(self, task: _Task) -> bool:
        """Have it done by the next one that is free; gives whether it will be, which after the end it is not."""
        with self._lock:
            if self._ended:
                return False
            self._tasks.put(task)
            if len(self._threads) < self._count:
                thread = threading.Thread(target=self._run, name=f"{self._name}_{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            return True

    def end(self) -> None:
        """Wait until everything that was handed over is done."""
        self._close()
        for thread in self._threads:
            thread.join()

    def give_up(self) -> None:
        """Begin nothing more, and wait for nothing; the process waits a moment for them when it ends."""
        self._given_up = True
        self._close()
        atexit.register(self._wait_until, time.monotonic() + _LAST_SECONDS)

    def _close(self) -> None:
        with self._lock:
            self._ended = True
            for _ in self._threads:
                self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if not self._given_up:
                task()

    def _wait_until(self, until: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
