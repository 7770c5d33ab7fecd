"""Publishing threads that do not keep a process alive after the run has given them up.

A process waits at its end for the threads of a `ThreadPoolExecutor`, however long a network mount or another process's
lock keeps them. These threads are daemons.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable

_LAST_SECONDS = 2.0  # to remove unfinished files when the process ends; a store that answers needs less
_Task = Callable[[], None]


class PublishingThreads:
    """Do tasks in the order of their submission, a limited number concurrently.

    Args:
        count: largest number of threads; each is started when it is needed.
        name: prefix of the threads' names.
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
        """Queue a task; returns False after the end, where it is not done."""
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
        """Wait until every queued task is done."""
        self._close()
        for thread in self._threads:
            thread.join()

    def give_up(self) -> None:
        """Begin no further task and do not wait; the process waits a moment for the threads when it ends."""
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
