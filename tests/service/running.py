"""A service that answers over a socket, in a thread of the tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

import uvicorn

from surge_dagster.service.app import service_app
from surge_dagster.service.server import bound_socket, http_server
from surge_dagster.service.settings import ServiceSettings
from surge_dagster.service.spaces import ServedSpaces


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    server: uvicorn.Server


@contextmanager
def serving(spaces: ServedSpaces, **settings: Any) -> Iterator[str]:
    """The URL of a service on a free port; at the end it drains."""
    with running(spaces, **settings) as service:
        yield service.url


@contextmanager
def running(spaces: ServedSpaces, **settings: Any) -> Iterator[Running]:
    chosen = ServiceSettings(port=0, **settings)
    with bound_socket(chosen) as listener:
        listener.listen()  # who connects before the server runs is answered when it does
        app = service_app(spaces, chosen)
        server = http_server(app, chosen)
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
    """A plain connection to the service."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        yield client


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for a state that no event tells of."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def read_answer(client: socket.socket) -> HTTPResponse:
    """The next answer, whose body was received."""
    answer = HTTPResponse(client)
    answer.begin()
    answer.read()
    return answer


def read_all(client: socket.socket) -> bytes:
    """What the service sends until it closes the connection, which it does not always do in order."""
    received = bytearray()
    try:
        while chunk := client.recv(65536):
            received += chunk
    except ConnectionError:
        pass
    return bytes(received)
