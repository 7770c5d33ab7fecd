"""The memory plan of a run: how its limit is divided, and why a run never waits for itself.

    reader        batches from the source, raw and canonical; as much again, where there is room, for rows on their way
                  from the staged segments of a partition to its file
    slot          texts and ids of one SuperBatch, B_max of them; twice, since a partition's first rows lie in two
                  slots from when they move on until the slot they came from is released
    result        its embeddings, and what its pieces take while they are written: the most that so many rows and bytes
                  can take, however the partitions divide them
    uploads       parts of those pieces that wait in memory for an object store; nothing on a local disk
    source        what is left: pages of the file that is read, which may hold a whole row group, and the id set, eight
                  bytes per row of the partition

Without a configured limit it is half of the memory that the process may use: the other half is for
the model, the interpreter and other processes. Derived thresholds shrink until they fit the limit,
whether it is configured or not.

One SuperBatch needs reader + slot + result together. That much is always available to it:
everything beyond belongs to SuperBatches that are further on, or to a file that is being assembled,
and is released without needing more.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.parquet import STRING_COPIES, levels_bytes, piece_bytes
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.thresholds import Bounds, Thresholds
from surge_dagster.engine.support.text_hash import HASH_BYTES

SLOTS = 3  # one filling, one encoding, one whose slices storage still holds
_READER_BYTES = 32 * 1024 * 1024
_SOURCE_BYTES = 256 * 1024 * 1024
_LEAST_ID_SET_BYTES = 8 * 1024 * 1024
_SOURCE_SHARE = 0.25  # of a limit that derived thresholds are fitted to
_MACHINE_SHARE = 0.5
_TINY = 8  # times smaller than one that fits alone
_SCALES = 1 << 20  # steps in which thresholds are made smaller


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

    def of_rows(self, rows: int, string_bytes: int) -> int:
        """Memory of a SuperBatch from its flush to its release, beside its ids and texts, which are
        `string_bytes`."""
        # The embedding, the truncation flag, the text's offset and hash, and the row's number.
        row = self.dimension * self.itemsize + 1 + 8 + HASH_BYTES + 4
        each = piece_bytes(rows, self.dimension, self.itemsize)
        all_values = rows * self.dimension * (levels_bytes(self.itemsize) + 2 * self.itemsize)
        books = self.threads * piece_bytes(0, self.dimension, self.itemsize)
        pieces = min(self.threads * each, all_values + books) + STRING_COPIES * string_bytes
        # Of what waits for storage: a part of each file, and of a split partition's last piece.
        content = rows * row + string_bytes + books + self.upload_bytes
        uploads = min(self.threads * self.upload_bytes, content) if self.upload_bytes else 0
        return rows * row + pieces + uploads

    def of_superbatch(self, bounds: Bounds) -> int:
        """Memory of the largest SuperBatch that the thresholds allow, with its ids and texts in two
        slots."""
        return 2 * bounds.slot_bytes + self.of_rows(bounds.b_max, bounds.b_max_bytes)

    def least(self, bounds: Bounds) -> int:
        """Memory of a run in which one SuperBatch is alive at a time."""
        return _READER_BYTES + self.of_superbatch(bounds) + _LEAST_ID_SET_BYTES

    def wanted(self, bounds: Bounds) -> int:
        """Memory of a run in which three SuperBatches are alive, which keeps every stage busy."""
        return _READER_BYTES + SLOTS * self.of_superbatch(bounds) + _SOURCE_BYTES


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Shares of a run's memory, in bytes.

    Attributes:
        source: left for the id set and, beyond their part of the reader's share, for pages of the
            source.
        beside_superbatch: left for a stage that the SuperBatch being gathered waits for.
    """

    limit: int
    reader: int
    source: int
    beside_superbatch: int
    result: ResultMemory

    @property
    def reader_pages(self) -> int:
        """The part of the reader's share that is for pages."""
        return self.reader // 2

    @property
    def pages(self) -> int:
        """The most that pages may take, so that a small partition's ids fit beside them."""
        return self.reader_pages + self.source - _LEAST_ID_SET_BYTES

    def limit_for(self, size: int) -> int:
        """A limit under which pages and ids may take so much: derived thresholds that grow with it
        leave its share."""
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
    """The thresholds of a run, and how its memory is divided.

    Args:
        derived_b_min: see `Thresholds.resolve`.
        threads, upload_bytes: see `ResultMemory`.
        limit: of resident data, in bytes; None is what three SuperBatches need, at most half of the
            machine.
        machine_bytes: memory that the process may use.

    Raises:
        ConfigError: the thresholds contradict each other, or one SuperBatch exceeds the limit; the
            text names a limit that works.
    """
    result = ResultMemory(space.dimension, np.dtype(space.dtype).itemsize, threads, upload_bytes)
    share = int(_MACHINE_SHARE * machine_bytes) if limit is None else limit

    def scaled(scale: int) -> Bounds:
        return thresholds.resolve(derived_b_min, scale / _SCALES)

    def largest(needed: Callable[[Bounds], int], available: int) -> int:
        """The largest scale whose needs fit; 0 where none fits."""
        return bisect_right(
            range(1, _SCALES + 1), available, key=lambda scale: needed(scaled(scale))
        )

    scale = largest(result.least, share - int(_SOURCE_SHARE * share)) or largest(
        result.least, share
    )
    if limit is None:
        three = largest(result.wanted, share)
        # Where only tiny SuperBatches fit three times, a large one is better.
        if three and scaled(three).b_max * _TINY >= scaled(scale).b_max:
            scale = three
        if not scale:
            bounds = scaled(_SCALES)
            least = result.least(bounds)
            raise ConfigError(
                f"one SuperBatch of {bounds.b_max:,} texts and {bounds.b_max_bytes:,} bytes takes up to {least:,} "
                "bytes of memory, and a run without memory_limit_bytes may use half of this machine's or container's "
                f"{machine_bytes:,}. Lower b_max (and b_min with it) or max_text_bytes, or set memory_limit_bytes to "
                f"at least {least:,} where the machine has them."
            )
    bounds = scaled(scale)
    return bounds, plan_memory(bounds, result, share)


def plan_memory(bounds: Bounds, result: ResultMemory, limit: int) -> MemoryPlan:
    """Divide a limit.

    Raises:
        ConfigError: the limit cannot hold one SuperBatch; the text names the smallest that can.
    """
    least = result.least(bounds)
    if limit < least:
        raise ConfigError(
            f"a memory limit of {limit:,} bytes cannot hold one SuperBatch of {bounds.b_max:,} texts: "
            f"the smallest that works is {least:,}. Raise memory_limit_bytes, or lower b_max or max_text_bytes."
        )
    # Rows that are gathered may have vectors of an old file already.
    gathered = 2 * bounds.slot_bytes + bounds.b_max * result.dimension * result.itemsize
    return MemoryPlan(
        limit, _READER_BYTES, limit - least + _LEAST_ID_SET_BYTES, limit - gathered, result
    )
