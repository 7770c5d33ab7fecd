"""The server: what is bound, how long a client may take, and how the process ends."""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

import uvicorn
from filelock import FileLock, Timeout
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.app import service_app
from surge_dagster.service.runs import RunListener
from surge_dagster.service.settings import ServiceSettings
from surge_dagster.service.spaces import ServedSpaces
from surge_dagster.service.unix_sockets import remove_unused

_BACKLOG = 2048


def run_service(spaces: ServedSpaces, settings: ServiceSettings, say: Callable[[str], None]) -> None:
    """Start the spaces, answer requests until SIGTERM or Ctrl-C, and close the spaces when all are answered.

    Call it in the main thread.

    Args:
        say: prints a line for the operator.

    Raises:
        ConfigError: the address cannot be bound, or may not be without API keys; or a space cannot be served.
    """
    app = service_app(spaces, settings)
    with bound_socket(settings) as listener, spaces:
        spaces.start()
        for served in spaces.served():
            promise = served.queries.promise
            within = f", queries within {1000 * promise.promised_seconds:,.0f} ms" if promise else ""
            say(f"{served.space.name} ({served.state}): {served.space.dimension} dimensions{within}")
        with _in_words(settings):  # another service may have been as fast
            listener.listen(_BACKLOG)
        say(f"listening on {_shown(listener)} (queries: /v1, documents: /documents/v1)")
        with _run_listener(spaces, settings, say), app.state.batches or nullcontext():
            ServiceServer(app, settings).run(sockets=[listener])
        say("stopped")


def _run_listener(
    spaces: ServedSpaces, settings: ServiceSettings, say: Callable[[str], None]
) -> AbstractContextManager[object]:
    def pools() -> list[EncoderPool]:
        return [served.documents.pool for served in spaces.served()]

    try:
        listener = RunListener(pools, settings.run_socket)
    except ConfigError as error:
        if settings.run_socket is not None:
            raise
        say(f"runs encode by themselves: {error}")  # such as a container in which nothing can be written
        return nullcontext()
    say(f"runs of this user on this machine encode here: {listener.path}")
    return listener


@contextmanager
def bound_socket(settings: ServiceSettings) -> Iterator[socket.socket]:
    """A socket that does not listen yet, so that an address is refused before a model is loaded.

    Raises:
        ConfigError: it cannot be bound, or other machines could reach it without an API key.
    """
    family, address = _address(settings) if settings.uds is None else (socket.AF_UNIX, str(settings.uds))
    with ExitStack() as held:
        listener = held.enter_context(socket.socket(family))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with _in_words(settings):
            if settings.uds is not None:  # which does not say whether somebody is about to listen there
                settings.uds.parent.stat()  # the lock would make the folder
                held.enter_context(FileLock(f"{settings.uds}.lock", timeout=0, thread_local=False))
                remove_unused(settings.uds)
            listener.bind(address)
            if settings.uds is not None:  # without keys, of this user alone
                held.callback(settings.uds.unlink, missing_ok=True)
                settings.uds.chmod(0o666 if settings.api_keys else 0o600)
        yield listener


@contextmanager
def _in_words(settings: ServiceSettings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_locked = isinstance(error, Timeout)
        reason = os.strerror(errno.EADDRINUSE) if is_locked else error.strerror or error
        address = settings.uds or f"{settings.host}:{settings.port}"
        raise ConfigError(f"{address} cannot be bound: {reason}. Give another, or end what uses it.") from None


def _address(settings: ServiceSettings) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"the host {settings.host!r} has no address: {error.strerror}. Name another.") from None
    family, _, _, _, address = found[0]
    if settings.api_keys is None and not ipaddress.ip_address(address[0]).is_loopback:
        raise ConfigError(
            f"{settings.host} can be reached from other machines, and the service has no API keys: give them with "
            "--api-keys FILE, or listen on 127.0.0.1 or a Unix socket (--uds PATH)."
        )
    return family, address


def _shown(listener: socket.socket) -> str:
    address = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"the Unix socket {address}"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}"


class ServiceServer(uvicorn.Server):
    """uvicorn whose clients learn before that it will end."""

    def __init__(self, app: Starlette, settings: ServiceSettings) -> None:
        self._app = app
        config = uvicorn.Config(
            app,
            http=_bounded_protocol(settings.header_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # a client could write any number of warnings
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            h11_max_incomplete_event_size=settings.max_header_bytes,
            timeout_graceful_shutdown=math.ceil(settings.drain_seconds),
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own, which raises the signal again when all is answered: the process would not end as done.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = self._app.state.draining = True


def _bounded_protocol(seconds: float) -> type[H11Protocol]:
    class Bounded(H11Protocol):
        """Ends a connection that for `seconds` has neither begun a request nor read what was written to it.

        uvicorn bounds the time between two requests alone, and forgets even that when one byte of the next one arrives.
        """

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._look(None)

        def _look(self, before: tuple[Any, int] | None) -> None:
            state = self.cycle, self.transport.get_write_buffer_size()
            is_waiting = self.cycle is None or self.cycle.response_complete or self.flow.write_paused
            if is_waiting and state == before:
                self.transport.abort()
            else:
                self._next_look = self.loop.call_later(seconds, self._look, state)

        def connection_lost(self, exc: Exception | None) -> None:
            self._next_look.cancel()
            super().connection_lost(exc)

    return Bounded
