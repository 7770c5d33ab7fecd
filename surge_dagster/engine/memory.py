"""The memory plan of a run: how its limit is divided, and why a run never waits for itself.

    reader        batches from the source, raw and canonical; as much again, where there is room, for rows on their way
                  from the staged segments of a partition to its file
    slot          texts and ids of one SuperBatch, B_max of them; twice, since a partition's first rows lie in two
                  slots from when they move on until the slot they came from is released
    result        its embeddings, and what its largest pieces take while they are written
    uploads       parts of those pieces that wait in memory for an object store; nothing on a local disk
    id set        eight bytes per row of the partition being read

Without a configured limit it is what three SuperBatches need, and at most half of the memory that the process may use:
the other half is for the model, the interpreter and other processes. Derived thresholds shrink until they fit the
limit, whether it is set or not.

One SuperBatch needs reader + slot + result together. That much is always available to it: everything beyond belongs to
SuperBatches that are further on, or to a file that is being assembled, and is released without needing more. Lemma 3 of
the SURGE paper counts texts and embeddings of one SuperBatch; this plan counts all that are alive, and the buffers that
carry them in and out.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.parquet import PAGE_BYTES, STRING_COPIES, levels_bytes, page_window_bytes, piece_bytes
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.superbatch import Segment, SuperBatch
from surge_dagster.engine.support.columns import value_offsets
from surge_dagster.engine.thresholds import PARTITION_OVERHEAD_BYTES, Bounds, Thresholds

SLOTS = 3  # one filling, one encoding, one whose slices storage still holds
_READER_BYTES = 32 * 1024 * 1024
_ID_SET_BYTES = 256 * 1024 * 1024
_LEAST_ID_SET_BYTES = 8 * 1024 * 1024
_MACHINE_SHARE = 0.5
_TINY = 8  # times smaller than one that fits alone
_SCALES = 1 << 20  # steps in which thresholds are made smaller


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Shares of a run's memory, in bytes.

    Attributes:
        row: an embedding, its truncation flag and its text's offset.
        beside_superbatch: left for a stage that the SuperBatch being gathered waits for.
        keep_pages: whether released slots keep the memory they touched; not where three full ones exceed the limit.
        threads: files that are written concurrently.
        upload_bytes: memory that the store holds of each of them.
    """

    limit: int
    slots: int
    reader: int
    id_set: int
    row: int
    beside_superbatch: int
    keep_pages: bool
    threads: int = 0
    upload_bytes: int = 0

    def result_bytes(self, rows: int, pieces: int, text_bytes: int = 0) -> int:
        """Memory of a SuperBatch from its flush to its release, beside its ids and texts (`text_bytes`)."""
        return rows * self.row + pieces + _uploads(rows * self.row + text_bytes, self.threads, self.upload_bytes)


def fit_memory(
    thresholds: Thresholds,
    texts_per_second: float,
    space: Space,
    threads: int,
    limit: int | None,
    *,
    machine_bytes: int,
    upload_bytes: int = 0,
) -> tuple[Bounds, MemoryPlan]:
    """The thresholds of a run, and how its memory is divided.

    Args:
        texts_per_second, threads, upload_bytes: see `Thresholds.resolve` and `plan_memory`.
        limit: of resident data, in bytes; None is what three SuperBatches need, at most half of the machine.
        machine_bytes: memory that the process may use.

    Raises:
        ConfigError: the thresholds contradict each other, or one SuperBatch exceeds the limit; the text names values
            that work.
    """
    bounds = thresholds.resolve(texts_per_second)
    share = int(_MACHINE_SHARE * machine_bytes) if limit is None else limit

    def least(bounds: Bounds) -> int:
        return _least_and_wanted(bounds, space, threads, upload_bytes)[0]

    def wanted(bounds: Bounds) -> int:
        return _least_and_wanted(bounds, space, threads, upload_bytes)[1]

    def scaled(scale: int) -> Bounds:
        return thresholds.resolve(texts_per_second, scale / _SCALES)

    if limit is not None:
        bounds = scaled(_most(limit, lambda scale: least(scaled(scale))))
        return bounds, plan_memory(bounds, space, threads, limit, upload_bytes)
    # Three SuperBatches keep every stage busy. Where only tiny ones fit three times, a large one is better.
    three, one = (_most(share, lambda scale, needed=needed: needed(scaled(scale))) for needed in (wanted, least))
    if three and scaled(three).b_max * _TINY >= scaled(one).b_max:
        return scaled(three), plan_memory(scaled(three), space, threads, None, upload_bytes)
    if one:
        return scaled(one), plan_memory(scaled(one), space, threads, share, upload_bytes)
    works = _smaller_thresholds(thresholds, share, lambda smaller: least(smaller.resolve(texts_per_second, 0)))
    advice = f"What works is {works}; or set" if works else "Set"
    raise ConfigError(
        f"one SuperBatch of {bounds.b_max:,} texts and {bounds.b_max_bytes:,} bytes takes up to {least(bounds):,} "
        f"bytes of memory, and a run without memory_limit_bytes may use half of this machine's or container's "
        f"{machine_bytes:,}. {advice} memory_limit_bytes to at least {least(bounds):,} where the machine has them."
    )


def _smaller_thresholds(thresholds: Thresholds, share: int, needed: Callable[[Thresholds], int]) -> str:
    """Values of the given thresholds that fit a share, of those in texts or of all; empty where none fit."""

    def smaller(names: Iterable[str], scale: int) -> dict[str, int]:
        given = {name: getattr(thresholds, name) for name in names}
        lowest = {"b_max_bytes": PARTITION_OVERHEAD_BYTES + 1}
        return {
            name: max(lowest.get(name, 1), value * scale // _SCALES)
            for name, value in given.items()
            if value is not None
        }

    for names in (("b_min", "b_max"), ("b_min", "b_max", "b_min_bytes", "b_max_bytes")):
        scale = _most(share, lambda scale, names=names: needed(replace(thresholds, **smaller(names, scale))))
        if scale:
            return ", ".join(f"{name} {value:,}" for name, value in smaller(names, scale).items())
    return ""


def _most(share: int, needed: Callable[[int], int]) -> int:
    """The largest scale, at most `_SCALES`, whose needs fit a share; 0 where none fits."""
    return bisect_right(range(1, _SCALES + 1), share, key=needed)


def plan_memory(bounds: Bounds, space: Space, threads: int, limit: int | None, upload_bytes: int = 0) -> MemoryPlan:
    """Divide a limit, or derive one for three SuperBatches that are alive concurrently.

    Args:
        threads: files that are written concurrently.
        upload_bytes: memory that the store holds of each of them.

    Raises:
        ConfigError: the limit cannot hold one SuperBatch; the text names the smallest that can.
    """
    row = _row_bytes(space)
    least, wanted = _least_and_wanted(bounds, space, threads, upload_bytes)
    gathered = 2 * (bounds.b_max_bytes + PARTITION_OVERHEAD_BYTES)
    if limit is None:
        return MemoryPlan(
            wanted, SLOTS, _READER_BYTES, _ID_SET_BYTES, row, wanted - gathered, True, threads, upload_bytes
        )
    if limit < least:
        raise ConfigError(
            f"a memory limit of {limit:,} bytes cannot hold one SuperBatch of {bounds.b_max:,} texts: "
            f"the smallest that works is {least:,}. Raise memory_limit_bytes, or lower b_max or max_text_bytes."
        )
    id_set = limit - least + _LEAST_ID_SET_BYTES
    return MemoryPlan(
        limit, SLOTS, _READER_BYTES, id_set, row, limit - gathered, limit >= wanted, threads, upload_bytes
    )


def _row_bytes(space: Space) -> int:
    return space.dimension * np.dtype(space.dtype).itemsize + 1 + 8


def _least_and_wanted(bounds: Bounds, space: Space, threads: int, upload_bytes: int) -> tuple[int, int]:
    """Bytes that one SuperBatch needs, and three."""
    itemsize = np.dtype(space.dtype).itemsize
    row = _row_bytes(space)
    superbatch = (
        2 * (bounds.b_max_bytes + PARTITION_OVERHEAD_BYTES)
        + bounds.b_max * row
        + _pieces(bounds, space.dimension, itemsize, threads)
        + _uploads(bounds.b_max * row + bounds.b_max_bytes, threads, upload_bytes)
    )
    return _READER_BYTES + superbatch + _LEAST_ID_SET_BYTES, _READER_BYTES + SLOTS * superbatch + _ID_SET_BYTES


def _pieces(bounds: Bounds, dimension: int, itemsize: int, threads: int) -> int:
    """Upper bound of `largest_pieces`: together the pieces have B_max rows and bytes."""
    each = piece_bytes(bounds.b_max, dimension, itemsize, 0)
    all_values = bounds.b_max * dimension * (levels_bytes(itemsize) + 2 * itemsize)
    books = threads * piece_bytes(0, dimension, itemsize, 0)
    return min(threads * each, all_values + books) + STRING_COPIES * bounds.b_max_bytes


def largest_pieces(batch: SuperBatch, space: Space, threads: int) -> int:
    """Memory that writing a SuperBatch can take: that of its `threads` largest pieces, in bytes."""
    itemsize = np.dtype(space.dtype).itemsize
    segments, offsets = batch.segments, batch.slot.offsets
    starts = np.array([segment.start for segment in segments])
    stops = np.array([segment.stop for segment in segments])
    rows, text_bytes = (stops - starts).tolist(), (offsets[stops] - offsets[starts]).tolist()
    strings = [_widest_strings(segment, size, offsets) for segment, size in zip(segments, text_bytes, strict=True)]
    # More rows and longer strings both take more memory: the largest pieces are among those with the most of either.
    most = {place for sizes in (rows, strings) for place in np.argsort(sizes)[-threads:].tolist()}
    largest = heapq.nlargest(
        threads, (piece_bytes(rows[place], space.dimension, itemsize, strings[place]) for place in most)
    )
    return sum(largest)


def _widest_strings(segment: Segment, text_bytes: int, offsets: np.ndarray) -> int:
    """The larger `page_window_bytes` of a segment's texts and its ids; `offsets` are those of the slot."""
    id_bytes = segment.id_bytes
    if id_bytes is None or id_bytes > PAGE_BYTES:
        ids = [value_offsets(part) for part in segment.ids if not pa.types.is_int64(part.type)]
        id_bytes = _window(ids)
    texts = text_bytes if text_bytes <= PAGE_BYTES else _window([offsets[segment.start : segment.stop + 1]])
    return max(texts, id_bytes)


def _window(columns: list[np.ndarray]) -> int:
    """`page_window_bytes` of strings in several columns, given by their offsets."""
    total = sum(int(offsets[-1] - offsets[0]) for offsets in columns)
    if page_window_bytes(total, 0) == total:
        return total  # the usual case, where the longest string does not matter
    return page_window_bytes(total, max(int(np.diff(offsets).max(initial=0)) for offsets in columns))


def _uploads(content: int, threads: int, upload_bytes: int) -> int:
    """Bytes that wait for storage of pieces with `content` bytes together, and of a split partition's last piece."""
    if not upload_bytes:
        return 0
    books = threads * piece_bytes(0, 1, 1, 0)
    return min(threads * upload_bytes, content + books + upload_bytes)
