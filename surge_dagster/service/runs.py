"""RunListener: runs of this user on this machine encode through the service's workers for documents."""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from weakref import WeakValueDictionary

from surge_dagster.engine.encoder.dispatcher import Dispatcher
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.remote.connection import TURN_SECONDS, Refused, shut_down, socket_folder
from surge_dagster.engine.support import disk_cache
from surge_dagster.engine.support.waiting import in_background, result_of
from surge_dagster.service.served_run import ServedRun, Turns

log = logging.getLogger(__name__)


class RunListener:
    """Listens at a Unix socket for runs, which wait for `start`. Use `with`.

    Args:
        pools: gives those that are served now, for documents.
        path: of the socket; None: where runs with `service: auto` find it.

    Raises:
        ConfigError: the socket cannot be bound.
    """

    def __init__(self, pools: Callable[[], Iterable[EncoderPool]], path: Path | None = None) -> None:
        self._pools = pools
        self._lock = threading.Lock()
        self._runs: dict[ServedRun, Future[None]] = {}
        self._turns = WeakValueDictionary[Dispatcher, Turns]()
        self._closing = False
        try:
            self.path = path or _free_path()
            remove_unused(self.path)
            _bound(self.path).close()  # tried before models load; a run that connects must not wait for them
            self.path.unlink()
        except OSError as error:
            where = path or f"in {socket_folder()}"
            raise ConfigError(f"the socket for runs {where} cannot be bound: {error.strerror or error}") from None
        self._listener: socket.socket | None = None
        self._accepting: Future[None] | None = None

    def start(self) -> RunListener:
        """Answer runs from now on."""
        self._listener = _bound(self.path)
        self._listener.listen()
        self._accepting = in_background(lambda listener=self._listener: self._accept(listener), "surge-service-socket")
        return self

    def close(self) -> None:
        """End the connections of all runs, which wait for another service and then go on by themselves."""
        self._closing = True
        if self._listener is None or self._accepting is None:
            return
        shut_down(self._listener)
        result_of(self._accepting)
        for run, serving in list(self._runs.items()):
            shut_down(run.connection)
            result_of(serving)
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> RunListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing:
            try:
                run = ServedRun(listener.accept()[0], self._pool_of, self._turns_of)
                self._runs[run] = serving = in_background(run.serve, "surge-served-run")
                serving.add_done_callback(lambda _, run=run: self._runs.pop(run))
            except (OSError, RuntimeError) as error:  # such as too many open files, or threads
                if not self._closing:
                    log.warning("a run cannot connect: %s", error)
                    time.sleep(TURN_SECONDS)

    def _pool_of(self, vectors_key: str) -> EncoderPool:
        served = {pool.space.vectors_key: pool for pool in self._pools()}
        if vectors_key not in served:
            names = ", ".join(pool.space.name for pool in served.values()) or "no space yet"
            raise Refused(f"the encoder service at {self.path} encodes {names}, and not the space of this run")
        return served[vectors_key]

    def _turns_of(self, dispatcher: Dispatcher) -> Turns:
        with self._lock:
            return self._turns.setdefault(dispatcher, Turns(dispatcher))


def _bound(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        bound.bind(str(path))
        path.chmod(0o600)
    except OSError:
        bound.close()
        raise
    return bound


def _free_path() -> Path:
    """In the folder where runs look, from which what ended services have left is removed."""
    folder = socket_folder()
    disk_cache.make_folder(folder)
    for path in folder.glob("*.sock"):
        remove_unused(path)
    return folder / f"{secrets.token_hex(4)}.sock"


def remove_unused(path: Path) -> None:
    """Remove the Unix socket of a process that has ended."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            if client.connect_ex(str(path)) == errno.ECONNREFUSED:  # one of another kind that is used says EPROTOTYPE
                path.unlink(missing_ok=True)
