"""Unix sockets that processes which were killed have left behind."""

from __future__ import annotations

import errno
import socket
from pathlib import Path


def remove_unused(path: Path) -> None:
    """Remove the Unix socket of a process that has ended."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            if client.connect_ex(str(path)) == errno.ECONNREFUSED:  # one of another kind that is used says EPROTOTYPE
                path.unlink(missing_ok=True)
