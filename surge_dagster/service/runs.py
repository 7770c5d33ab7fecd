"""RunListener: runs of this user on this machine encode through the service's workers for documents."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from weakref import WeakValueDictionary

from surge_dagster.engine.encoder.dispatcher import Dispatcher
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.remote.connection import TURN_SECONDS, Refused, shut_down, socket_folder
from surge_dagster.engine.support import disk_cache
from surge_dagster.engine.support.waiting import wait_for_thread
from surge_dagster.service.served_run import ServedRun
from surge_dagster.service.turns import Turns
from surge_dagster.service.unix_sockets import remove_unused

log = logging.getLogger(__name__)

_MOST_RUNS = 64


class RunListener:
    """Listens at a Unix socket for runs. Use `with`.

    Args:
        pools: gives those that are served now, for documents.
        path: of the socket; None: where runs with `service: auto` find it.

    Raises:
        ConfigError: the socket cannot be bound.
    """

    def __init__(self, pools: Callable[[], Iterable[EncoderPool]], path: Path | None = None) -> None:
        self._pools = pools
        self._lock = threading.Lock()
        self._runs: dict[ServedRun, threading.Thread] = {}
        self._turns = WeakValueDictionary[Dispatcher, Turns[ServedRun]]()
        self._closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.path = path or _free_path()
            remove_unused(self.path)
            self._listener.bind(str(self.path))
            self.path.chmod(0o600)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            where = path or f"in {socket_folder()}"
            raise ConfigError(f"the socket for runs {where} cannot be bound: {error.strerror or error}") from None
        self._thread = threading.Thread(target=self._accept, name="surge-service-socket", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connections of all runs, which wait for another service and then go on by themselves."""
        with self._lock:
            self._closing = True
            runs = dict(self._runs)
        shut_down(self._listener)
        wait_for_thread(self._thread)
        for run, thread in runs.items():
            shut_down(run.connection)
            wait_for_thread(thread)
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> RunListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                self._begin(self._listener.accept()[0])
            except (OSError, RuntimeError) as error:  # such as too many open files, or threads
                if not self._closing:
                    log.warning("a run cannot connect: %s", error)
                    time.sleep(TURN_SECONDS)

    def _begin(self, connection: socket.socket) -> None:
        run = ServedRun(connection, self._pool_of, self._turns_of)
        thread = threading.Thread(target=self._serve, args=(run,), name="surge-served-run", daemon=True)
        with self._lock:
            if not self._closing and len(self._runs) < _MOST_RUNS:
                thread.start()
                self._runs[run] = thread
                return
        log.warning("a run cannot connect: there are %d", _MOST_RUNS)
        connection.close()

    def _serve(self, run: ServedRun) -> None:
        run.serve()
        with self._lock:
            del self._runs[run]

    def _pool_of(self, vectors_key: str) -> EncoderPool:
        served = {pool.space.vectors_key: pool for pool in self._pools()}
        if vectors_key not in served:
            names = ", ".join(pool.space.name for pool in served.values()) or "no space yet"
            raise Refused(f"the encoder service at {self.path} encodes {names}, and not the space of this run")
        return served[vectors_key]

    def _turns_of(self, dispatcher: Dispatcher) -> Turns[ServedRun]:
        with self._lock:
            return self._turns.setdefault(dispatcher, Turns(dispatcher))


def _free_path() -> Path:
    """In the folder where runs look, from which what ended services have left is removed."""
    folder = socket_folder()
    disk_cache.make_folder(folder)
    for path in folder.glob("*.sock"):
        remove_unused(path)
    return folder / f"{secrets.token_hex(4)}.sock"
