"""The server: what is bound, what it listens to, and how the process ends."""

from __future__ import annotations

import errno
import gc
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import uvicorn
from filelock import FileLock, Timeout
from starlette.applications import Starlette

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service.app import service_app
from surge_dagster.service.settings import ServiceSettings
from surge_dagster.service.spaces import ServedSpaces

_BACKLOG = 2048


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
    # Else a query waits for threads that count tokens of documents.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with bound_socket(settings) as listener, spaces:
        spaces.start()
        for served in spaces.served():
            promise = served.queries.promise
            within = (
                f", queries within {1000 * promise.promised_seconds:,.0f} ms" if promise else ""
            )
            say(
                f"{served.space.name} ({served.state}): {served.space.dimension} dimensions{within}"
            )
        with _in_words(settings):  # another service may have been as fast
            listener.listen(_BACKLOG)
        say(f"listening on {_shown(listener)} (queries: /v1, documents: /documents/v1)")
        # a look for garbage at all that is loaded would stop answers for a quarter of a second
        gc.freeze()
        with app.state.batches or nullcontext():
            _run(http_server(app, settings), listener)
        say("stopped")


@contextmanager
def bound_socket(settings: ServiceSettings) -> Iterator[socket.socket]:
    """A socket that does not listen yet, so that an address is refused before a model is loaded.

    Raises:
        ConfigError: it cannot be bound, or other machines could reach it without an API key.
    """
    family, proto, address = (
        _address(settings) if settings.uds is None else (socket.AF_UNIX, 0, str(settings.uds))
    )
    with ExitStack() as held:
        listener = held.enter_context(socket.socket(family, proto=proto))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with _in_words(settings):
            # which does not say whether somebody is about to listen there
            if settings.uds is not None:
                settings.uds.parent.stat()  # the lock would make the folder
                held.enter_context(FileLock(f"{settings.uds}.lock", timeout=0, thread_local=False))
                _remove_unused(settings.uds)
            listener.bind(address)
            if settings.uds is not None:  # without keys, of this user alone
                held.callback(settings.uds.unlink, missing_ok=True)
                settings.uds.chmod(0o666 if settings.api_keys else 0o600)
        yield listener


def _remove_unused(path: Path) -> None:
    """Remove the Unix socket of a process that has ended."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        if client.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink(missing_ok=True)


@contextmanager
def _in_words(settings: ServiceSettings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_locked = isinstance(error, Timeout)
        reason = os.strerror(errno.EADDRINUSE) if is_locked else error.strerror or error
        address = settings.uds or f"{settings.host}:{settings.port}"
        raise ConfigError(
            f"{address} cannot be bound: {reason}. Give another, or end what uses it."
        ) from None


def _address(settings: ServiceSettings) -> tuple[socket.AddressFamily, int, Any]:
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"the host {settings.host!r} has no address: {error.strerror}. Name another."
        ) from None
    family, _, proto, _, address = found[0]
    if settings.api_keys is None and not ipaddress.ip_address(address[0]).is_loopback:
        raise ConfigError(
            f"{settings.host} can be reached from other machines, and the service has no API keys: give them with "
            "--api-keys FILE, or listen on 127.0.0.1 or a Unix socket (--uds PATH)."
        )
    return family, proto, address


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


def http_server(app: Starlette, settings: ServiceSettings) -> uvicorn.Server:
    """Return uvicorn with its own limits, whose `should_exit` ends it when what it has accepted is
    answered."""
    config = uvicorn.Config(
        app,
        http="h11",  # whose headers have a limit
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # a client could write any number of warnings
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        limit_concurrency=settings.max_connections,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_keep_alive=settings.idle_seconds,
        timeout_graceful_shutdown=settings.drain_seconds,
    )
    server = uvicorn.Server(config)
    app.state.is_ending = lambda: server.should_exit
    return server
