"""What the pool and its workers share: JSON messages over a Unix socket, and the memory layout of
an arena's slots.

The socket keeps message borders (SOCK_SEQPACKET), and an empty message means that the other side
has closed. Messages describe rows and do not contain them, so they have a few hundred bytes; an
arena's memory file travels as a descriptor.

One memory file holds all slots of an arena. Each slot has five regions: text offsets (int64,
Arrow's large_string layout), text bytes (UTF-8), the rows to encode where these are not all
(int32), truncation flags (uint8, one per row) and the matrix. Regions start at multiples of 64
bytes, which Arrow and vector instructions prefer, and slots at pages.

This module does not import pyarrow: workers start faster without it.
"""

from __future__ import annotations

import itertools
import json
import mmap
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 64 << 10
_ALIGNMENT = 64


def send(connection: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Raises OSError when the other side has closed."""
    # Worker reports may hold any character: UTF-8 with lone surrogates needs few bytes for each.
    content = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode(
        errors="surrogatepass"
    )
    if len(content) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a message of {len(content)} bytes is over the limit of {MAX_MESSAGE_BYTES}"
        )
    socket.send_fds(connection, [content], list(descriptors))


def receive(connection: socket.socket) -> tuple[Message, list[int]] | None:
    """The next message and its descriptors; None at the end of the connection."""
    try:
        content, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
    except ConnectionResetError:  # comes once, before what the other side has sent
        content, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
    if not content:
        return None
    return json.loads(content.decode(errors="surrogatepass")), descriptors


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The size of a slot, in rows and in bytes of UTF-8, and where its regions start."""

    max_texts: int
    max_bytes: int
    dimension: int
    dtype: str

    @property
    def starts(self) -> list[int]:
        """Of the five regions, and the end of the last one."""
        rows = self.max_texts
        matrix_bytes = rows * self.dimension * np.dtype(self.dtype).itemsize
        sizes = (8 * (rows + 1), self.max_bytes, 4 * rows, rows, matrix_bytes)
        return list(
            itertools.accumulate((_round_up(size, _ALIGNMENT) for size in sizes), initial=0)
        )

    @property
    def slot_bytes(self) -> int:
        return _round_up(self.starts[-1], mmap.PAGESIZE)


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """numpy views of one slot's regions.

    `offsets` has max_texts + 1 entries, `data` and `truncated` are uint8, `chosen` is int32
    [max_texts], `matrix` is [max_texts, dimension].
    """

    offsets: np.ndarray
    data: np.ndarray
    chosen: np.ndarray
    truncated: np.ndarray
    matrix: np.ndarray


def slot_arrays(memory: mmap.mmap, layout: SlotLayout, index: int) -> SlotArrays:
    rows = layout.max_texts
    offsets, data, chosen, truncated, matrix, _ = (
        index * layout.slot_bytes + start for start in layout.starts
    )
    return SlotArrays(
        offsets=np.frombuffer(memory, np.int64, rows + 1, offsets),
        data=np.frombuffer(memory, np.uint8, layout.max_bytes, data),
        chosen=np.frombuffer(memory, np.int32, rows, chosen),
        truncated=np.frombuffer(memory, np.uint8, rows, truncated),
        matrix=np.frombuffer(memory, layout.dtype, rows * layout.dimension, matrix).reshape(
            rows, layout.dimension
        ),
    )


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
