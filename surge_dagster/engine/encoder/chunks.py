"""How a SuperBatch is cut for the workers, and what is known of it while it is under way.

Idle workers pull chunks; nothing is dealt out beforehand, so a slow or lost device costs little. With several workers
the chunks shrink towards the end, so that all of them finish together. Each chunk is batched by itself, so it must be
large enough to hold many texts of each length; it is also what a dying worker loses, so it must not be too large.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from surge_dagster.engine.encoder.arena import Slot

LARGEST_CHUNK_TEXTS = 8_192
LARGEST_CHUNK_BYTES = 4 << 20
SMALLEST_CHUNK_TEXTS = 512
_SHARES_PER_WORKER = 3


@dataclass(slots=True, eq=False)
class Chunk:
    """Rows of a job that one worker encodes at a time, and how often that went wrong."""

    job: Job
    start: int
    stop: int
    failures: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """One `encode` call: what is left to hand out, what is under way, and the sums of what came back.

    The dispatcher's thread alone changes it; `done` is set when `error` or the figures are final.
    """

    slot: Slot
    workers: int
    rows: int = field(init=False)
    next_row: int = 0
    replays: deque[Chunk] = field(default_factory=deque)
    finished_rows: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    abandoned: bool = False
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.rows = len(self.slot)

    def take(self) -> Chunk | None:
        """The next chunk to hand out: one that a worker lost before anything new."""
        if self.replays:
            return self.replays.popleft()
        if self.next_row >= self.rows:
            return None
        stop = chunk_end(self.slot.offsets, self.next_row, self.workers)
        chunk = Chunk(self, self.next_row, stop)
        self.next_row = stop
        return chunk

    def add(self, chunk: Chunk, figures: dict[str, Any]) -> None:
        """Counts a finished chunk."""
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0) + value
        self.finished_rows += chunk.stop - chunk.start

    def abandon(self) -> None:
        """Hands out nothing more."""
        self.abandoned = True
        self.next_row = self.rows
        self.replays.clear()


def chunk_end(offsets: np.ndarray, start: int, workers: int) -> int:
    """Where the chunk that begins at row `start` ends: by texts, by bytes, and by what is left for how many workers."""
    rows = len(offsets) - 1
    size = LARGEST_CHUNK_TEXTS
    if workers > 1:
        share = -(-(rows - start) // (_SHARES_PER_WORKER * workers))
        size = max(SMALLEST_CHUNK_TEXTS, min(size, share))
    by_bytes = int(np.searchsorted(offsets, offsets[start] + LARGEST_CHUNK_BYTES, side="right")) - 1
    return min(rows, start + size, max(by_bytes, start + 1))
