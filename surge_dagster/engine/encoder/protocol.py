"""The protocol between the pool and a worker: small JSON messages over a Unix socket, never a pickle.

The socket keeps message borders (SOCK_SEQPACKET): one receive is one message, and an empty one means that the other
side has closed. An arena's memory file travels as a file descriptor with its message. Messages describe rows and do
not contain them, so they have a few hundred bytes whatever the SuperBatch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import Any

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 64 << 10
# Makes a worker print the stacks of its threads; a signal also reaches a worker that hangs.
DUMP_STACKS = signal.SIGUSR1
_MAX_DESCRIPTORS = 4


def send(connection: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Sends one message with open file descriptors.

    Raises:
        ValueError: the message is longer than `MAX_MESSAGE_BYTES`.
        OSError: the other side has closed.
    """
    # Worker reports may hold any character: UTF-8 with lone surrogates needs few bytes for each.
    content = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    if len(content) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(content)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    if descriptors:
        socket.send_fds(connection, [content], list(descriptors))
    else:
        connection.send(content)


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
