"""How much data a run may hold, and why that is enough for it never to wait for itself.

    reader        batches on their way from the source, raw and canonical
    slot          texts and ids of one SuperBatch, B_max of them
    result        its embeddings, and what its largest pieces take while they are written
    id set        eight bytes per row of the partition being read

One SuperBatch needs reader + slot + result at once; that much is always available to it, because everything beyond
belongs to SuperBatches that are further on and give it back without needing more. Lemma 3 of the SURGE paper counts
texts and embeddings of one SuperBatch; this counts every one that is alive, and what carries them in and out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.output.embedding_file import piece_bytes
from surge_dagster.engine.superbatch import Bounds

SLOTS = 3  # one filling, one encoding, one whose slices storage still holds
_READER_BYTES = 32 * 1024 * 1024
_ID_SET_BYTES = 256 * 1024 * 1024
_LEAST_ID_SET_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Shares of a run's memory, in bytes."""

    limit: int
    slots: int
    reader: int
    id_set: int
    row: int  # embedding, its truncation flag and its text's offset

    def result_bytes(self, rows: int, pieces: int) -> int:
        """What a SuperBatch of `rows` rows needs from the moment it is flushed."""
        return rows * self.row + pieces


def plan_memory(bounds: Bounds, space: Space, threads: int, limit: int | None) -> MemoryPlan:
    """Divide a limit, or derive one that lets three SuperBatches be alive at once.

    Raises:
        ConfigError: the limit cannot hold one SuperBatch; the text names the smallest that can.
    """
    itemsize = np.dtype(space.dtype).itemsize
    row = space.dimension * itemsize + 1 + 8
    largest_piece = piece_bytes(bounds.b_max, space.dimension, itemsize)
    slot = bounds.b_max_bytes
    # Pieces of one SuperBatch share its rows, so their sum never exceeds that of one piece per thread nor of all rows.
    result = bounds.b_max * row + min(threads * largest_piece, _all_pieces(bounds, space, itemsize))
    least = _READER_BYTES + slot + result + _LEAST_ID_SET_BYTES
    wanted = _READER_BYTES + SLOTS * (slot + result) + _ID_SET_BYTES
    if limit is None:
        return MemoryPlan(wanted, SLOTS, _READER_BYTES, _ID_SET_BYTES, row)
    if limit < least:
        raise ConfigError(
            f"a memory limit of {limit:,} bytes cannot hold one SuperBatch of {bounds.b_max:,} texts: "
            f"the smallest that works is {least:,}. Raise the limit, or lower b_max and b_max_bytes."
        )
    return MemoryPlan(limit, SLOTS, _READER_BYTES, limit - least + _LEAST_ID_SET_BYTES, row)


def _all_pieces(bounds: Bounds, space: Space, itemsize: int) -> int:
    per_row = space.dimension * 4 + space.dimension * itemsize + 256
    return bounds.b_max * per_row
