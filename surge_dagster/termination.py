"""A termination signal (the end of a spot machine, `kill`, a service being stopped) as an exception.

Python ends at once on SIGTERM, with nothing published. As an exception it takes the same way out as Ctrl-C: the run
is closed, which publishes what is encoded within its grace time, and then the pool.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


class Terminated(BaseException):
    """The process was asked to end."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raises `Terminated` in the main thread when SIGTERM comes; a second one does not disturb the first one's work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
