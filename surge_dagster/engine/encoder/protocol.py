"""What passes between the pool and a worker: small JSON messages over a Unix socket, never a pickle.

The socket keeps message borders (SOCK_SEQPACKET), so one receive is one message and an empty one is the other side's
end. An arena's memory file travels as a file descriptor beside its message. Messages are a few hundred bytes, whatever
the SuperBatch: a descriptor of rows, not the rows.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import Any

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 64 << 10
# Has a worker print the stacks of its threads: the one question that also reaches a worker that hangs.
ASK_WHERE = signal.SIGUSR1
_MAX_DESCRIPTORS = 4


def send(connection: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Sends one message and, beside it, open file descriptors."""
    # UTF-8 that lets lone surrogates pass: what a worker reports may hold any character, and few bytes for each.
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
        raise ValueError("a message arrived cut off")
    return json.loads(content.decode(errors="surrogatepass")), descriptors
