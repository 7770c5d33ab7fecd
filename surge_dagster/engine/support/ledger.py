"""The ledger of resident bytes: data that is read ahead, buffered, encoded or waiting for storage.

A stage reserves bytes before it holds them and releases them afterwards. If too few remain, it
waits until another stage releases some. The limit is checked once, at the start, against the
largest sum that a single SuperBatch can need, so that waiting always ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from surge_dagster.engine.errors import Cancelled


class Ledger:
    """Counts resident bytes against a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.peak = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # waking a condition without waiters costs too much for every tiny partition
        self._waiting = 0

    def reserve(self, size: int, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Hold `size` bytes, waiting until they fit; raises `Cancelled` once `cancelled()` is
        true."""
        if size > self.limit:
            raise ValueError(f"cannot reserve {size:,} bytes under a limit of {self.limit:,}")
        with self._lock:
            while self.held + size > self.limit:
                if cancelled():
                    raise Cancelled
                self._waiting += 1
                self._changed.wait(0.1)
                self._waiting -= 1
            self._hold(size)

    def try_reserve(self, size: int) -> bool:
        """Hold `size` bytes if they fit now."""
        with self._lock:
            if self.held + size > self.limit:
                return False
            self._hold(size)
            return True

    def _hold(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)

    def release(self, size: int) -> None:
        """Release bytes that were reserved."""
        with self._lock:
            if size > self.held:
                raise ValueError(f"cannot release {size:,} bytes: only {self.held:,} are held")
            self.held -= size
            if self._waiting:
                self._changed.notify_all()
