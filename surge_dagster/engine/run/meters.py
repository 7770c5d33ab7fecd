"""What a run measures of itself while it goes on: pace, texts in flight, and the encoder's waits for storage."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Literal

from surge_dagster.engine.support.waiting import TURN_SECONDS, StopSignal

_PACE_NEEDS = 3  # SuperBatches


class Pace:
    """Compares each SuperBatch's seconds per token with the running average of those before it.

    A device that throttles, or that another process uses, shows here long before the run is late.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0
        self._seen = 0

    def ratio(self, tokens: int, seconds: float) -> float | None:
        """Seconds per token of this SuperBatch over the average; None for the first few."""
        if not tokens:
            return None
        is_known = self._seen >= _PACE_NEEDS and self._seconds > 0
        ratio = seconds / tokens * self._tokens / self._seconds if is_known else None
        self._seen += 1
        self._tokens += tokens
        self._seconds += seconds
        return ratio


class InFlight:
    """Counts texts that were admitted and are neither published nor staged, and remembers the highest count.

    Attributes:
        encoded: texts of the whole run that have got their vectors, also in SuperBatches that are being encoded.
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
