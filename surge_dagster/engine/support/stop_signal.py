"""The signal that ends a run early, shared by all of its threads."""

from __future__ import annotations

import threading
import time

from surge_dagster.engine.errors import Cancelled


class StopSignal:
    """Says what the threads of a run may still begin, and how long they may wait.

    Args:
        grace_seconds: how long a run that was asked to stop may take to publish what is encoded.

    Attributes:
        stopping: set when no further SuperBatch is begun, for whatever reason.
        over: set when no thread waits for the store any longer: it is down, or the grace time has passed.
        requested_at: when the run was asked to stop, on the monotonic clock; None where it was not.
    """

    def __init__(self, grace_seconds: float = 20.0) -> None:
        self.grace_seconds = grace_seconds
        self.stopping = threading.Event()
        self.over = threading.Event()
        self.requested_at: float | None = None
        self._abandoned = threading.Event()

    @property
    def abandoned(self) -> bool:
        """Whether the caller no longer waits for the run."""
        return self._abandoned.is_set()

    def request(self) -> None:
        """Ask the run to stop: the grace time begins with the first request."""
        if self.requested_at is None:
            self.requested_at = time.monotonic()
        self.stopping.set()

    def abandon(self) -> None:
        """End the grace time now: the caller was interrupted again and goes on without the run."""
        self._abandoned.set()
        self.over.set()

    def seconds_left(self, share: float = 1.0) -> float | None:
        """Seconds until this share of the grace time has passed; None as long as the run was not asked to stop."""
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
