"""The arena: SuperBatches in memory shared with the workers, so that no text or vector is ever
pickled.

An arena is one anonymous memory file (`memfd_create`), mapped by this process and by every worker:
no crash leaves a segment behind, and the size of /dev/shm does not limit it. Pages are allocated
when they are first written and given back with their slot. Texts are stored in Arrow's layout, so
rows are an Arrow array without a copy, and workers write each vector to its final row, so
serializers read the memory that the encoder wrote.

A slot belongs to its acquirer until `release()`; views of it are valid just as long. A slot that a
worker may still write to goes back to the arena only when the worker has finished with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.protocol import SlotLayout, slot_arrays
from surge_dagster.engine.errors import Cancelled
from surge_dagster.engine.support.values import value_parts

_POLL_SECONDS = 0.05
# mmap's own keeps the GIL, for 0.1 s with a slot of 500 MB
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_KEYS = itertools.count()
# numpy releases the GIL for larger copies; with tiny partitions the reader would then wait for the
# GIL after each one.
_COPIED_WITH_GIL_BYTES = 64 * 1024
_MOVED_ROWS = 256


@dataclass(frozen=True, slots=True)
class KnownVectors:
    """The vectors that some of the rows have which are appended together.

    Attributes:
        rows: their places among the appended ones, int64 [n], ascending.
        matrix: [n, dimension], of the slot's type.
        truncated: of their texts, bool [n].
    """

    rows: np.ndarray
    matrix: np.ndarray
    truncated: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def between(self, start: int, stop: int) -> KnownVectors | None:
        """Return those of rows start..stop, which count from 0 then; None if there are none."""
        first, end = np.searchsorted(self.rows, (start, stop)).tolist()
        if first == end:
            return None
        part = slice(first, end)
        return KnownVectors(self.rows[part] - start, self.matrix[part], self.truncated[part])


class ArenaClosed(RuntimeError):
    """The arena is closed, so it has no slots."""


class Arena:
    """A fixed number of equal slots in shared memory, from `EncoderPool.arena`; `on_close` is
    called once, and closes the file `fd`."""

    def __init__(
        self,
        *,
        slots: int,
        max_texts: int,
        max_bytes: int,
        dimension: int,
        dtype: str,
        on_close: Callable[[Arena], None] | None = None,
    ) -> None:
        self.layout = SlotLayout(
            max_texts=max_texts, max_bytes=max_bytes, dimension=dimension, dtype=dtype
        )
        self.slots = slots
        self.key = next(_KEYS)
        self.fd = os.memfd_create("surge-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, slots * self.layout.slot_bytes)
            self._memory = mmap.mmap(self.fd, slots * self.layout.slot_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._on_close = on_close
        self.is_closed = False
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(slots):
            self._free.put(index)

    def acquire(self, cancelled: Callable[[], bool] | None = None) -> Slot:
        """Return an empty slot, and wait until one is free.

        Raises:
            Cancelled: `cancelled()` is true.
            ArenaClosed: there will be none.
        """
        seconds = 0.0
        while not self.is_closed:
            with contextlib.suppress(queue.Empty):
                return Slot(self, self._memory, self._free.get(timeout=seconds))
            if cancelled is not None and cancelled():
                raise Cancelled("gave up waiting for a slot")
            seconds = _POLL_SECONDS
        raise ArenaClosed("the arena is closed")

    def close(self) -> None:
        """Frees the memory when its last view ends; threads that wait for a slot give up."""
        if self.is_closed:
            return
        self.is_closed = True
        # The mapping lives as long as its last view: Arrow tables may still point into it.
        if self._on_close is None:
            os.close(self.fd)
        else:
            self._on_close(self)

    def _take_back(self, index: int) -> None:
        size = self.layout.slot_bytes
        if _madvise(self._address + index * size, size, mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), "the memory of a slot cannot be given back")
        self._free.put(index)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Slot:
    """One SuperBatch: texts first, then, after `EncoderPool.encode`, their vectors. Used by one
    thread at a time.

    A row may have its vector from the start (`KnownVectors`); `text_bytes` counts the UTF-8 bytes
    of all rows.
    """

    def __init__(self, arena: Arena, memory: mmap.mmap, index: int) -> None:
        self.arena = arena
        self.index = index
        self._memory = memory
        self._data_start = index * arena.layout.slot_bytes + arena.layout.starts[1]
        self._arrays = slot_arrays(memory, arena.layout, index)
        self._arrays.offsets[0] = 0
        self._rows = 0
        self.text_bytes = 0
        self._pins = 1  # that of its acquirer
        self._released = False
        self._is_known = np.zeros(arena.layout.max_texts, np.bool_)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._rows

    @property
    def room(self) -> tuple[int, int]:
        """Rows and bytes that still fit."""
        return (
            self.arena.layout.max_texts - self._rows,
            self.arena.layout.max_bytes - self.text_bytes,
        )

    @property
    def offsets(self) -> np.ndarray:
        """Where each text starts, in bytes: one entry more than rows."""
        return self._arrays.offsets[: self._rows + 1]

    def append(
        self,
        texts: pa.LargeStringArray,
        parts: tuple[np.ndarray, memoryview] | None = None,
        known: KnownVectors | None = None,
    ) -> None:
        """Append a copy of `texts`; `parts` are their `value_parts`.

        Raises:
            ValueError: they do not fit, or one is null.
        """
        count = len(texts)
        if count == 0:
            return
        if texts.null_count:
            raise ValueError(f"{texts.null_count} of {count} texts are null")
        offsets, values = parts or value_parts(texts)
        size = len(values)
        rows = self._rows
        end = self.text_bytes
        free_rows, free_bytes = self.room
        if count > free_rows or size > free_bytes:
            raise ValueError(
                f"{count} texts of {size} bytes do not fit: "
                f"room for {free_rows} texts of {free_bytes} bytes"
            )
        if size <= _COPIED_WITH_GIL_BYTES:
            self._memory[self._data_start + end : self._data_start + end + size] = values
        else:
            self._arrays.data[end : end + size] = np.frombuffer(values, np.uint8)
        np.add(
            offsets[1:],
            end - offsets.item(0),
            out=self._arrays.offsets[rows + 1 : rows + 1 + count],
        )
        if known is not None:
            self._put(known, rows)
        self._rows = rows + count
        self.text_bytes = end + size

    def _put(self, known: KnownVectors, first: int) -> None:
        rows = first + known.rows
        self._arrays.matrix[rows] = known.matrix
        self._arrays.truncated[rows] = known.truncated
        self._is_known[rows] = True

    def is_known(self, start: int, stop: int) -> np.ndarray:
        """Return which of rows start..stop were appended with their vectors, bool [n]."""
        self._check(start, stop)
        return self._is_known[start:stop]

    def choose(self, rows: np.ndarray) -> None:
        self._arrays.chosen[: len(rows)] = rows

    def texts(self, start: int, stop: int) -> pa.LargeStringArray:
        """An Arrow array over the shared memory."""
        self._check(start, stop)
        data = self._arrays.data[: self.text_bytes]
        return pa.LargeStringArray.from_buffers(
            stop - start,
            pa.py_buffer(self._arrays.offsets[start : stop + 1]),
            pa.py_buffer(data),
            None,
            0,
        )

    def matrix(self, start: int, stop: int) -> np.ndarray:
        """Return the vectors of rows start..stop, [n, dimension], over the shared memory."""
        self._check(start, stop)
        return self._arrays.matrix[start:stop]

    def copy_vectors(self, rows: np.ndarray, to: np.ndarray) -> None:
        self._arrays.matrix[to] = self._arrays.matrix[rows]
        self._arrays.truncated[to] = self._arrays.truncated[rows]

    def truncation(self, start: int, stop: int) -> np.ndarray:
        """Whether rows start..stop were longer than the model reads, bool [n]."""
        self._check(start, stop)
        return self._arrays.truncated[start:stop] != 0

    def move_tail(self, start: int, other: Slot) -> None:
        """Move rows start.. into the empty slot `other`, with the vectors that they have."""
        self._check(start, self._rows)
        if len(other):
            raise ValueError(f"the other slot is not empty: it has {len(other)} rows")
        other.append(self.texts(start, self._rows))
        self._move_vectors(start, other)
        self.truncate(start)

    def _move_vectors(self, start: int, other: Slot) -> None:
        """Move known vectors of rows start.., and free their memory here as they move."""
        moved = np.flatnonzero(self._is_known[start : self._rows])
        freed = self._matrix_page(start, mmap.PAGESIZE - 1)
        for first in range(0, len(moved), _MOVED_ROWS):
            places = moved[first : first + _MOVED_ROWS]
            rows = start + places
            vectors = KnownVectors(places, self._arrays.matrix[rows], self._arrays.truncated[rows])
            other._put(vectors, 0)
            free_to = self._matrix_page(int(rows[-1]) + 1)
            if free_to > freed:
                self._memory.madvise(mmap.MADV_REMOVE, freed, free_to - freed)
                freed = free_to

    def _matrix_page(self, row: int, up: int = 0) -> int:
        """Return where the page of a row of the matrix begins; `up` rounds to the next one."""
        layout = self.arena.layout
        place = (
            self.index * layout.slot_bytes + layout.starts[4] + row * self._arrays.matrix.strides[0]
        )
        return (place + up) // mmap.PAGESIZE * mmap.PAGESIZE

    def truncate(self, rows: int) -> None:
        self._check(rows, self._rows)
        self._is_known[rows : self._rows] = False
        self._rows = rows
        self.text_bytes = int(self._arrays.offsets[rows])

    def release(self) -> None:
        """Give the slot back to the arena, and its memory to the system; its views end."""
        with self._lock:
            if self._released:
                return
            self._released = True
        self.unpin()

    def pin(self) -> None:
        """Keeps the slot from being acquired again while a worker may write to it."""
        with self._lock:
            self._pins += 1

    def unpin(self) -> None:
        """Undoes one `pin`; the last one gives the memory of a released slot back."""
        with self._lock:
            self._pins -= 1
            if self._pins:
                return
        self.arena._take_back(self.index)

    def _check(self, start: int, stop: int) -> None:
        if self._released:
            raise ValueError("the slot was released")
        if not 0 <= start <= stop <= self._rows:
            raise ValueError(f"rows {start}..{stop} are not within 0..{self._rows}")
