"""An event loop whose clock only timers move."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Timers(selectors.DefaultSelector):
    """Waits for no timer, and counts the seconds that it should have waited.

    A turn of the loop takes a microsecond: a timer that is early by a rounding error is set again.
    """

    passed_seconds = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.passed_seconds += 1e-6
        if timeout is not None:
            self.passed_seconds += timeout
            timeout = 0
        return super().select(timeout)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock counts only the waits for timers, so that no test waits."""

    def __init__(self) -> None:
        self._timers = _Timers()
        super().__init__(self._timers)

    def time(self) -> float:
        return self._timers.passed_seconds
