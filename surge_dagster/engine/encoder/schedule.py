"""The schedule of a pool: which chunk each worker gets next, from the speeds of the workers and the order of the jobs.

Chunks come from the oldest job that has work; the next job's rows follow at once, so no worker waits between them. The
schedule belongs to the dispatcher's thread and does no input or output.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable

from surge_dagster.engine.encoder.calls import SMALLEST_CHUNK_WEIGHT, Chunk, Job
from surge_dagster.engine.encoder.worker_process import WorkerProcess, WorkerSeat

# The share of its last chunk in a worker's speed.
_NEWEST_SHARE = 0.5
# The time of a smaller chunk depends on messages more than on the worker's speed.
_SMALLEST_TIMED_WEIGHT = SMALLEST_CHUNK_WEIGHT // 8


class Schedule:
    """The jobs of one pool and the measured speeds of its seats."""

    def __init__(self, seats: list[WorkerSeat]) -> None:
        self._seats = seats
        self._jobs: deque[Job] = deque()
        self._rates: dict[int, float] = {}  # weight per second of each seat that has finished a chunk
        self._numbers = itertools.count()

    @property
    def jobs(self) -> list[Job]:
        """Jobs that have not ended, oldest first."""
        return list(self._jobs)

    def add(self, job: Job) -> None:
        """Appends a job."""
        self._jobs.append(job)

    def next_chunk(self, worker: WorkerProcess) -> Chunk | None:
        """The chunk to send to a worker next, with a new number; None when there is none for it."""
        chunk = self._choose(worker)
        if chunk is not None:
            chunk.number = next(self._numbers)
            if chunk.job.started_at is None:
                chunk.job.started_at = time.monotonic()
        return chunk

    def _choose(self, worker: WorkerProcess) -> Chunk | None:
        if worker.assigned and worker.assigned[0].quarantined is not None:
            return None
        for job in self.jobs:
            if not worker.assigned and job.quarantine:
                chunk = job.take_quarantined()
                self.end_if_finished(job)  # all quarantined rows may belong to failed groups
                if chunk is not None:
                    return chunk
            if (chunk := job.take(self._share(worker), len(self._seats))) is not None:
                return chunk
        return None

    def chunk_to_move(self, workers: Iterable[WorkerProcess]) -> tuple[WorkerProcess, Chunk] | None:
        """The waiting chunk that an idle worker should take over: that of the worker with the most work left."""
        waiting = [
            (worker.assigned[1].weight / self._share(worker), worker)
            for worker in workers
            if len(worker.assigned) > 1 and not worker.assigned[1].asked_back
        ]
        if not waiting:
            return None
        _, busiest = max(waiting, key=lambda found: found[0])
        return busiest, busiest.assigned[1]

    def measure(self, worker: WorkerProcess, chunk: Chunk) -> None:
        """Updates the speed of a worker that has just finished a chunk."""
        now = time.monotonic()
        if chunk.weight >= _SMALLEST_TIMED_WEIGHT:
            seat = worker.seat.index
            rate = chunk.weight / max(now - worker.first_chunk_at, 1e-6)
            self._rates[seat] = _NEWEST_SHARE * rate + (1 - _NEWEST_SHARE) * self._rates.get(seat, rate)
        worker.first_chunk_at = now

    def expected_seconds(self, worker: WorkerProcess) -> float:
        """How long the worker's current chunk should take; 0 while its speed is unknown."""
        rate = self._rates.get(worker.seat.index)
        return worker.assigned[0].weight / rate if rate and worker.assigned else 0.0

    def end_if_finished(self, job: Job) -> None:
        """Ends a job whose rows all have vectors or have failed."""
        if job.finished and not job.done.is_set():
            self.end(job)

    def end(self, job: Job, error: Exception | None = None) -> None:
        """Ends a job; from now on time counts for the jobs that came after it."""
        if job not in self._jobs:
            return
        job.error = error
        now = time.monotonic()
        if job.started_at is not None:
            job.encode_seconds = now - job.started_at
        place = self._jobs.index(job)
        for later in itertools.islice(self._jobs, place + 1, None):
            if later.started_at is not None:
                later.started_at = now
        del self._jobs[place]
        job.done.set()

    def _share(self, worker: WorkerProcess) -> float:
        """The worker's share of the pool's speed so far; equal shares while speeds are unknown."""
        known = list(self._rates.values())
        typical = sum(known) / len(known) if known else 1.0
        total = sum(self._rates.get(seat.index, typical) for seat in self._seats)
        return self._rates.get(worker.seat.index, typical) / total
