"""The connection between a run and the encoder service of its machine: where it is, and what both must agree on.

Both speak the messages of `encoder.protocol` over a Unix socket. The memory files of a run's arenas travel as
descriptors, and the service hands them on to its workers: no text and no vector is copied.

A run sends `hello` with what must be equal for both to make the same vectors, and is answered with `ready`, or with
`refused` and the reason. Then it sends `arena`, `drop` and `encode`. The service answers each `encode` with
`progress`, at least once a second, and with `done` when none of its workers writes to the slot any longer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from surge_dagster.engine.encoder import protocol
from surge_dagster.engine.encoder.worker_process import WorkerSeat
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support import disk_cache
from surge_dagster.version import __version__

SILENCE_SECONDS = 30.0  # after which a service that has work is given up
TURN_SECONDS = 1.0
# Of an arena's memory; the last of them forbids further ones, such as one against writing.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Refused(SurgeError):
    """The service does not encode for this run."""


class Lost(SurgeError):
    """Nobody listens at the socket, or nobody answers any longer."""


def socket_folder() -> Path:
    """Where services of this user on this machine have their sockets; machines may share it."""
    return disk_cache.place(f"services/{socket.gethostname()}/any").parent


def requirements(space: Space, seat: WorkerSeat) -> protocol.Message:
    """What decides the vectors that the worker of a seat makes, by the name that a refusal shows."""
    settings = seat.load_message["settings"]
    precisions = dict.fromkeys(filter(None, (settings["precision"], settings["fallback_precision"])))
    return {
        "version": __version__,
        "space": space.vectors_key,
        "precision": " or ".join(precisions),
        "backend": seat.load_message["backend"],
    }


def peer(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    return process, user


def shut_down(connection: socket.socket) -> None:
    """Ends the waits of other threads for it, too."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Connection:
    """A connection to a service that has agreed to encode.

    Args:
        required: `requirements` of the run.
        is_over: whether nobody waits for the service any longer.

    Attributes:
        ready: the message in which the service describes its workers.

    Raises:
        Refused: the service does not encode this.
        Lost: there is no service.
    """

    def __init__(self, path: Path, required: protocol.Message, is_over: Callable[[], bool]) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(TURN_SECONDS)
        try:
            self.socket.connect(str(path))
            if (user := peer(self.socket)[1]) != os.geteuid():
                raise Refused(f"the encoder service at {path} belongs to another user (uid {user})")
            protocol.send(self.socket, {"op": "hello"} | required)
            self.ready = self._first_answer(is_over)
        except OSError as error:
            self.socket.close()
            raise Lost(f"no encoder service answers at {path} ({error.strerror or error})") from None
        except BaseException:
            self.socket.close()
            raise

    def receive(self) -> protocol.Message | None:
        """The next message, or None after a second without one; `Lost` at the end of the connection."""
        try:
            received = protocol.receive(self.socket)
        except TimeoutError:
            return None
        except (OSError, ValueError) as error:
            raise Lost(f"the connection to the encoder service at {self.path} broke: {error}") from None
        if received is None:
            raise Lost(f"the encoder service at {self.path} ended")
        return received[0]

    def _first_answer(self, is_over: Callable[[], bool]) -> protocol.Message:
        """It may take minutes where the service loads a model first, but it says so every second."""
        heard_at = time.monotonic()
        while time.monotonic() - heard_at < SILENCE_SECONDS and not is_over():
            if (message := self.receive()) is None:
                continue
            heard_at = time.monotonic()
            if message["op"] == "refused":
                raise Refused(message["message"])
            if message["op"] == "ready":
                return message
        raise Lost(f"the encoder service at {self.path} does not answer")
