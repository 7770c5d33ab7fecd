"""Measures every strategy from outside of it: encode calls and memory; `stores` notes the files.

- Encode calls: from the submission of a call, or the end of the one before, until its vectors are
  there.
- Memory: pages of this process that belong to no file, and those of the arenas, which it shares
  with its workers, sampled every 20 ms. The workers' own memory, which has the model, does not
  count.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from surge_dagster import EncoderPool
from surge_dagster.engine.encoder.arena import Arena, Slot
from surge_dagster.engine.encoder.schedule import EncodeCall, EncodeMetrics

_SAMPLE_SECONDS = 0.02
_BLOCK_BYTES = 512

Span = tuple[float, float]


class Meter:
    """The measurement of one strategy, from entering to leaving the block.

    Attributes:
        begun: when the block was entered.
        calls: when each encode call began and ended.
        call_texts: texts of each call.
    """

    def __init__(self) -> None:
        self.begun = 0.0
        self.calls: list[Span] = []
        self.call_texts: list[int] = []
        # descriptor and inode, as descriptors are used again
        self._arenas: list[tuple[int, int]] = []
        self._start_bytes = 0
        self._peak_bytes = 0
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="memory-samples", daemon=True)

    def __enter__(self) -> Meter:
        self._start_bytes = self._held_bytes()
        self.begun = time.perf_counter()
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._sampler.join()

    @property
    def grown_bytes(self) -> int:
        """Return the most memory above the start."""
        return max(0, self._peak_bytes - self._start_bytes)

    def add_call(self, begun: float, texts: int) -> None:
        """Enter an encode call that ended now."""
        if self.calls:
            begun = max(begun, self.calls[-1][1])
        self.calls.append((begun, time.perf_counter()))
        self.call_texts.append(texts)

    def add_arena(self, arena: Arena) -> None:
        """Count the memory of an arena."""
        self._arenas.append((arena.fd, os.fstat(arena.fd).st_ino))

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._peak_bytes = max(self._peak_bytes, self._held_bytes())

    def _held_bytes(self) -> int:
        status = Path("/proc/self/status").read_text()
        held = int(status.partition("RssAnon:")[2].split()[0]) * 1024
        for descriptor, inode in tuple(self._arenas):
            with contextlib.suppress(OSError):  # it was closed
                facts = os.fstat(descriptor)
                if facts.st_ino == inode:
                    held += facts.st_blocks * _BLOCK_BYTES
        return held


class MeteredPool:
    """A pool whose calls and arenas are measured."""

    def __init__(self, pool: EncoderPool, meter: Meter) -> None:
        self._pool = pool
        self._meter = meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def arena(self, **options: Any) -> Arena:
        arena = self._pool.arena(**options)
        self._meter.add_arena(arena)
        return arena

    def submit(self, slot: Slot, *arrays: Any) -> _MeteredCall:
        begun = time.perf_counter()
        texts = len(slot)
        return _MeteredCall(self._pool.submit(slot, *arrays), self._meter, begun, texts)


class _MeteredCall:
    def __init__(self, call: EncodeCall, meter: Meter, begun: float, texts: int) -> None:
        self._call = call
        self._meter: Meter | None = meter
        self._begun = begun
        self._texts = texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def result(self, timeout_seconds: float | None = None) -> EncodeMetrics | None:
        metrics = self._call.result(timeout_seconds)
        if metrics is not None and self._meter is not None:
            self._meter.add_call(self._begun, self._texts)
            self._meter = None
        return metrics


def covered(spans: Iterable[Span]) -> float:
    """Return the seconds that are covered by these spans, however they overlap."""
    seconds = 0.0
    end = -math.inf
    for begun, ended in sorted(spans):
        if ended > end:
            seconds += ended - max(begun, end)
            end = ended
    return seconds
