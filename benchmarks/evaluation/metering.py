"""What every strategy is measured by: encode calls, files, and memory, seen from outside of the strategy.

- Encode calls: from the submission of a call, or the end of the one before, until its vectors are there.
- Files: from the beginning of each file until it stands at its final name.
- Memory: pages of this process that belong to no file, and those of the arenas, which it shares with its workers,
  sampled every 20 ms. The workers' own memory, where the model is, does not count.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from benchmarks.evaluation.baselines import TextEncoder
from benchmarks.storage_profiles import UploadFront
from surge_dagster.engine.encoder.arena import Arena, Slot
from surge_dagster.engine.encoder.calls import EncodeCall, EncodeMetrics
from surge_dagster.engine.encoder.metrics import overlap_ratio
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files.formats import format_of
from surge_dagster.engine.store.local_upload import is_hidden
from surge_dagster.engine.store.store import Store, StoredObject, Upload

_SAMPLE_SECONDS = 0.02
_BLOCK_BYTES = 512

Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a strategy did and took.

    Attributes:
        calls: encode calls.
        wall_seconds: from a pool that is ready to the last file.
        duty: share of the wall time in which an encode call was running.
        time_to_first_output_seconds: until the first file stood at its final name.
        peak_rss_bytes: most memory above the start, as the top of this module says.
        exposed_io_seconds: in which files were written and no encode call was running, `tail_seconds` included.
        tail_seconds: after the last encode call.
        encode_seconds: in which an encode call was running.
        io_seconds: in which a file was being written, whatever else was going on.
        largest_superbatch_texts: of one encode call.
    """

    texts: int
    partitions: int
    calls: int
    wall_seconds: float
    duty: float
    time_to_first_output_seconds: float
    peak_rss_bytes: int
    exposed_io_seconds: float
    tail_seconds: float
    encode_seconds: float
    io_seconds: float
    largest_superbatch_texts: int

    @property
    def texts_per_second(self) -> float:
        return self.texts / self.wall_seconds

    @property
    def overlap_ratio(self) -> float:
        """The paper's rho (equation 4), of all calls and files together."""
        return overlap_ratio(self.io_seconds, self.encode_seconds)


class Meter:
    """Measures one strategy, from entering to leaving the block."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float]] = []
        self.call_texts: list[int] = []
        self.files: list[tuple[float, float]] = []
        self.published: list[float] = []
        self.arenas: list[tuple[int, int]] = []  # descriptor and inode, as descriptors are used again
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="memory-samples", daemon=True)

    def __enter__(self) -> Meter:
        self._start_bytes = self._held_bytes()
        self._begun = time.perf_counter()
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._sampler.join()

    @property
    def grown_bytes(self) -> int:
        """The most memory above the start."""
        return max(0, self.peak_bytes - self._start_bytes)

    def outcome(self) -> Outcome:
        """What was measured, after the block."""
        calls, files = union(self.calls), union(self.files)
        ended = max(self.published)
        encode_seconds, io_seconds = covered(calls), covered(files)
        wall_seconds = ended - self._begun
        return Outcome(
            texts=sum(self.call_texts),
            partitions=len(self.published),
            calls=len(self.calls),
            wall_seconds=wall_seconds,
            duty=encode_seconds / wall_seconds,
            time_to_first_output_seconds=min(self.published) - self._begun,
            peak_rss_bytes=self.grown_bytes,
            exposed_io_seconds=covered(union([*calls, *files])) - encode_seconds,
            tail_seconds=max(0.0, ended - calls[-1][1]) if calls else wall_seconds,
            encode_seconds=encode_seconds,
            io_seconds=io_seconds,
            largest_superbatch_texts=max(self.call_texts, default=0),
        )

    @contextlib.contextmanager
    def watching(self, store: Store) -> Iterator[None]:
        """Measure the files that are created in a store meanwhile."""
        create = store.create
        with patch.object(store, "create", lambda name: _MeteredUpload(create(name), self)):
            yield

    def add_call(self, begun: float, texts: int) -> None:
        """Enter an encode call that ended now."""
        self.calls.append((max(begun, self.calls[-1][1] if self.calls else begun), time.perf_counter()))
        self.call_texts.append(texts)

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, self._held_bytes())

    def _held_bytes(self) -> int:
        held = int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024
        for descriptor, inode in tuple(self.arenas):
            with contextlib.suppress(OSError):  # it was closed
                status = os.fstat(descriptor)
                held += status.st_blocks * _BLOCK_BYTES if status.st_ino == inode else 0
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
        self._meter.arenas.append((arena.fd, os.fstat(arena.fd).st_ino))
        return arena

    def submit(self, slot: Slot, borders: np.ndarray | None = None, rows: np.ndarray | None = None) -> _MeteredCall:
        begun, texts = time.perf_counter(), len(slot)
        return _MeteredCall(self._pool.submit(slot, borders, rows), self._meter, begun, texts)


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


class MeteredTexts:
    """An encoder of texts whose calls are measured."""

    def __init__(self, encoder: TextEncoder, meter: Meter) -> None:
        self.space = encoder.space
        self.precision = encoder.precision
        self.workers = encoder.workers
        self._encoder = encoder
        self._meter = meter

    def encode(self, texts: pa.LargeStringArray) -> np.ndarray:
        begun = time.perf_counter()
        vectors = self._encoder.encode(texts)
        self._meter.add_call(begun, len(texts))
        return vectors


class _MeteredUpload(UploadFront):
    def __init__(self, upload: Upload, meter: Meter) -> None:
        super().__init__(upload)
        self._meter = meter
        self._begun = time.perf_counter()

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        stored = super().publish(still_wanted)
        now = time.perf_counter()
        self._meter.files.append((self._begun, now))
        if format_of(stored.name) is not None and not is_hidden(stored.name):  # others describe or are parts
            self._meter.published.append(now)
        return stored


def union(spans: Spans) -> list[tuple[float, float]]:
    """Disjoint spans, ascending, that cover the same time."""
    joined: list[tuple[float, float]] = []
    for begun, ended in sorted(spans):
        if joined and begun <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], ended))
        else:
            joined.append((begun, ended))
    return joined


def covered(spans: Spans) -> float:
    """Seconds of disjoint spans."""
    return sum(ended - begun for begun, ended in spans)
