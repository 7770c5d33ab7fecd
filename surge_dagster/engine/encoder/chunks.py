"""How a SuperBatch is cut for the workers, and what is known of it while it is under way.

Idle workers pull chunks; nothing is dealt out beforehand, so a slow or lost device costs little. With several workers
a chunk is a share of what is left, in proportion to how fast its worker has been so far: chunks shrink towards the
end, a slow worker gets small ones, and all of them finish together. What a busy worker has not begun moves on to one
that has nothing to do. Each chunk is batched by itself, so it must be
large enough to hold many texts of each length; it is also what a dying worker loses, so it must not be too large.

What a row costs is estimated as its bytes and a constant: close enough to tokens to share out work, and known before
anything is tokenized.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.isolation import FailedRow, Isolation, Suspect

LARGEST_CHUNK_TEXTS = 8_192
LARGEST_CHUNK_WEIGHT = 4 << 20
SMALLEST_CHUNK_WEIGHT = 32 << 10
ROW_WEIGHT = 32
# A worker has one chunk under way and one waiting: together three quarters of its share of what is left.
_CHUNKS_PER_SHARE = 2


@dataclass(slots=True, eq=False)
class Chunk:
    """Rows of a job that one worker encodes at a time.

    Attributes:
        suspect: set when it is to be encoded alone.
        number: of this handing out, new each time.
        asked_back: whether its worker was asked to return it to one that has nothing to do.
    """

    job: Job
    start: int
    stop: int
    suspect: Suspect | None = None
    number: int = -1
    asked_back: bool = False

    @property
    def weight(self) -> int:
        """What it costs, in weighted bytes."""
        return int(self.job.ends[self.stop] - self.job.ends[self.start])


@dataclass(slots=True, eq=False)
class Job:
    """One `encode` call: what is left to hand out, what is under way, and the sums of what came back.

    The dispatcher's thread alone changes it; `done` is set when `error` or the figures are final.

    Attributes:
        borders: first rows of the groups that fail as a whole when one of their texts cannot be encoded.
        encoded: ranges of rows that have their vectors.
        encode_seconds: from the first chunk handed out, or the end of the job before, to the last answer.
    """

    slot: Slot
    borders: np.ndarray | None = None
    rows: int = field(init=False)
    ends: np.ndarray = field(init=False)
    isolation: Isolation = field(init=False)
    next_row: int = 0
    returned: deque[Chunk] = field(default_factory=deque)
    finished_rows: int = 0
    replays: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    encoded: list[tuple[int, int]] = field(default_factory=list)
    begun_at: float | None = None
    encode_seconds: float = 0.0
    gpu_samples: list[tuple[float, int]] = field(default_factory=list)
    abandoned: bool = False
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.rows = len(self.slot)
        self.ends = self.slot.offsets + ROW_WEIGHT * np.arange(self.rows + 1)
        self.isolation = Isolation(self.borders, self.rows)

    @property
    def finished(self) -> bool:
        """Whether every row has its vector or has failed."""
        return self.finished_rows >= self.rows

    @property
    def failed(self) -> tuple[FailedRow, ...]:
        """Texts that ended every worker they met."""
        return tuple(self.isolation.failed)

    def take(self, share: float, workers: int) -> Chunk | None:
        """The next chunk of rows that nobody has begun yet, for a worker with this share of the pool's speed."""
        if self.returned:
            return self.returned.popleft()
        if self.next_row >= self.rows:
            return None
        stop = chunk_end(self.ends, self.next_row, share, workers)
        chunk = Chunk(self, self.next_row, stop)
        self.next_row = stop
        return chunk

    def take_suspect(self) -> Chunk | None:
        """The next chunk that must be encoded alone."""
        suspect, skipped = self.isolation.next()
        self.finished_rows += skipped
        return None if suspect is None else Chunk(self, suspect.start, suspect.stop, suspect)

    def add(self, chunk: Chunk, figures: dict[str, Any]) -> None:
        """Counts a finished chunk."""
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0) + value
        self.finished_rows += chunk.stop - chunk.start
        self.encoded.append((chunk.start, chunk.stop))

    def take_back(self, chunk: Chunk) -> None:
        """A worker has given this chunk back without having begun it."""
        if not self.abandoned:
            chunk.asked_back = False
            self.returned.append(chunk)

    def lose(self, chunk: Chunk, reason: str) -> None:
        """A worker was lost with this chunk."""
        if self.abandoned:
            return
        self.replays += 1
        if chunk.suspect is None:
            self.isolation.accuse(chunk.start, chunk.stop)
        else:
            self.finished_rows += self.isolation.convict(chunk.suspect, reason)

    def abandon(self) -> None:
        """Hands out nothing more."""
        self.abandoned = True
        self.next_row = self.rows
        self.returned.clear()
        self.isolation.clear()


def chunk_end(ends: np.ndarray, start: int, share: float, workers: int) -> int:
    """Where the chunk that begins at row `start` ends.

    Args:
        ends: weight of all rows before each row, int64 [rows + 1].
        share: of the pool's speed that this worker has, in (0, 1].
        workers: in the pool.
    """
    weight = LARGEST_CHUNK_WEIGHT
    if workers > 1:
        fair = float(ends[-1] - ends[start]) * share / _CHUNKS_PER_SHARE
        weight = max(SMALLEST_CHUNK_WEIGHT * min(1.0, share * workers), min(weight, fair))
    stop = int(np.searchsorted(ends, ends[start] + weight, side="right")) - 1
    return min(len(ends) - 1, start + LARGEST_CHUNK_TEXTS, max(stop, start + 1))
