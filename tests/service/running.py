"""A service that answers over a socket, in a thread of the tests."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

import uvicorn
from starlette.testclient import TestClient

from surge_dagster.service.server import ServiceSettings, bound_socket, http_server, service_app
from surge_dagster.service.spaces import ServedSpaces
from tests.service.fake_spaces import FakeSpaces

GOOD = b'{"model":"current","input":"red"}'
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def sized(body: bytes, length: int | None = None) -> bytes:
    """Return a request with this body, and with its length or another one."""
    return HEAD + b"Content-Length: %d\r\n\r\n%b" % (length or len(body), body)


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    server: uvicorn.Server


def client_of(spaces: FakeSpaces, **settings: Any) -> TestClient:
    """Return a client of this machine, without a socket; defects are answered."""
    app = service_app(spaces.as_served(), ServiceSettings(**settings))
    return TestClient(app, "http://localhost", raise_server_exceptions=False)


@contextmanager
def serving(spaces: ServedSpaces, **settings: Any) -> Iterator[str]:
    """Yield the URL of a service on a free port; at the end it drains."""
    with running(spaces, **settings) as service:
        yield service.url


@contextmanager
def running(spaces: ServedSpaces, **settings: Any) -> Iterator[Running]:
    chosen = ServiceSettings(port=0, **settings)
    app = service_app(spaces, chosen)
    server = http_server(app, chosen)
    with bound_socket(chosen, server) as listener:
        listener.listen()  # who connects before the server runs is answered when it does
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with app.state.batches or nullcontext():
                yield Running("http://{}:{}".format(*listener.getsockname()), server)
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    """Yield a plain connection to the service."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        yield client


def read_answer(client: socket.socket) -> HTTPResponse:
    """Return the next answer, whose body was received."""
    answer = HTTPResponse(client)
    answer.begin()
    answer.read()
    return answer


def read_all(client: socket.socket) -> bytes:
    """Return what the service sends until it closes the connection, which it does not always do in
    order."""
    received = bytearray()
    try:
        while piece := client.recv(65536):
            received += piece
    except ConnectionError:
        pass
    return bytes(received)
