"""What a run measures of itself while it goes on: pace, texts in flight, and the encoder's waits
for storage."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import Literal

from surge_dagster.engine.support.waiting import TURN_SECONDS, StopSignal

_PACE_NEEDS = 3  # SuperBatches
_PACE_REMEMBERS = 64
_ALIKE = 4.0  # times the expected seconds of another one, or a quarter of them


class Pace:
    """Compares the seconds of each encode call with those of earlier calls of about its size.

    A device that throttles, or that another process uses, shows here long before the run is late.
    What a call should take depends on the number and the length of its texts, so each is first
    divided by what the pool's costs expect.

    Args:
        is_learned: the expectation comes from earlier runs, and counts until three calls alike have
            been seen.
    """

    def __init__(self, is_learned: bool = False) -> None:
        self._is_learned = is_learned
        # expected seconds, taken / expected
        self._seen: deque[tuple[float, float]] = deque(maxlen=_PACE_REMEMBERS)

    def ratio(self, seconds: float, expected_seconds: float) -> float | None:
        """Return how many times longer than usual a call took; None if too little is known."""
        if expected_seconds <= 0:
            return None
        taken = seconds / expected_seconds
        alike = [
            before
            for expected, before in self._seen
            if expected / _ALIKE <= expected_seconds <= expected * _ALIKE
        ]
        self._seen.append((expected_seconds, taken))
        if len(alike) >= _PACE_NEEDS and median(alike) > 0:
            return taken / median(alike)
        return taken if self._is_learned else None


class InFlight:
    """Counts texts that were admitted and are neither published nor staged, and remembers the
    highest count.

    Attributes:
        encoded: texts of the whole run that have got their vectors, also in SuperBatches that are
            being encoded.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.texts = 0
        self.most = 0
        self.encoded = 0

    def add(self, texts: int) -> None:
        with self._changed:
            self.texts += texts
            self.most = max(self.most, self.texts)

    def remove(self, texts: int) -> None:
        with self._changed:
            self.texts -= texts
            if not self.texts:
                self._changed.notify_all()

    def wait_until_none(self, stop: StopSignal) -> None:
        """Wait until every text was published or dropped; `Cancelled` when the run is stopping."""
        with self._changed:
            while self.texts:
                stop.require_running()
                self._changed.wait(TURN_SECONDS)


class ExposedIo:
    """Adds up the seconds in which the encoder waits for texts while the reader waits for storage.

    Attributes:
        reader_seconds: in which the reader waits, whatever the encoder does.
    """

    def __init__(self) -> None:
        self.seconds = self.reader_seconds = 0.0
        self._lock = threading.Lock()
        self._waiting: dict[str, float] = {}

    @contextlib.contextmanager
    def waiting(self, stage: Literal["encoder", "reader"]) -> Iterator[None]:
        with self._lock:
            self._waiting[stage] = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                now = time.perf_counter()
                if len(self._waiting) == 2:
                    self.seconds += now - max(self._waiting.values())
                seconds = now - self._waiting.pop(stage)
                self.reader_seconds += seconds if stage == "reader" else 0.0
