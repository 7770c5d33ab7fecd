"""One encode call: what its caller waits for (EncodeCall, EncodeMetrics) and how its rows are shared out (Job, Chunk).

Idle workers pull chunks; nothing is assigned in advance, so a slow or lost device costs little. With several workers a
chunk is a share of the remaining rows, in proportion to the worker's speed so far: chunks shrink towards the end, a
slow worker gets small ones, and all workers finish together. A chunk that a busy worker has not begun moves to an idle
worker. Each chunk is batched by itself, so it must hold many texts of each length; it is also what a dying worker
loses, so it must not be too large.

The weight of a row is its bytes plus a constant: close enough to tokens to share out work, and known before anything is
tokenized.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.quarantine import FailedRow, Quarantine, QuarantinedRows
from surge_dagster.engine.support.waiting import wait_in_turns

LARGEST_CHUNK_TEXTS = 8_192
LARGEST_CHUNK_WEIGHT = 4 << 20
SMALLEST_CHUNK_WEIGHT = 32 << 10
ROW_WEIGHT = 32
# A worker has one chunk under way and one waiting: together three quarters of its share of the remaining rows.
_CHUNKS_PER_SHARE = 2


@dataclass(frozen=True, slots=True)
class EncodeMetrics:
    """The costs of one encode call.

    Attributes:
        texts: rows of the call.
        tokens: tokens of these rows, after truncation.
        padded_tokens: computed tokens, padding included.
        truncated: rows that were longer than the model reads.
        encode_seconds: from the first assigned chunk, or the end of the call before, to the last answer.
        tokenize_seconds, forward_seconds: summed over workers.
        copy_seconds: copies between host and device and into place, summed over workers; part of forward_seconds.
        workers: number of workers of the pool.
        replays: chunks that were encoded again because their worker was lost.
        failed: texts that ended every worker that encoded them, one of each group (see `EncoderPool.submit`).
        gpu_utilisation: mean over devices and time, 0 to 1; None where nothing measures it.
        gpu_memory_bytes: maximum in use on all devices together; None where nothing measures it.
    """

    texts: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    truncated: int = 0
    encode_seconds: float = 0.0
    tokenize_seconds: float = 0.0
    forward_seconds: float = 0.0
    copy_seconds: float = 0.0
    workers: int = 1
    replays: int = 0
    failed: tuple[FailedRow, ...] = ()
    gpu_utilisation: float | None = None
    gpu_memory_bytes: int | None = None


class EncodeCall:
    """The caller's view of a call under way. Made by `EncoderPool.submit`."""

    def __init__(self, job: Job, workers: int, abandon: Callable[[Job], None]) -> None:
        self._job = job
        self._workers = workers
        self._abandon = abandon

    def result(self, timeout_seconds: float | None = None) -> EncodeMetrics | None:
        """Waits for the end of the call; None after the timeout. Can be called again.

        Raises:
            EncoderError: the pool failed; the message holds the last output of the failed worker.
        """
        if not wait_in_turns(self._job.done.wait, timeout_seconds):
            return None
        if self._job.error is not None:
            raise copy_of(self._job.error)
        return self.metrics

    def abandon(self) -> None:
        """Ends the call without encoding further rows; `encoded` lists the rows that have vectors.

        Rows that a worker has begun are finished, and keep the slot from being used again until then, but this method
        does not wait for them.
        """
        self._abandon(self._job)
        wait_in_turns(self._job.done.wait)

    @property
    def encoded(self) -> list[tuple[int, int]]:
        """Ranges of rows that have their vectors, ascending, without overlap."""
        return sorted(self._job.encoded)

    @property
    def metrics(self) -> EncodeMetrics:
        """The costs so far."""
        job = self._job
        samples = job.gpu_samples
        return EncodeMetrics(
            texts=job.rows,
            tokens=int(job.sums.get("tokens", 0)),
            padded_tokens=int(job.sums.get("padded_tokens", 0)),
            truncated=int(job.sums.get("truncated", 0)),
            encode_seconds=job.encode_seconds,
            tokenize_seconds=job.sums.get("tokenize_seconds", 0.0),
            forward_seconds=job.sums.get("forward_seconds", 0.0),
            copy_seconds=job.sums.get("copy_seconds", 0.0),
            workers=self._workers,
            replays=job.replays,
            failed=tuple(job.quarantine.failed),
            gpu_utilisation=sum(rate for rate, _ in samples) / len(samples) if samples else None,
            gpu_memory_bytes=max(used for _, used in samples) if samples else None,
        )


@dataclass(slots=True, eq=False)
class Chunk:
    """Rows of a job that one worker encodes together.

    Attributes:
        quarantined: set when the chunk must be encoded alone.
        number: identifies one assignment to a worker; each assignment gets a new one.
        asked_back: whether its worker was asked to return it for an idle worker.
    """

    job: Job
    start: int
    stop: int
    quarantined: QuarantinedRows | None = None
    number: int = -1
    asked_back: bool = False

    @property
    def weight(self) -> int:
        """Estimated cost, in weighted bytes."""
        return int(self.job.ends[self.stop] - self.job.ends[self.start])


@dataclass(slots=True, eq=False)
class Job:
    """The state of one encode call: rows that are not assigned, rows under way, and the sums of the finished chunks.

    Only the dispatcher's thread changes it; `done` is set when `error` or the sums are final.

    Attributes:
        borders: first rows of the groups that fail as a whole when one of their texts cannot be encoded.
        encoded: ranges of rows that have their vectors.
        sums: metrics of finished chunks, added up by name.
        encode_seconds: from the first assigned chunk, or the end of the job before, to the last answer.
        gpu_samples: utilisation (0 to 1) and used bytes, sampled while this job was the oldest.
    """

    slot: Slot
    borders: np.ndarray | None = None
    rows: int = field(init=False)
    ends: np.ndarray = field(init=False)
    quarantine: Quarantine = field(init=False)
    next_row: int = 0
    returned: deque[Chunk] = field(default_factory=deque)
    finished_rows: int = 0
    replays: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    encoded: list[tuple[int, int]] = field(default_factory=list)
    started_at: float | None = None
    encode_seconds: float = 0.0
    gpu_samples: list[tuple[float, int]] = field(default_factory=list)
    abandoned: bool = False
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.rows = len(self.slot)
        self.ends = self.slot.offsets + ROW_WEIGHT * np.arange(self.rows + 1)
        self.quarantine = Quarantine(self.borders, self.rows)

    @property
    def finished(self) -> bool:
        """Whether every row has its vector or has failed."""
        return self.finished_rows >= self.rows

    def take(self, share: float, workers: int) -> Chunk | None:
        """The next unassigned rows, for a worker with this share of the pool's speed; None when none are left."""
        if self.returned:
            return self.returned.popleft()
        if self.next_row >= self.rows:
            return None
        stop = chunk_end(self.ends, self.next_row, share, workers)
        chunk = Chunk(self, self.next_row, stop)
        self.next_row = stop
        return chunk

    def take_quarantined(self) -> Chunk | None:
        """The next chunk that must be encoded alone."""
        rows, skipped = self.quarantine.next()
        self.finished_rows += skipped
        return None if rows is None else Chunk(self, rows.start, rows.stop, rows)

    def add(self, chunk: Chunk, metrics: dict[str, Any]) -> None:
        """Counts a finished chunk."""
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, 0) + value
        self.finished_rows += chunk.stop - chunk.start
        self.encoded.append((chunk.start, chunk.stop))

    def take_back(self, chunk: Chunk) -> None:
        """Accepts a chunk that a worker returned without beginning it."""
        if not self.abandoned:
            chunk.asked_back = False
            self.returned.append(chunk)

    def lose(self, chunk: Chunk, reason: str) -> None:
        """Records that a worker was lost with this chunk, and quarantines its rows."""
        if self.abandoned:
            return
        self.replays += 1
        if chunk.quarantined is None:
            self.quarantine.add(chunk.start, chunk.stop)
        else:
            self.finished_rows += self.quarantine.bisect(chunk.quarantined, reason)

    def abandon(self) -> None:
        """Drops all rows that are not assigned."""
        self.abandoned = True
        self.next_row = self.rows
        self.returned.clear()
        self.quarantine.clear()


def chunk_end(ends: np.ndarray, start: int, share: float, workers: int) -> int:
    """The end of the chunk that begins at row `start`.

    Args:
        ends: total weight of the rows before each row, int64 [rows + 1].
        share: of the pool's speed that this worker has, in (0, 1].
        workers: in the pool.
    """
    weight = LARGEST_CHUNK_WEIGHT
    if workers > 1:
        fair = float(ends[-1] - ends[start]) * share / _CHUNKS_PER_SHARE
        weight = max(SMALLEST_CHUNK_WEIGHT * min(1.0, share * workers), min(weight, fair))
    stop = int(np.searchsorted(ends, ends[start] + weight, side="right")) - 1
    return min(len(ends) - 1, start + LARGEST_CHUNK_TEXTS, max(stop, start + 1))


def copy_of(error: Exception) -> Exception:
    """The same error as a new object: several threads may raise it, and each adds its own traceback."""
    return type(error)(str(error))
