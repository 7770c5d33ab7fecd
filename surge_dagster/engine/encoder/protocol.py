"""What the pool and its workers share: JSON messages over a Unix socket, and the memory layout of an arena's slots.

The socket keeps message borders (SOCK_SEQPACKET): one receive is one message, and an empty one means that the other
side has closed. An arena's memory file travels as a file descriptor with its message. Messages describe rows and do
not contain them, so they have a few hundred bytes whatever the SuperBatch; nothing is pickled.

One anonymous memory file holds all slots of an arena. Each slot has five regions, in the order in which they are
written: text offsets (int64, Arrow's large_string layout), text bytes (UTF-8), the rows to encode where these are not
all (int32), truncation flags (uint8, one per row) and the matrix. Regions start at multiples of 64 bytes, which Arrow
and vector instructions prefer, and slots at pages.

This module does not import pyarrow: workers start faster without it.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 64 << 10
# Makes a worker print the stacks of its threads; a signal also reaches a worker that hangs.
DUMP_STACKS = signal.SIGUSR1
_MAX_DESCRIPTORS = 4
_ALIGNMENT = 64


def send(connection: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Sends one message with open file descriptors; raises OSError when the other side has closed."""
    # Worker reports may hold any character: UTF-8 with lone surrogates needs few bytes for each.
    content = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    if len(content) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(content)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    socket.send_fds(connection, [content], list(descriptors))


def receive(connection: socket.socket) -> tuple[Message, list[int]] | None:
    """The next message and its descriptors; None at the end of the connection."""
    try:
        content, descriptors, flags, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
    except ConnectionResetError:
        return None
    if not content:
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ValueError("a message arrived truncated")
    return json.loads(content.decode(errors="surrogatepass")), descriptors


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The size of a slot, in rows and in bytes of UTF-8, and the starts of its regions, in bytes."""

    max_texts: int
    max_bytes: int
    dimension: int
    dtype: str

    @property
    def data_start(self) -> int:
        return _round_up((self.max_texts + 1) * 8, _ALIGNMENT)

    @property
    def chosen_start(self) -> int:
        return self.data_start + _round_up(self.max_bytes, _ALIGNMENT)

    @property
    def flags_start(self) -> int:
        return self.chosen_start + _round_up(self.max_texts * 4, _ALIGNMENT)

    @property
    def matrix_start(self) -> int:
        return self.flags_start + _round_up(self.max_texts, _ALIGNMENT)

    @property
    def slot_bytes(self) -> int:
        matrix_bytes = self.max_texts * self.dimension * np.dtype(self.dtype).itemsize
        return _round_up(self.matrix_start + matrix_bytes, mmap.PAGESIZE)


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """numpy views of one slot's regions; no bytes are copied.

    `offsets` has max_texts + 1 entries, `data` and `truncated` are uint8, `chosen` is int32 [max_texts], `matrix` is
    [max_texts, dimension].
    """

    offsets: np.ndarray
    data: np.ndarray
    chosen: np.ndarray
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
        chosen=np.frombuffer(memory, np.int32, rows, base + layout.chosen_start),
        truncated=np.frombuffer(memory, np.uint8, rows, base + layout.flags_start),
        matrix=matrix.reshape(rows, layout.dimension),
    )


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
