"""The server: what is bound, what it listens to, and how the process ends.

All that depends on more of uvicorn than its settings is here: `TimedProtocol`.
"""

from __future__ import annotations

import gc
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.app import ServiceSettings, service_app
from surge_dagster.service.spaces import ServedSpaces

_LAST_DATA_RECV = 52  # where `tcp_info` of linux/tcp.h has tcpi_last_data_recv, in milliseconds


def run_service(
    spaces: ServedSpaces, settings: ServiceSettings, say: Callable[[str], None]
) -> None:
    """Start the spaces, answer requests until SIGTERM or Ctrl-C, and close the spaces when all are
    answered.

    Call it in the main thread.

    Args:
        say: prints a line for the operator.

    Raises:
        ConfigError: the address cannot be bound, or may not be without API keys; or a space cannot
            be served.
    """
    app = service_app(spaces, settings)
    server = http_server(app, settings)
    # Else a query waits for threads that tokenize documents.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with bound_socket(settings, server) as listener, spaces:
        spaces.start()
        for served in spaces.served():
            line = f"{served.space.name} ({served.state}): {served.space.dimension} dimensions"
            if served.queries.promise is not None:
                seconds = served.queries.promise.promised_seconds
                line += f", queries within {1000 * seconds:,.0f} ms"
            say(line)
        listener.listen(server.config.backlog)  # connections wait until uvicorn accepts them
        say(f"listening on {_shown(listener)} (queries: /v1, documents: /documents/v1)")
        # Looking for garbage in all that is loaded would stop answers for a quarter of a second.
        gc.freeze()
        with app.state.batches or nullcontext():
            _run(server, listener)
        say("stopped")


@contextmanager
def bound_socket(settings: ServiceSettings, server: uvicorn.Server) -> Iterator[socket.socket]:
    """Yield a socket that does not listen yet, so that an address is refused before a model is
    loaded.

    Raises:
        ConfigError: it cannot be bound, or other machines could reach it without an API key.
    """
    if settings.uds is not None and settings.uds.is_socket():  # of a process that has ended
        settings.uds.unlink()
    try:
        listener = server.config.bind_socket()
    except (SystemExit, OSError):
        address = settings.uds or f"{settings.host}:{settings.port}"
        message = f"{address} cannot be bound. Give another address, or end what uses it."
        raise ConfigError(message) from None
    try:
        if settings.api_keys is None:
            _require_private(listener, settings)
        yield listener
    finally:
        listener.close()
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)


def _require_private(listener: socket.socket, settings: ServiceSettings) -> None:
    """Without keys, only this machine can connect, and to a Unix socket only this user."""
    if settings.uds is not None:
        settings.uds.chmod(0o600)
    elif not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        raise ConfigError(
            f"{settings.host} can be reached from other machines, and the service has no API keys. "
            "Give them with --api-keys FILE, or listen on 127.0.0.1 or a Unix socket (--uds PATH)."
        )


def _shown(listener: socket.socket) -> str:
    address = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"the Unix socket {address}"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}"


def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    try:
        server.run(sockets=[listener])
    except BaseException as error:
        # When all is answered, uvicorn raises the signal that ended it once more.
        if isinstance(error, Exception) or not server.should_exit:
            raise


class TimedProtocol(H11Protocol):
    """Notes when a request arrived.

    Under overload requests wait in the kernel until the event loop reads them, which a clock that
    starts in the application does not see. ASGI has no place for it, so this is a subclass.
    """

    def data_received(self, data: bytes) -> None:
        arrived_at = time.monotonic() - _seconds_unread(self.transport.get_extra_info("socket"))
        super().data_received(data)  # which starts the request later
        if self.scope:
            self.scope.setdefault("state", {})["arrived_at"] = arrived_at


def _seconds_unread(connection: socket.socket) -> float:
    """Return how long ago the kernel received the newest bytes."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV + 4)
    except OSError:  # a Unix socket
        return 0.0
    (milliseconds,) = struct.unpack_from("I", info, _LAST_DATA_RECV)
    return milliseconds / 1000


def http_server(app: Starlette, settings: ServiceSettings) -> uvicorn.Server:
    """Return uvicorn with its own limits; its `should_exit` ends it when all requests that it has
    accepted are answered."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        uds=str(settings.uds) if settings.uds else None,
        http=TimedProtocol,  # h11 limits headers
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # a client could write any number of warnings
        access_log=False,
        server_header=False,
        limit_concurrency=settings.max_connections,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_keep_alive=settings.idle_seconds,
        timeout_graceful_shutdown=settings.drain_seconds,
    )
    server = uvicorn.Server(config)
    app.state.is_ending = lambda: server.should_exit
    return server
