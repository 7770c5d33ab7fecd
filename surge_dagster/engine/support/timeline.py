"""When a stage of a run worked."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """When a stage worked on something, in seconds since the run began."""

    begun: float
    ended: float


@dataclass(slots=True)
class Lane:
    """Seconds that threads spend on one step, and the span of `time.perf_counter` they cover; the
    caller locks."""

    seconds: float = 0.0
    begun: float = math.inf
    ended: float = -math.inf

    def add(self, begun: float, ended: float) -> None:
        self.seconds += ended - begun
        self.begun = min(self.begun, begun)
        self.ended = max(self.ended, ended)

    def span(self, run_begun: float) -> Span | None:
        """Return the span in seconds since `run_begun`; None without any work."""
        if self.ended <= self.begun:
            return None
        return Span(self.begun - run_begun, self.ended - run_begun)
