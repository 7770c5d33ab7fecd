"""The memory plan of a run: how its limit is divided, and why a run never waits for itself.

    reader   batches from the source, raw and canonical; as much again, if there is room, for rows
             on their way from the staged segments of a partition to its file
    slot     texts and ids of one SuperBatch, B_max of them; twice, since a partition's first rows
             lie in two slots from when they move on until the slot they came from is released
    result   its embeddings, and what its pieces take while they are written: the most that its
             rows and bytes can take, however the partitions divide them
    uploads  parts of those pieces that wait in memory for an object store; nothing on a local disk
    source   the rest: pages of the file that is read, which may hold a whole row group, and the id
             set, eight bytes per row of the partition

Without a configured limit it is half of the memory that the process may use: the other half is for
the model, the interpreter and other processes. Derived thresholds shrink until three SuperBatches
fit three quarters of the limit (docs/tune.md has the formula).

One SuperBatch needs reader + slot + result together. That much is always available to it:
everything beyond belongs to SuperBatches that are further on, or to a file that is being assembled,
and is released without needing more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.parquet import STRING_COPIES, levels_bytes, piece_bytes
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.thresholds import Bounds, Thresholds
from surge_dagster.engine.support.text_hash import HASH_BYTES

SLOTS = 3  # one filling, one encoding, one whose slices storage still holds
_READER_BYTES = 32 * 1024 * 1024
_LEAST_ID_SET_BYTES = 8 * 1024 * 1024
_FIXED_BYTES = _READER_BYTES + _LEAST_ID_SET_BYTES
_SOURCE_SHARE = 0.25
_MACHINE_SHARE = 0.5
_STEPS = 1 << 50  # of the range in which a scale is searched
_LEAST_SHARE = 0.125  # of a SuperBatch that fits once; more calls cost more than idle stages


@dataclass(frozen=True, slots=True)
class ResultMemory:
    """Memory of the results of a SuperBatch and of writing them.

    Attributes:
        threads: files that are written concurrently.
        upload_bytes: memory that the store holds of each of them.
    """

    dimension: int
    itemsize: int
    threads: int
    upload_bytes: int

    @property
    def row_bytes(self) -> int:
        """Memory of a row: embedding, truncation flag, offset and hash of the text, row number."""
        return self.dimension * self.itemsize + 1 + 8 + HASH_BYTES + 4

    @property
    def value_bytes(self) -> int:
        """Memory of writing the embedding of a row."""
        return self.dimension * (levels_bytes(self.itemsize) + 2 * self.itemsize)

    @property
    def book_bytes(self) -> int:
        """Memory of files that are open for writing and have no rows yet."""
        return self.threads * piece_bytes(0, self.dimension, self.itemsize)

    def of_rows(self, rows: int, string_bytes: int) -> int:
        """Return the memory of a SuperBatch from its flush to its release, in addition to its ids
        and texts, which are `string_bytes`."""
        row_bytes = rows * self.row_bytes
        piece = piece_bytes(rows, self.dimension, self.itemsize)
        pieces = min(self.threads * piece, rows * self.value_bytes + self.book_bytes)
        uploads = 0
        if self.upload_bytes:
            # What waits for storage: a part of each file, and of a split partition's last piece.
            content = row_bytes + string_bytes + self.book_bytes + self.upload_bytes
            uploads = min(self.threads * self.upload_bytes, content)
        return row_bytes + pieces + STRING_COPIES * string_bytes + uploads

    def of_superbatch(self, bounds: Bounds) -> int:
        """Return the memory of the largest SuperBatch that the thresholds allow, with its ids and
        texts in two slots."""
        return 2 * bounds.slot_bytes + self.of_rows(bounds.b_max, bounds.b_max_bytes)

    def least(self, bounds: Bounds) -> int:
        """Return the memory of a run in which one SuperBatch is alive at a time."""
        return _FIXED_BYTES + self.of_superbatch(bounds)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Shares of a run's memory, in bytes.

    Attributes:
        source: for the id set and, beyond their part of the reader's share, for pages of the
            source.
    """

    limit: int
    reader: int
    source: int
    result: ResultMemory

    @property
    def reader_pages(self) -> int:
        """The part of the reader's share that is for pages."""
        return self.reader // 2

    @property
    def pages(self) -> int:
        """The most that pages may take, so that a small partition's ids fit too."""
        return self.reader_pages + self.source - _LEAST_ID_SET_BYTES

    def limit_for(self, size: int) -> int:
        """Return a limit under which pages and ids may take `size` bytes."""
        least = self.limit - self.source + _LEAST_ID_SET_BYTES
        return math.ceil(max(size / _SOURCE_SHARE, least / (1 - _SOURCE_SHARE))) + 1


def fit_memory(
    thresholds: Thresholds,
    derived_b_min: int,
    space: Space,
    threads: int,
    limit: int | None,
    *,
    machine_bytes: int,
    upload_bytes: int = 0,
) -> tuple[Bounds, MemoryPlan]:
    """Return the thresholds of a run, and how its memory is divided.

    Derived thresholds shrink until three SuperBatches fit, but not below an eighth of the one that
    fits alone. What cannot shrink in proportion, such as a given B_max or the longest text, leaves
    the others the least that they can be.

    Args:
        derived_b_min: see `Thresholds.resolve`.
        threads, upload_bytes: see `ResultMemory`.
        limit: of resident data, in bytes; None is half of the machine.
        machine_bytes: memory that the process may use.

    Raises:
        ConfigError: the thresholds contradict each other, or one SuperBatch exceeds the limit; the
            text names a limit that works.
    """
    result = ResultMemory(space.dimension, np.dtype(space.dtype).itemsize, threads, upload_bytes)
    share = int(_MACHINE_SHARE * machine_bytes) if limit is None else limit
    scale = 1.0
    available = (1 - _SOURCE_SHARE) * share
    if thresholds.b_max is None:
        size = available - _FIXED_BYTES
        three = _largest_scale(thresholds, derived_b_min, result, size / SLOTS)
        one = _largest_scale(thresholds, derived_b_min, result, size)
        scale = max(three, _LEAST_SHARE * one)
    bounds = thresholds.resolve(derived_b_min, scale)
    if result.least(bounds) > available:
        bounds = thresholds.resolve(derived_b_min, 0.0)
    return bounds, plan_memory(bounds, result, share)


def _largest_scale(
    thresholds: Thresholds, derived_b_min: int, result: ResultMemory, size: float
) -> float:
    """Return the largest scale of the derived thresholds, 0 to 1, whose SuperBatch fits `size`
    bytes."""

    def is_too_large(step: int) -> bool:
        return result.of_superbatch(thresholds.resolve(derived_b_min, step / _STEPS)) > size

    return max(0, bisect_left(range(_STEPS + 1), True, key=is_too_large) - 1) / _STEPS


def plan_memory(bounds: Bounds, result: ResultMemory, limit: int) -> MemoryPlan:
    """Divide a limit.

    Raises:
        ConfigError: the limit cannot hold one SuperBatch; the text names the smallest that can.
    """
    least = result.least(bounds)
    if limit < least:
        raise ConfigError(
            f"One SuperBatch of {bounds.b_max:,} texts and {bounds.b_max_bytes:,} bytes does not "
            f"fit the memory limit of {limit:,} bytes (half of this machine's or container's "
            "memory unless memory_limit_bytes is set): the smallest that works is "
            f"{least:,}. Raise "
            "memory_limit_bytes, or lower b_max (and b_min with it) or max_text_bytes."
        )
    return MemoryPlan(limit, _READER_BYTES, limit - least + _LEAST_ID_SET_BYTES, result)
