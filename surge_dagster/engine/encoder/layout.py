"""The memory layout of an arena's slots, shared by the pool and its workers. Does not import pyarrow.

One anonymous memory file holds all slots of an arena. Each slot has four regions, in the order in which they are
written: text offsets (int64, Arrow's large_string layout), text bytes (UTF-8), truncation flags (uint8, one per row)
and the matrix. Regions start at multiples of 64 bytes, which Arrow and vector instructions prefer, and slots at pages.
"""

from __future__ import annotations

import mmap
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The size of a slot and the starts of its regions, in bytes.

    Attributes:
        max_texts: rows a slot can hold.
        max_bytes: UTF-8 bytes a slot can hold.
        dimension: columns of the matrix.
        dtype: type of the matrix, "float32" or "float16".
    """

    max_texts: int
    max_bytes: int
    dimension: int
    dtype: str

    @property
    def data_start(self) -> int:
        return _round_up((self.max_texts + 1) * 8, _ALIGNMENT)

    @property
    def flags_start(self) -> int:
        return self.data_start + _round_up(self.max_bytes, _ALIGNMENT)

    @property
    def matrix_start(self) -> int:
        return self.flags_start + _round_up(self.max_texts, _ALIGNMENT)

    @property
    def slot_bytes(self) -> int:
        matrix_bytes = self.max_texts * self.dimension * np.dtype(self.dtype).itemsize
        return _round_up(self.matrix_start + matrix_bytes, mmap.PAGESIZE)

    def to_json(self) -> dict[str, Any]:
        """The fields, for a message to a worker."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """numpy views of one slot's regions; no bytes are copied.

    `offsets` has max_texts + 1 entries, `data` and `truncated` are uint8, `matrix` is [max_texts, dimension].
    """

    offsets: np.ndarray
    data: np.ndarray
    truncated: np.ndarray
    matrix: np.ndarray


def slot_arrays(memory: mmap.mmap, layout: SlotLayout, index: int) -> SlotArrays:
    """The regions of slot `index` in an arena's memory."""
    base = index * layout.slot_bytes
    rows = layout.max_texts
    matrix = np.frombuffer(memory, layout.dtype, rows * layout.dimension, base + layout.matrix_start)
    return SlotArrays(
        offsets=np.frombuffer(memory, np.int64, rows + 1, base),
        data=np.frombuffer(memory, np.uint8, layout.max_bytes, base + layout.data_start),
        truncated=np.frombuffer(memory, np.uint8, rows, base + layout.flags_start),
        matrix=matrix.reshape(rows, layout.dimension),
    )


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
