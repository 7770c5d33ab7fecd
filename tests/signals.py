"""A signal that the kernel delivers to another thread than the main one."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_LOOK_SECONDS = 0.02


@contextmanager
def interrupted_in_another_thread() -> Iterator[None]:
    """Interrupt the main thread while it waits in the block; the block must raise
    `KeyboardInterrupt`."""
    left = threading.Event()

    def interrupt() -> None:
        main = threading.main_thread().ident or 0
        before = None
        while not left.wait(_LOOK_SECONDS):
            frame = sys._current_frames()[main]
            now = (frame.f_code, frame.f_lasti)
            if now == before:  # it waits
                signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
                return
            before = now

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGUSR2, end)
    interrupting = threading.Thread(target=interrupt)
    collects = gc.isenabled()
    # `_current_frames` of Python 3.11 holds a lock for which a collection that it begins waits
    # forever
    gc.disable()
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        left.set()
        interrupting.join()
        signal.signal(signal.SIGUSR2, handler)
        if collects:
            gc.enable()
