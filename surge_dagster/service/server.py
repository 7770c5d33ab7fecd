"""The service: the HTTP application, what the server binds and listens to, and how it ends.

All that depends on more of uvicorn than its settings is here: `TimedProtocol`.
"""

from __future__ import annotations

import gc
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, params
from fastapi.security import HTTPBearer
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from surge_dagster.engine.errors import ConfigError
from surge_dagster.service import batches
from surge_dagster.service.batches import Batches
from surge_dagster.service.embeddings import ROOTS, EmbeddingRoutes
from surge_dagster.service.errors import HANDLERS, Error, Refusal
from surge_dagster.service.gate import ApiKeys, Gate, Metrics
from surge_dagster.service.spaces import ServedSpaces
from surge_dagster.version import __version__

_LAST_DATA_RECV = 52  # where `tcp_info` of linux/tcp.h has tcpi_last_data_recv, in milliseconds
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
# Of each operation, for the OpenAPI document.
_ANY_REFUSAL: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "refused; 429 has the header Retry-After", "model": Error},
    "5XX": {"description": "failed; 503 has the header Retry-After", "model": Error},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Where the service listens, and its limits.

    Attributes:
        port: 0 takes a free one.
        uds: path of a Unix socket, which is bound in place of `host` and `port`.
        api_keys: file of digests, see `ApiKeys`; without one only this machine is served.
        batches: folder for files and batches; without one there are none.
        max_answer_bytes: of the vectors of all answers that are not sent yet.
        max_connections: at a time; below the 1,024 descriptors that Linux gives a process by
            default.
        idle_seconds: between two requests of a connection; more than the 60 s of nginx.
        drain_seconds: time after SIGTERM for the answers to requests that were accepted.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    uds: Path | None = None
    api_keys: Path | None = None
    batches: Path | None = None
    max_body_bytes: int = 8 * 1024 * 1024
    max_answer_bytes: int = 512 * 1024 * 1024
    max_header_bytes: int = 16 * 1024
    max_connections: int = 900
    idle_seconds: int = 75
    drain_seconds: int = 25


def service_app(spaces: ServedSpaces, settings: ServiceSettings) -> FastAPI:
    """Return the application; while `app.state.is_ending()`, it ends connections.

    The caller starts `app.state.batches`, when the spaces are started, and closes it before them;
    None without a folder.

    Args:
        spaces: started by the caller, who also closes them.

    Raises:
        ConfigError: the file of API keys is wrong, or the folder of batches.
    """
    keys = ApiKeys(settings.api_keys) if settings.api_keys else None
    metrics = Metrics(spaces)
    gate = Middleware(Gate, spaces, keys, metrics, is_private=settings.uds is not None)
    app = FastAPI(
        title="surge-dagster",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        max_body_size=settings.max_body_bytes,
        middleware=[gate],
        exception_handlers=HANDLERS,
        responses=_ANY_REFUSAL,
    )
    app.state.is_ending = lambda: False
    app.state.batches = None
    routers = [EmbeddingRoutes(spaces, settings.max_answer_bytes).router]
    if settings.batches:
        app.state.batches = Batches(spaces, settings.batches)
        routers.append(batches.router)
    # The gate checks keys, before a body is read; this is for the OpenAPI document.
    with_key = [Depends(HTTPBearer(auto_error=False))] if keys else []
    for root in ROOTS:
        for router in routers:
            app.include_router(router, prefix=root, dependencies=with_key)
    _add_metrics(app, metrics, with_key)
    _add_probes(app, spaces)
    return app


def _add_metrics(app: FastAPI, metrics: Metrics, dependencies: Sequence[params.Depends]) -> None:
    @app.get("/metrics", response_class=PlainTextResponse, dependencies=dependencies)
    async def read_metrics() -> Response:
        """Return metrics of Prometheus."""
        return Response(metrics.text(), headers={"content-type": _PROMETHEUS})


def _add_probes(app: FastAPI, spaces: ServedSpaces) -> None:
    @app.get("/healthz")
    async def health() -> dict[str, str]:
        """Tell whether queries can be encoded."""
        if not spaces.is_alive:
            message = "No worker encodes queries of the current space."
            raise Refusal(503, "encoder_down", message)
        return {"status": "ok"}

    @app.get("/readyz")
    async def readiness() -> dict[str, str]:
        """Tell whether to send requests here."""
        if not spaces.is_ready:
            message = "The current space cannot be queried yet."
            raise Refusal(503, "space_loading", message)
        return {"status": "ok"}


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
        for served in spaces.served:
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


def http_server(app: FastAPI, settings: ServiceSettings) -> uvicorn.Server:
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
