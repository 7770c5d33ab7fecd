"""Waits for a state."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Wait for a state; fails when it does not come within these seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "the state did not come"
        time.sleep(0.005)
