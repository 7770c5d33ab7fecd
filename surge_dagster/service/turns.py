"""Turns: the order in which jobs of several runs come to the workers that they share.

The workers get two jobs of runs at a time, one of them ahead, so that none waits. Next is always a job of the run that
has had the least so far, in bytes of text and a constant per row, so that runs get the same, however they cut it into
SuperBatches. Who comes later, or comes back, begins with what the others have had least.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable

from surge_dagster.engine.encoder.dispatcher import Dispatcher
from surge_dagster.engine.encoder.schedule import Job

_AT_A_TIME = 2


class Turns:
    """Hands the jobs of runs to a dispatcher. Several threads may call it."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._lock = threading.Lock()
        self._had = Counter[Hashable]()
        self._waiting: list[tuple[Hashable, Job]] = []
        self._begun: list[tuple[Hashable, Job]] = []

    def add(self, run: Hashable, job: Job) -> None:
        with self._lock:
            others = {other for other, _ in (*self._waiting, *self._begun)}
            if others and run not in others:
                self._had[run] = max(self._had[run], min(self._had[other] for other in others))
            self._waiting.append((run, job))
            self._begin()

    def abandon(self, run: Hashable, job: Job) -> None:
        """As `Dispatcher.abandon`."""
        with self._lock:
            if (run, job) in self._waiting:
                self._waiting.remove((run, job))
                job.abandon()
                job.done.set()
                return
        self.dispatcher.abandon(job)

    def end(self, run: Hashable, job: Job) -> None:
        """Call it once the job is done."""
        with self._lock:
            if (run, job) in self._begun:
                self._begun.remove((run, job))
            self._begin()

    def leave(self, run: Hashable) -> None:
        """Forget a run that adds no more jobs."""
        with self._lock:
            self._had.pop(run, None)

    def _begin(self) -> None:
        while self._waiting and len(self._begun) < _AT_A_TIME:
            run, job = min(self._waiting, key=lambda waiting: self._had[waiting[0]])
            self._waiting.remove((run, job))
            self._begun.append((run, job))
            self._had[run] += int(job.ends[-1])
            self.dispatcher.encode(job)
